"""Which modules get adapters: exact counts at the real sizes, on the meta device, and every matching trap."""

import logging
import re

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from trl_fsdp_qlora.demo.models import tiny_gemma4_model
from trl_fsdp_qlora.experts import expert_stacks
from trl_fsdp_qlora.structure import find_structure
from trl_fsdp_qlora.targets import as_regex, resolve_lora_targets, resolve_peft_config

# Shapes of the published checkpoints; tests/test_targets.py needs no weights of them.
SIZES = {
    "E2B": dict(
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=35,
        num_attention_heads=8,
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
    ),
    "E4B": dict(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=42,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 7,
    ),
    "26B-A4B": dict(
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "31B": dict(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10,
    ),
}
TOWER_WORDS = ("vision", "audio", "embed_vision", "embed_audio", "patch_embedder", "lm_head")


def on_meta(config, architecture):
    with torch.device("meta"):
        return architecture(config)


@pytest.mark.parametrize(("size", "all_linear", "q_and_v"), [("E2B", 276, 50), ("E4B", 343, 66), ("31B", 410, 110), ("26B-A4B", 205, 55)])
def test_counts_at_the_real_shapes(size, all_linear, q_and_v):
    config = Gemma4Config(text_config=SIZES[size], vision_config={}, audio_config=None if size in ("31B", "26B-A4B") else {})
    model = on_meta(config, Gemma4ForConditionalGeneration)
    names = [name for name, _ in model.named_modules()]
    for targets, count in (("all-linear", all_linear), (["q_proj", "v_proj"], q_and_v)):
        chosen = resolve_lora_targets(model, targets)
        assert len(chosen) == count
        assert not [name for name in chosen if any(word in name for word in TOWER_WORDS)]
        pattern = as_regex(chosen, names)
        assert isinstance(pattern, str)
        assert [name for name in names if re.fullmatch(pattern, name)] == chosen


def test_counts_of_mixtures_of_experts():
    """GLM-5's configuration class has the sizes of GLM-5 to 5.2 as its defaults; they differ in which indexers are shared."""
    glm = on_meta(transformers.GlmMoeDsaConfig(), transformers.GlmMoeDsaForCausalLM)
    structure = find_structure(glm)
    assert len(structure.routers) == 75 and structure.indexers
    chosen = resolve_lora_targets(glm, "all-linear")
    # Five of each attention, three of each dense layer, three of the shared expert of every other layer.
    assert len(chosen) == 78 * 5 + 3 * 3 + 75 * 3
    assert not [name for name in chosen if "indexer" in name or ".gate" in name.replace("gate_proj", "")]
    assert len(resolve_lora_targets(glm, ["q_a_proj"])) == 78
    assert len(resolve_lora_targets(glm, ["wq_b"])) == len(structure.indexers)  # asked for by name
    stacks = expert_stacks(glm)
    assert len(stacks) == 75 and all(leaves == ["gate_up_proj", "down_proj"] for leaves in stacks.values())
    gemma = on_meta(Gemma4Config(text_config=SIZES["26B-A4B"], vision_config={}, audio_config=None), Gemma4ForConditionalGeneration)
    assert len(expert_stacks(gemma)) == len(find_structure(gemma).routers) == 30
    assert not [name for name in resolve_lora_targets(gemma, "all-linear") if "router" in name]


@pytest.fixture(scope="module")
def gemma4():
    return tiny_gemma4_model()


def test_structure_of_gemma4(gemma4):
    structure = find_structure(gemma4)
    assert structure.language_model == "model.language_model"
    assert structure.layers == "model.language_model.layers"
    assert structure.output_head == "lm_head"
    assert structure.side_embeddings == ("model.language_model.embed_tokens_per_layer",)
    assert set(structure.towers) == {"model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"}


def tiny(name, **fields):
    config = getattr(transformers, f"{name}Config")(**fields)
    return config


SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64, head_dim=16
)
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)


def other_models():
    yield "Gemma3", transformers.Gemma3ForConditionalGeneration, tiny("Gemma3", text_config=SMALL, vision_config=VISION), 14
    yield (
        "Gemma3n",
        transformers.Gemma3nForConditionalGeneration,
        tiny(
            "Gemma3n",
            text_config={
                **{k: v for k, v in SMALL.items()},
                "intermediate_size": [64, 64],
                "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 0,
                "laurel_rank": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "activation_sparsity_pattern": [0.0, 0.0],
            },
        ),
        None,
    )
    yield (
        "Qwen2.5-VL",
        transformers.Qwen2_5_VLForConditionalGeneration,
        tiny(
            "Qwen2_5_VL",
            text_config={**{k: v for k, v in SMALL.items() if k != "head_dim"}},
            vision_config=dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32),
        ),
        14,
    )
    yield (
        "Llava",
        transformers.LlavaForConditionalGeneration,
        tiny(
            "Llava",
            text_config=transformers.LlamaConfig(**SMALL),
            vision_config=transformers.CLIPVisionConfig(**VISION),
        ),
        14,
    )
    yield "Llama", transformers.LlamaForCausalLM, tiny("Llama", **SMALL), 14
    yield "GPT-2", transformers.GPT2LMHeadModel, tiny("GPT2", n_embd=32, n_layer=2, n_head=2, vocab_size=64), 8
    opt = tiny("OPT", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, word_embed_proj_dim=32)
    yield "OPT", transformers.OPTForCausalLM, opt, 12


@pytest.mark.parametrize(("name", "architecture", "config", "count"), list(other_models()), ids=lambda v: v if isinstance(v, str) else "")
def test_other_models_get_adapters_on_their_language_model_only(name, architecture, config, count, monkeypatch):
    if name == "Gemma3n":  # its vision tower comes from timm, which needs torchvision; any tower will do here
        from transformers.models.gemma3n import modeling_gemma3n

        from_config = modeling_gemma3n.AutoModel.from_config

        def without_timm(config):
            is_vision = "vision" in config.model_type
            return torch.nn.Sequential(torch.nn.Linear(8, 8)) if is_vision else from_config(config)

        monkeypatch.setattr(modeling_gemma3n.AutoModel, "from_config", without_timm)
    model = on_meta(config, architecture)
    structure = find_structure(model)
    chosen = resolve_lora_targets(model, "all-linear")
    assert chosen and all(structure.in_language_model(target) for target in chosen)
    assert structure.output_head not in chosen
    outside = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and structure.in_tower(n)]
    assert not set(outside) & set(chosen)
    assert bool(outside) == (name in ("Gemma3", "Gemma3n", "Qwen2.5-VL", "Llava"))
    if count is not None:
        assert len(chosen) == count
    if not outside:  # a text-only model: the scope changes nothing
        assert chosen == resolve_lora_targets(model, "all-linear", language_model_only=False)


def test_peft_adapts_what_was_resolved(gemma4):
    """Gemma 4's towers wrap their linear layers in a class that PEFT refuses; the resolved config never meets it."""
    for targets, count in (("all-linear", 51), (["q_proj", "v_proj"], 10), (r".*layers\.[01]\.mlp\.down_proj", 2)):
        config = resolve_peft_config(gemma4, LoraConfig(r=2, target_modules=targets))
        wrapped = get_peft_model(tiny_gemma4_model(), config)
        adapted = [name for name, _ in wrapped.named_modules() if name.endswith(".lora_A")]
        assert len(adapted) == count
        assert not [name for name in adapted if any(word in name for word in TOWER_WORDS)]


def test_towers_too_when_asked(gemma4):
    everything = resolve_lora_targets(gemma4, "all-linear", language_model_only=False)
    only = resolve_lora_targets(gemma4, "all-linear")
    assert set(only) < set(everything) and "lm_head" not in everything
    inner = resolve_lora_targets(gemma4, ["q_proj"], language_model_only=False)
    # The wrapper's name stands for the linear layer inside.
    assert any(name.startswith("model.vision_tower") and name.endswith("q_proj.linear") for name in inner)
    get_peft_model(tiny_gemma4_model(), resolve_peft_config(gemma4, LoraConfig(target_modules=["q_proj"]), language_model_only=False))


ALL, QV = 51, 10


@pytest.mark.parametrize(
    ("targets", "excludes", "count"),
    [
        ("all-linear", None, ALL),
        ("all-linear", [], ALL),
        ("all-linear", "", ALL),
        ("all-linear", "vision_tower", ALL),  # a string is a whole-name pattern: matches nothing
        ("all-linear", ["vision_tower"], ALL),
        ("all-linear", r".*vision_tower.*", ALL),
        ("all-linear", [r".*vision_tower.*"], ALL),  # a list holds names, not patterns
        ("all-linear", ["q_proj"], ALL - 6),
        ("all-linear", r".*\.layers\.[0-4]\..*", ALL - 43),
        (["q_proj", "v_proj"], None, QV),
        (["q_proj", "v_proj"], ["v_proj"], 6),
        (r".*\.(q_proj|v_proj)", None, QV),
        (r".*\.(q_proj|v_proj)", r".*\.0\..*", QV - 2),
        (["per_layer_model_projection"], None, 1),
        (["embed_tokens"], None, 1),
    ],
)
def test_targets_and_exclusions_compose(gemma4, targets, excludes, count):
    assert len(resolve_lora_targets(gemma4, targets, excludes)) == count


def test_layers_to_transform(gemma4):
    config = resolve_peft_config(gemma4, LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 1]))
    assert isinstance(config.target_modules, (str, set, list)) and config.layers_to_transform is None
    wrapped = get_peft_model(tiny_gemma4_model(), config)
    assert len([n for n, _ in wrapped.named_modules() if n.endswith(".lora_A")]) == 2


def test_no_adapters_on_layers_without_their_own_keys_and_values(gemma4):
    """The last two layers use the keys and values of earlier ones and own no such projections."""
    chosen = resolve_lora_targets(gemma4, ["k_proj", "v_proj"])
    assert sorted({name.split(".")[3] for name in chosen}) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["qproj"], ["'qproj'", "51 linear layers", "q_proj"]),
        (["patch_dense"], ["51 linear layers"]),
        (["lm_head"], ["language_model_only=False"]),
        ("q_proj", ["'q_proj'", "51", "write ['q_proj']"]),  # a string must match the whole name
        (r".*vision_tower.*q_proj.*", ["outside the language model", "language_model_only=False"]),
    ],
)
def test_nothing_matched_says_what_there_is(gemma4, targets, said):
    with pytest.raises(ValueError) as error:
        resolve_lora_targets(gemma4, targets)
    for part in said:
        assert part in str(error.value)


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_fsdp_qlora"), "propagate", True)
    return caplog


def test_a_target_without_effect_is_said(gemma4, warnings):
    assert resolve_lora_targets(gemma4, ["q_proj", "gate_prj"]) == resolve_lora_targets(gemma4, ["q_proj"])
    assert "'gate_prj' of `lora_target_modules` matches no module" in warnings.text
    assert "'q_proj'" not in warnings.text


def test_exclusion_without_effect_is_said(gemma4, warnings):
    resolve_lora_targets(gemma4, "all-linear", ["no_such_module"])
    assert "excludes nothing" in warnings.text


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "lm_head"], "'lm_head'"),
        (["q_proj", "lm_head", "embedding_projection"], "'lm_head', 'embedding_projection'"),
        (r".*(q_proj|lm_head)", "'lm_head'"),
        (["q_proj"], None),  # towers have layers of this name too
        (r".*q_proj.*", None),
        ("all-linear", None),
    ],
)
def test_targets_outside_the_language_model_are_said(gemma4, warnings, targets, said):
    chosen = resolve_lora_targets(gemma4, targets)
    assert chosen and "lm_head" not in chosen
    assert (f"Left out of the targets: {said}." in warnings.text) if said else not warnings.text
    warnings.clear()
    resolve_lora_targets(gemma4, targets, language_model_only=False)
    assert not warnings.text


def test_adapters_all_learn():
    """After one backward pass every adapter on every layer has a gradient: none sits on a dead projection."""
    model = get_peft_model(tiny_gemma4_model(), resolve_peft_config(tiny_gemma4_model(), LoraConfig(r=2, target_modules="all-linear")))
    model.train()
    ids = torch.randint(8, 300, (2, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    silent = [n for n, p in model.named_parameters() if "lora_B" in n and (p.grad is None or not p.grad.abs().sum() > 0)]
    assert silent == []


def test_a_router_that_is_a_linear_layer_inside_another_module():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.HunYuanMoEV1Config(**sizes, head_dim=32, num_experts=4, moe_topk=2, vocab_size=512)
    model = on_meta(config, transformers.HunYuanMoEV1ForCausalLM)
    assert find_structure(model).routers == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    assert not [name for name in resolve_lora_targets(model, "all-linear") if ".gate." in name]


@pytest.mark.parametrize("fields", [{"target_modules": "("}, {"target_modules": "all-linear", "exclude_modules": "*proj"}])
def test_what_is_no_regular_expression(gemma4, fields):
    with pytest.raises(ValueError, match=r"_modules='.*'` is no regular expression \(.* at position 0\)"):
        resolve_lora_targets(gemma4, **fields)
