"""Mixtures of experts in 4 bit: the bytes and numbers of one `Linear4bit` an expert, LoRA on experts, checkpoints, merges."""

import json
import logging
import warnings

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import AutoModelForCausalLM, Gemma4ForConditionalGeneration, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import SFTConfig, SFTTrainer

from tests.tiny import grpo_config, logged, sft_config, tiny_glm, token_rows
from trl_fsdp_qlora import QLoRAGRPOTrainer, QLoRASFTTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4, tiny_tokenizer
from trl_fsdp_qlora.expert_loading import warn_of_16_bit_experts
from trl_fsdp_qlora.experts import PackedExperts, dequantize_experts, expert_stacks, plain_experts, quantize_stack
from trl_fsdp_qlora.export import merge
from trl_fsdp_qlora.kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference
from trl_fsdp_qlora.loading import inspect_checkpoint, load_model, quantization_from
from trl_fsdp_qlora.packed import packed_weights
from trl_fsdp_qlora.placement import list_parts

MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
IDS = torch.tensor([[2, 40, 41, 42, 43, 44, 45, 46], [2, 60, 61, 60, 61, 99, 98, 97]])


@pytest.fixture(scope="module")
def gemma(model_cache):
    return tiny_gemma4(str(model_cache / "gemma4-moe"), **MOE)


@pytest.fixture(scope="module")
def glm(model_cache):
    return tiny_glm(model_cache / "glm")


@pytest.fixture(params=["gemma", "glm"])
def checkpoint(request):
    return request.getfixturevalue(request.param)


def nf4(compute=torch.bfloat16, quant_type="nf4", double_quant=True):
    return quantization_from(quant_type, double_quant, compute, compute)


def unpack(model: nn.Module) -> nn.Module:
    """Put transformers' own experts back, with the numbers of the packed ones in 16 or 32 bit."""
    for name, leaves in expert_stacks(model).items():
        module = model.get_submodule(name)
        plain = plain_experts(module)
        for leaf in leaves:
            plain._parameters[leaf] = nn.Parameter(module.unpacked(leaf), requires_grad=False)
        model.set_submodule(name, plain)
    return model


# --- packing ---


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(3, 48, 64), (2, 16, 320), (1, 1, 64)])
def test_bytes_and_numbers_are_those_of_a_linear4bit_per_expert(shape, quant_type, double_quant):
    stack = torch.randn(shape, dtype=torch.bfloat16)
    packed, state = quantize_stack(stack, quant_type=quant_type, double_quant=double_quant, storage=torch.bfloat16)
    rows = packed.view(torch.uint8).view(len(stack), -1)
    everything = dequantize_experts(packed, state)
    for e, expert in enumerate(stack):
        layer = Linear4bit(expert.shape[1], expert.shape[0], bias=False, compute_dtype=torch.bfloat16)
        options = {"requires_grad": False, "compress_statistics": double_quant, "quant_type": quant_type, "module": layer}
        layer.weight = Params4bit(expert.clone(), **options)
        layer = layer.to("cpu")
        layer.support_avx512bf16_for_cpu = False  # as `load_model` does
        theirs = layer.weight.quant_state
        assert torch.equal(rows[e], layer.weight.data.view(torch.uint8).flatten())
        assert torch.equal(state.absmax[e], theirs.absmax)
        if double_quant:
            assert torch.equal(state.offset[e], theirs.offset) and torch.equal(state.state2.absmax[e], theirs.state2.absmax)
        identity = torch.eye(expert.shape[1], dtype=torch.bfloat16)
        assert torch.equal(layer(identity).T, everything[e])
        assert torch.equal(dequantize_experts(packed, state, [e])[0], everything[e])
    some = [2, 0] if len(stack) > 2 else [0]
    assert torch.equal(dequantize_experts(packed, state, some), everything[some])


def test_rows_that_end_inside_a_block():
    stack = torch.randn(3, 64, 32, dtype=torch.bfloat16)
    packed, state = quantize_stack(stack, quant_type="nf4", double_quant=False, storage=torch.bfloat16)
    data = packed.view(torch.uint8).flatten().int()
    codes = torch.stack([data >> 4, data & 15], dim=1).flatten()
    numbers = (state.code[codes].view(-1, 64) * state.absmax.view(-1, 1)).to(torch.bfloat16).view(stack.shape)
    assert torch.equal(dequantize_experts(packed, state), numbers)


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 0, 4], [5], [0, 0], [1, 2, 3, 4]])
def test_grouped_matmul_and_its_gradients(ends):
    x = torch.randn(ends[-1], 3, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(len(ends), 3, 4, dtype=torch.float64, requires_grad=True)
    out = grouped_matmul(x, matrices, ends)
    start = 0
    for g, end in enumerate(ends):
        assert torch.allclose(out[start:end], x[start:end] @ matrices[g])
        start = end
    assert out.shape == (ends[-1], 4)
    if ends[-1]:
        assert torch.autograd.gradcheck(lambda a, b: grouped_matmul_reference(a, b, ends), (x, matrices))
        turned = matrices.detach().transpose(1, 2).contiguous().requires_grad_()
        assert torch.autograd.gradcheck(lambda a, b: grouped_matmul(a, b.transpose(1, 2), ends), (x, turned))


# --- loading ---


def test_experts_load_in_4_bit_and_stock_keeps_them_in_16(gemma):
    ours = load_model(gemma, quantization_config=nf4())
    theirs = Gemma4ForConditionalGeneration.from_pretrained(gemma, quantization_config=nf4(), dtype=torch.bfloat16)
    stock = sum(p.numel() * p.element_size() for name, p in theirs.named_parameters() if ".experts." in name)
    stacks = {name: p for name, p in packed_weights(ours).items() if ".experts." in name}
    assert len(stacks) == 12 and stock == 4 * sum(p.weight.numel() * p.weight.element_size() for p in stacks.values()) > 0
    parts = {(part.name, part.dtype): part.bytes for part in list_parts(ours)}
    assert parts["language model, experts", "4 bit"] == stock // 4
    assert not any(p.ndim == 3 and ".experts." in name for name, p in ours.named_parameters())
    # Routers stay as they are.
    assert type(ours.model.language_model.layers[0].router.proj) is nn.Linear


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_logits_are_those_of_transformers_experts_on_the_same_numbers(checkpoint, compute):
    packed, plain = (load_model(checkpoint, quantization_config=nf4(compute), dtype=compute) for _ in range(2))
    plain = unpack(plain)
    plain.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert torch.equal(packed(input_ids=IDS).logits, plain(input_ids=IDS).logits)
        # One token, as in generation: products of one row, which are other kernels on either side.
        one = [model(input_ids=IDS[:1, :1]).logits for model in (packed, plain)]
        torch.testing.assert_close(*one, rtol=0, atol=2e-2 if compute == torch.bfloat16 else 1e-5)


def test_groups_change_no_bit(glm, monkeypatch):
    model = load_model(glm, quantization_config=nf4())
    with torch.no_grad():
        at_once = model(input_ids=IDS).logits
        monkeypatch.setattr("trl_fsdp_qlora.experts.GROUP_BYTES", 1)
        assert torch.equal(model(input_ids=IDS).logits, at_once)


def test_the_gradient_of_the_input_is_that_of_plain_experts(glm):
    model = load_model(glm, quantization_config=nf4(torch.float32), dtype=torch.float32)
    experts = model.model.layers[1].mlp.experts
    plain = plain_experts(experts)
    for leaf in ("gate_up_proj", "down_proj"):
        plain._parameters[leaf] = nn.Parameter(experts.unpacked(leaf))
    plain.config._experts_implementation = "eager"
    index = torch.tensor([[0, 1], [3, 1], [0, 3], [1, 0], [3, 0]])  # nobody chooses expert 2
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    grads = []
    for module in (experts, plain):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        module(leaves[0], index, leaves[1]).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_experts_that_stay_in_16_bit_are_said(glm, caplog):
    checkpoint = inspect_checkpoint(glm)
    skeleton = checkpoint.skeleton
    foreign = nn.Module()
    foreign.register_parameter("w1", nn.Parameter(torch.empty(8, 512, 512, dtype=torch.bfloat16, device="meta")))
    skeleton.model.layers[1].mlp.foreign = foreign
    with caplog.at_level(logging.WARNING):
        warn_of_16_bit_experts(skeleton, checkpoint.structure, [])
    assert "model.layers.1.mlp.foreign keeps 4.0 MiB of experts (w1) in 16 bit: Module does not take" in caplog.text
    assert len(caplog.records) == 1


# --- LoRA on experts ---


def test_adapters_on_experts_are_pefts(checkpoint):
    """Outputs and gradients of our path against PEFT's, which adds the whole product to every expert."""
    packed, plain = (load_model(checkpoint, quantization_config=nf4(torch.float32), dtype=torch.float32) for _ in range(2))
    config = LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    plain = unpack(plain)
    plain.set_experts_implementation("grouped_mm")
    models = [get_peft_model(model, config) for model in (packed, plain)]
    state = {name: torch.randn_like(p) * 0.1 for name, p in models[0].named_parameters() if p.requires_grad}
    assert state and state.keys() == {name for name, p in models[1].named_parameters() if p.requires_grad}
    outs, grads = [], []
    for model in models:
        model.load_state_dict(state, strict=False)
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        outs.append(out.logits.detach())
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        with model.disable_adapter(), torch.no_grad():
            assert not torch.allclose(model(input_ids=IDS).logits, outs[-1], atol=1e-4)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be merged into experts in 4 bit"):
        models[0].merge_adapter()


def test_patterns_of_ranks_are_honoured_and_nobody_says_otherwise(gemma, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The following")
        trainer = QLoRASFTTrainer(gemma, sft_config(tmp_path, bf16=False, lora_experts_r=2), train_dataset=token_rows(2))
    ranks = {(w.parameter_name, w.r["default"], w.scaling["default"]) for w in trainer.model.modules() if isinstance(w, ParamWrapper)}
    assert ranks == {("gate_up_proj", 2, 2.0), ("down_proj", 2, 2.0)}


def run(checkpoint, folder, rows=None, **fields):
    trainer = QLoRASFTTrainer(checkpoint, sft_config(folder, bf16=False, **fields), train_dataset=token_rows(2) if rows is None else rows)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gemma", {}),
        ("gemma", {"lora_experts_r": 4}),
        ("glm", {"lora_experts_r": 4}),
        ("glm", {"lora_target_modules": ["q_a_proj"], "learning_rate": 1e-2, "index_topk": 64}),
    ],
)
def test_one_batch_is_learnt(request, model_cache, tmp_path, name, fields):
    checkpoint = request.getfixturevalue(name)
    if fields.pop("index_topk", None):  # a choice of tokens that flips from step to step makes the loss jump
        checkpoint = tiny_glm(model_cache / "glm-dense", index_topk=64)
    untouched = {}

    trainer = QLoRASFTTrainer(checkpoint, sft_config(tmp_path, bf16=False, max_steps=10, **fields), train_dataset=token_rows(2))
    untouched = {name: p.weight.detach().view(torch.uint8).clone() for name, p in packed_weights(trainer.model).items()}
    got_gradients = set()
    for parameter_name, p in trainer.model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, n=parameter_name: got_gradients.add(n) if p.grad.isfinite().all() else None)
    trainer.train()
    losses = [loss for loss, _ in logged(trainer)]
    assert len(losses) == 10 and all(a > b for a, b in zip(losses, losses[1:], strict=False))
    assert got_gradients == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert all(torch.equal(p.weight.detach().view(torch.uint8), untouched[n]) for n, p in packed_weights(trainer.model).items())


def test_all_linear_leaves_routers_and_indexers_alone_and_takes_shared_experts(glm, tmp_path):
    trainer = QLoRASFTTrainer(glm, sft_config(tmp_path, bf16=False), train_dataset=token_rows(2))
    with_adapter = [name.removesuffix(".lora_A") for name, _ in trainer.model.named_modules() if name.endswith(".lora_A")]
    adapted = {name.removeprefix("base_model.model.model.") for name in with_adapter}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    wanted = {f"layers.{i}.self_attn.{leaf}" for i in range(3) for leaf in attention}
    wanted |= {f"layers.0.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
    wanted |= {f"layers.{i}.mlp.shared_experts.{leaf}" for i in (1, 2) for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert adapted == wanted


def test_resumed_as_if_never_stopped(checkpoint, tmp_path):
    rows = token_rows(16)
    fields = {"lora_experts_r": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run(checkpoint, tmp_path / "whole", rows, **fields)
    resumed = QLoRASFTTrainer(checkpoint, sft_config(tmp_path / "again", bf16=False, **fields), train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(resumed)[-2:] == logged(whole)[-2:]


def test_loads_over_the_same_base_and_over_the_16_bit_one(checkpoint, tmp_path):
    trainer = run(checkpoint, tmp_path / "run", lora_experts_r=4, learning_rate=1e-2, max_steps=5)
    trainer.save_model(str(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == ["experts.down_proj", "experts.gate_up_proj"]
    with torch.no_grad():
        mine = trainer.model.eval()(input_ids=IDS).logits
        base = load_model(checkpoint, quantization_config=nf4(torch.float32), dtype=torch.float32)
        again = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert torch.equal(again.eval()(input_ids=IDS).logits, mine)
        base = unpack(load_model(checkpoint, quantization_config=nf4(torch.float32), dtype=torch.float32))
        plain = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(plain(input_ids=IDS).logits, mine, rtol=1e-4, atol=1e-4)


def test_merged_into_the_files_of_the_checkpoint(checkpoint, tmp_path):
    """Gemma 4 keeps a stack of experts as one tensor on disk, GLM each projection of each expert as its own."""
    trainer = run(checkpoint, tmp_path / "run", lora_experts_r=4, learning_rate=1e-2, max_steps=5)
    trainer.save_model(str(tmp_path / "adapter"))
    results = {mode: merge(str(tmp_path / "adapter"), str(tmp_path / mode), mode=mode) for mode in ("original", "dequantized")}
    drift = results["original"].drift
    assert drift["dequantized"].mean < drift["original"].mean / 2  # tiny random models tell 4 bit from 16
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    packed = load_model(checkpoint, quantization_config=nf4())
    for mode, base in (("original", plain), ("dequantized", unpack(packed))):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / mode, dtype=torch.bfloat16)
        stacks = [(name, leaf) for name, leaves in expert_stacks(merged).items() for leaf in leaves]
        assert {f"{name}.{leaf}" for name, leaf in stacks} < set(results[mode].adapted) and stacks
        for name, leaf in stacks:
            wrapper = trainer.model.get_base_model().get_submodule(name)
            while wrapper.parameter_name != leaf:
                wrapper = wrapper.base_layer
            left, right, scale = wrapper.get_delta_factors("default")
            expected = base.get_submodule(name)._parameters[leaf].float() + scale * left.float() @ right.float()
            written = merged.get_submodule(name)._parameters[leaf].float()
            torch.testing.assert_close(written, expected, rtol=2**-8, atol=1e-4)
            assert not torch.allclose(written, base.get_submodule(name)._parameters[leaf].float(), rtol=2**-6, atol=1e-3)


def test_merged_without_adapters_on_experts(checkpoint, tmp_path):
    trainer = run(checkpoint, tmp_path / "run", max_steps=1)
    trainer.save_model(str(tmp_path / "adapter"))
    result = merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert result.drift["dequantized"].mean < result.drift["original"].mean / 2
    assert not [name for name in result.adapted if ".experts." in name]


def test_grpo_with_a_rollout(checkpoint, tmp_path):
    def reward(completions, **kwargs):
        return [float(len(set(text)) % 5) for text in completions]

    config = grpo_config(tmp_path, bf16=False, max_steps=2, learning_rate=1e-2, max_completion_length=8, lora_experts_r=4)
    trainer = QLoRAGRPOTrainer(checkpoint, reward, config, train_dataset=Dataset.from_dict({"prompt": ["hello world", "what is one"]}))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2 and all(entry["reward_std"] > 0 and 0 < entry["grad_norm"] < 1e4 for entry in steps)
    assert any(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before and ".experts." in n)


# --- what is refused ---


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora_experts_r": 4, "lora_dropout": 0.1}, "`lora_dropout=0.1` does not work for adapters on experts"),
        ({"lora_experts_r": -1}, "`lora_experts_r=-1`"),
    ],
)
def test_fields_that_cannot_work(gemma, tmp_path, fields, said):
    with pytest.raises(ValueError, match=said):
        QLoRASFTTrainer(gemma, sft_config(tmp_path, **fields), train_dataset=token_rows(2))


def test_experts_where_there_are_none(model_cache, tmp_path):
    dense = tiny_gemma4(str(model_cache / "gemma4"))
    with pytest.raises(ValueError, match="`lora_experts_r=4`, but Gemma4ForConditionalGeneration has no experts in stacks"):
        QLoRASFTTrainer(dense, sft_config(tmp_path, lora_experts_r=4), train_dataset=token_rows(2))


def test_parameters_that_do_not_exist(gemma, tmp_path):
    config = LoraConfig(target_modules=["q_proj"], target_parameters=["experts.w1"])
    with pytest.raises(ValueError, match=r"`target_parameters` names 'experts.w1'.*experts.down_proj, experts.gate_up_proj"):
        QLoRASFTTrainer(gemma, sft_config(tmp_path), train_dataset=token_rows(2), peft_config=config)


def test_an_engine_cannot_serve_adapters_on_experts(gemma, tmp_path):
    config = grpo_config(tmp_path, bf16=False, use_vllm=True, vllm_mode="server", lora_experts_r=4)
    rows = Dataset.from_dict({"prompt": ["a"]})
    with pytest.raises(ValueError, match="target_parameters.*another layout"):
        QLoRAGRPOTrainer(gemma, lambda completions, **_: [0.0] * len(completions), config, train_dataset=rows)


def test_packed_experts_move_with_their_constants(glm):
    model = load_model(glm, quantization_config=nf4())
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, PackedExperts) and type(experts).__name__ == "GlmMoeDsaExperts"
    before = experts.unpacked("down_proj")
    experts.to("cpu")
    assert torch.equal(experts.down_proj, before) and experts.stand_in("down_proj").shape == before.shape


def test_the_routers_auxiliary_loss_is_trls(tmp_path):
    """Of a model whose class has one. The numbers are those of TRL's own trainer on the same 16-bit model."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, router_aux_loss_coef=0.1)).save_pretrained(tmp_path / "qwen")
    tiny_tokenizer(512).save_pretrained(tmp_path / "qwen")
    name = str(tmp_path / "qwen")

    def logs(trainer):
        trainer.train()
        return [(entry["loss"], entry["aux_loss"]) for entry in trainer.state.log_history if "loss" in entry]

    options = {"bf16": False, "max_steps": 2}
    packed = logs(QLoRASFTTrainer(name, sft_config(tmp_path / "a", **options), train_dataset=token_rows(4)))
    plain = logs(QLoRASFTTrainer(name, sft_config(tmp_path / "b", load_in_4bit=False, **options), train_dataset=token_rows(4)))
    theirs = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        SFTConfig(
            str(tmp_path / "c"), use_cpu=True, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-3, report_to=[],
            lr_scheduler_type="constant", save_strategy="no", shuffle_dataset=False, **options,
        ),
        train_dataset=token_rows(4),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    assert logs(theirs)[0] == pytest.approx(plain[0], rel=1e-5)
    assert all(aux > 0 for _, aux in packed) and packed[0][1] == pytest.approx(plain[0][1], rel=0.1)


def test_merging_into_layers_beside_packed_experts(checkpoint, tmp_path):
    trainer = QLoRASFTTrainer(checkpoint, sft_config(tmp_path, bf16=False), train_dataset=token_rows(8))
    for name, parameter in trainer.model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        before = trainer.model.eval()(input_ids=IDS).logits
        with trainer.model.disable_adapter():
            bare = trainer.model(input_ids=IDS).logits
        merged = trainer.model.merge_and_unload()(input_ids=IDS).logits
    assert (merged - before).norm() < (bare - before).norm()


@pytest.mark.parametrize("given", ["experts", "mlp"])
def test_packed_experts_cannot_be_trained_whole(glm, tmp_path, given):
    lora = LoraConfig(target_modules=["o_proj"], modules_to_save=[given])
    with pytest.raises(ValueError, match="in it has quantised weights"):
        QLoRASFTTrainer(glm, sft_config(tmp_path), train_dataset=token_rows(8), peft_config=lora)
