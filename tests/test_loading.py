"""4-bit loading: the same bytes as transformers', each part where the plan says, and errors that name the file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma4ForConditionalGeneration

from trl_fsdp_qlora.attention import attention_for, check_attention
from trl_fsdp_qlora.demo.models import tiny_gemma4, tiny_gemma4_model
from trl_fsdp_qlora.loading import inspect_checkpoint, load_model, quantization_from
from trl_fsdp_qlora.packed import packed_weights
from trl_fsdp_qlora.placement import list_parts, placement_table
from trl_fsdp_qlora.streaming import ShardOf, loaded_in_shards

IDS = torch.tensor([[2, 40, 41, 42, 43, 44, 45, 46], [2, 60, 61, 60, 61, 99, 98, 97]])


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    return tiny_gemma4(str(model_cache / "gemma4"))


def nf4(quant_type="nf4", double_quant=True, compute=torch.bfloat16, storage=torch.bfloat16):
    return quantization_from(quant_type, double_quant, compute, storage)


def packed_bytes(model):
    return {name: m.weight.detach().view(torch.uint8).flatten() for name, m in packed_weights(model).items()}


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bytes_are_those_of_from_pretrained(checkpoint, quant_type, double_quant):
    config = nf4(quant_type, double_quant)
    ours = load_model(checkpoint, quantization_config=config, per_layer_embedding_device="cpu", tower_device="cpu")
    theirs = Gemma4ForConditionalGeneration.from_pretrained(checkpoint, quantization_config=config, dtype=torch.bfloat16)
    mine, stock = packed_bytes(ours), packed_bytes(theirs)
    assert set(mine) == {name for name in stock if ".language_model." in name} and len(mine) == 51
    for name, data in mine.items():
        assert torch.equal(data, stock[name])
        state, other = ours.get_submodule(name).quant_state, theirs.get_submodule(name).quant_state
        assert state.quant_type == quant_type and state.nested == double_quant
        assert torch.equal(state.absmax, other.absmax)


def test_only_the_language_model_is_quantised_and_the_rest_is_bf16(checkpoint):
    model = load_model(checkpoint, quantization_config=nf4())
    assert all(".language_model." in name for name in packed_weights(model))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    plain = load_model(checkpoint)
    assert not packed_weights(plain)


def test_host_placement_changes_no_bit(checkpoint):
    config = nf4()
    plain = load_model(checkpoint, quantization_config=config)
    host = load_model(checkpoint, quantization_config=config, per_layer_embedding_device="cpu", tower_device="cpu")
    with torch.no_grad():
        assert torch.equal(plain(input_ids=IDS).logits, host(input_ids=IDS).logits)
    table = host.model.language_model.embed_tokens_per_layer
    assert torch.equal(table(IDS), plain.model.language_model.embed_tokens_per_layer(IDS))
    assert table.weight.shape[0] == 512  # the table itself is back in place after a lookup


def test_tables_in_host_memory_are_mapped_from_the_file(checkpoint):
    """bf16 on disk and bf16 wanted: no copy, so that ranks of one machine share the page cache."""
    model = load_model(checkpoint, quantization_config=nf4(), per_layer_embedding_device="cpu", tower_device="cpu")
    maps = [line for line in open("/proc/self/maps") if "model.safetensors" in line]
    spans = [tuple(int(edge, 16) for edge in line.split()[0].split("-")) for line in maps]
    pointer = model.model.language_model.embed_tokens_per_layer.weight.data_ptr()
    assert any(start <= pointer < end for start, end in spans)


def test_use_cache_changes_no_logits(checkpoint):
    """Layers that share keys and values once did so through the cache: https://github.com/huggingface/transformers/issues/45242"""
    model = load_model(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        with_cache, without = (model(input_ids=IDS, use_cache=flag).logits for flag in (True, False))
    torch.testing.assert_close(with_cache, without, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("double_quant", [True, False])
def test_quantised_checkpoints_load_as_they_are(checkpoint, tmp_path, double_quant):
    config = nf4(double_quant=double_quant)
    first = load_model(checkpoint, quantization_config=config)
    first.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), quantization_config=nf4("fp4"))  # not honoured, and said so
    assert {m.quant_state.quant_type for m in packed_weights(again).values()} == {"nf4"}
    with torch.no_grad():
        assert torch.equal(first(input_ids=IDS).logits, again(input_ids=IDS).logits)


def test_shards_while_loading_are_chunks_of_the_whole(checkpoint, monkeypatch):
    monkeypatch.setattr("trl_fsdp_qlora.streaming.MIN_BYTES", 64)
    whole = packed_bytes(load_model(checkpoint, quantization_config=nf4()))
    parts = [load_model(checkpoint, quantization_config=nf4(), shard=ShardOf(rank, 3)) for rank in range(3)]
    for name, data in whole.items():
        assert torch.equal(torch.cat([packed_bytes(part)[name] for part in parts]), data)
        assert loaded_in_shards(parts[0].get_submodule(name))["weight"].numel() * 2 == len(data)
    embedding = torch.cat([part.get_input_embeddings().weight for part in parts])
    assert embedding.shape == (512, 64)
    assert all(part.lm_head.weight is part.get_input_embeddings().weight for part in parts)


def test_no_rank_ever_holds_the_model_while_it_loads_its_shard(checkpoint, monkeypatch):
    """Bytes of loaded parameters, counted after each tensor: own shards plus the tensor just read."""
    from transformers import core_model_loading

    monkeypatch.setattr("trl_fsdp_qlora.streaming.MIN_BYTES", 64)
    inner, held, largest = core_model_loading.set_param_for_module, [], []

    def count(model, name, value, *args):
        inner(model, name, value, *args)
        own = [p for n, p in model.named_parameters() if not p.is_meta and n.startswith("model.language_model.layers")]
        held.append(sum(p.numel() * p.element_size() for p in own))
        largest.append(value.numel() * value.element_size())

    monkeypatch.setattr(core_model_loading, "set_param_for_module", count)
    load_model(checkpoint, quantization_config=nf4(), shard=ShardOf(0, 4))
    quarter_peak, read = max(held), max(largest)
    held.clear()
    load_model(checkpoint, quantization_config=nf4())
    assert quarter_peak <= max(held) / 4 + read


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_attention_is_for_the_language_model(checkpoint, impl):
    model = load_model(checkpoint, quantization_config=nf4(), attn_implementation=impl)
    assert model.config.text_config._attn_implementation == impl
    assert model.config.audio_config._attn_implementation in ("eager", "sdpa")
    model = load_model(checkpoint, attn_implementation={"text_config": impl, "vision_config": "eager"})
    assert model.config.text_config._attn_implementation == impl
    assert model.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("impl", ["flash_attention_2", {"text_config": "flash_attention_2"}, {"": "flash_attention_2"}])
def test_flash_attention_stops_at_256(impl):
    with torch.device("meta"):
        wide = tiny_gemma4_model(global_head_dim=512)
    with pytest.raises(ValueError, match="512.*'sdpa'.*'flex_attention'"):
        attention_for(wide, impl)
    attention_for(wide, "sdpa")
    check_attention(tiny_gemma4_model(), "flash_attention_2")  # 64 at most: FlashAttention serves it


def test_what_is_where(checkpoint):
    model = load_model(checkpoint, quantization_config=nf4())
    parts = {(part.name, part.dtype): part.bytes for part in list_parts(model)}
    assert parts["model.language_model.embed_tokens_per_layer", "bfloat16"] == 512 * 6 * 16 * 2
    assert parts["token embedding", "bfloat16"] == 512 * 64 * 2  # tied with the head, counted once
    linear = sum(m.weight.numel() * 2 for m in packed_weights(model).values())
    assert parts["language model, linear", "4 bit"] == linear
    assert ("quantisation constants", "uint8") in parts
    table = placement_table(model)
    assert all(name in table for name in ("model.vision_tower", "model.audio_tower", "token embedding"))


def test_no_such_checkpoint(tmp_path):
    for name in (str(tmp_path / "none"), "nobody/nothing"):
        with pytest.raises(ValueError, match="neither a folder nor a known model"):
            inspect_checkpoint(name)
    with pytest.raises(ValueError, match="no usable config.json"):
        inspect_checkpoint(str(tmp_path))


def copy_of(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "copy")
    return tmp_path / "copy"


def test_damaged_files_are_named(checkpoint, tmp_path):
    folder = copy_of(checkpoint, tmp_path)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"copy/model.safetensors is damaged or cut short"):
        load_model(str(folder))
    file.unlink()
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        load_model(str(folder))


def test_checkpoints_in_several_files(checkpoint, tmp_path):
    model = load_model(checkpoint)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    again = load_model(str(tmp_path), quantization_config=nf4(), per_layer_embedding_device="cpu")
    first = load_model(checkpoint, quantization_config=nf4())
    assert all(torch.equal(data, packed_bytes(first)[name]) for name, data in packed_bytes(again).items())
    files[1].write_bytes(files[1].read_bytes()[:100])
    with pytest.raises(ValueError, match=files[1].name):
        load_model(str(tmp_path))


def test_a_model_without_a_head_is_refused(tmp_path):
    from transformers import BertConfig

    BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, architectures=["BertModel"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no language-modelling head"):
        inspect_checkpoint(str(tmp_path))


def test_an_untied_head_stays_apart(model_cache):
    folder = tiny_gemma4(str(model_cache / "untied"), tie=False)
    assert AutoConfig.from_pretrained(folder).get_text_config().tie_word_embeddings is False
    model = load_model(folder, quantization_config=nf4())
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert "lm_head" not in packed_weights(model)


def test_wider_dtype_on_disk(checkpoint, tmp_path):
    """A checkpoint in fp32 is cast while it streams, host parts included."""
    folder = copy_of(checkpoint, tmp_path)
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(folder), quantization_config=nf4(), per_layer_embedding_device="cpu", tower_device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_weights_that_do_not_fit_their_config(checkpoint, tmp_path):
    folder = copy_of(checkpoint, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 96
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="are not those its config.json describes"):
        load_model(str(folder))


def test_weights_packed_before_that_do_not_fit_their_config(checkpoint, tmp_path):
    folder = tmp_path / "packed"
    load_model(checkpoint, quantization_config=nf4()).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"are not those its config.json describes: .*layers\.0\.mlp\.\w+_proj\.weight: \("):
        load_model(str(folder))


def test_named_modules_are_skipped_besides_the_head(checkpoint):
    config = nf4()
    config.llm_int8_skip_modules = ["q_proj"]
    names = packed_weights(load_model(checkpoint, quantization_config=config))
    assert names and not [name for name in names if name.endswith("q_proj") or name == "lm_head" or "tower" in name]


def test_the_device_is_where_the_model_computes(checkpoint):
    model = load_model(checkpoint, quantization_config=nf4(), tower_device="cpu", use_cache=False)
    assert type(model).__name__ == "Gemma4ForConditionalGeneration" and isinstance(model, Gemma4ForConditionalGeneration)
    assert model.device == torch.device("cpu") and model.config.get_text_config().use_cache is False
