"""Mixtures of experts on one GPU: the numbers of one layer an expert, and the limits of memory at the shape of Gemma 4 26B-A4B."""

import gc
import json
import os

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from tests.tiny import logged, sft_config, tiny_glm, token_rows
from trl_fsdp_qlora import QLoRASFTTrainer
from trl_fsdp_qlora.experts import dequantize_experts, quantize_stack
from trl_fsdp_qlora.kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", [(5, 128, 704), (3, 64, 32)])
def test_numbers_are_those_of_each_expert_alone(shape, double_quant):
    stack = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    packed, state = quantize_stack(stack, quant_type="nf4", double_quant=double_quant, storage=torch.bfloat16)
    for chosen in (None, [2, 0]):
        numbers = dequantize_experts(packed, state, chosen)
        for got, e in zip(numbers, chosen or range(len(stack)), strict=True):
            alone = quantize_4bit(stack[e], blocksize=64, compress_statistics=double_quant, quant_type="nf4", quant_storage=torch.bfloat16)
            assert torch.equal(got, dequantize_4bit(*alone))


@pytest.mark.parametrize("ends", [[7, 7, 40], [0, 3, 3], [64, 128, 129]])
def test_one_launch_is_the_loop(ends):
    x = torch.randn(ends[-1], 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    matrices = torch.randn(len(ends), 32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    results = []
    for product in (grouped_matmul, grouped_matmul_reference):
        x.grad = matrices.grad = None
        out = product(x, matrices.transpose(1, 2), ends)
        out.float().square().sum().backward()
        results.append((out.detach(), x.grad, matrices.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize("fields", [{}, {"lora_experts_r": 4}])
def test_gpu_and_cpu_train_alike(model_cache, tmp_path, fields):
    checkpoint = tiny_glm(model_cache / "glm-64", index_topk=64, moe_intermediate_size=64, q_lora_rank=64, kv_lora_rank=64)
    runs = []
    for use_cpu in (False, True):
        config = sft_config(tmp_path, use_cpu=use_cpu, bf16=False, max_steps=4, **fields)
        trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(16))
        trainer.train()
        runs.append(logged(trainer))
    for (loss, norm), (other_loss, other_norm) in zip(*runs, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-4) and norm == pytest.approx(other_norm, rel=1e-2)


@pytest.mark.parametrize(("seq", "rank", "limit_gib"), [(2048, 0, 17.0), (4096, 4, 21.0)])
def test_memory_at_the_real_shape(tmp_path, seq, rank, limit_gib):
    """Random weights, if `A4B_CHECKPOINT` names a folder of `benchmarks/make_model.py 26b_a4b --smooth`."""
    folder = os.environ.get("A4B_CHECKPOINT")
    if not folder:
        pytest.skip("A4B_CHECKPOINT is not set")
    gc.collect()  # a trainer of another test, which refers to itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = sft_config(tmp_path, use_cpu=False, max_steps=4, per_device_train_batch_size=1, learning_rate=1e-4, lora_experts_r=rank)
    trainer = QLoRASFTTrainer(folder, config, train_dataset=token_rows(1, (seq,)))
    load = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    steps = logged(trainer)
    result = {"test": "experts_memory", "seq": seq, "lora_experts_r": rank, "load_peak_gib": load, "train_peak_gib": peak, "steps": steps}
    print("RESULT", json.dumps(result))
    assert peak <= limit_gib
    assert all(later < earlier for (earlier, _), (later, _) in zip(steps, steps[1:], strict=False)), steps
