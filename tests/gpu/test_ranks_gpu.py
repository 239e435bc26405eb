"""Two GPUs through NCCL train as one, byte for byte where it must be: `python -m pytest tests/gpu/test_ranks_gpu.py -s`.

Each test prints a line `RESULT {json}`.
"""

import json
import os

import pytest
import torch

from tests.distributed import test_checkpoint_ranks, test_sharding
from tests.distributed.launch import run_ranks
from trl_fsdp_qlora.demo.models import tiny_gemma4

pytestmark = [
    pytest.mark.gpu, pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]  # fmt: skip

FSDP = test_sharding.FSDP
# Kernels, graphs, layouts; all on the same rows as one rank.
SCENARIOS = {
    "plain": {"fused": False},
    "fused": {},
    "kept activations": {"keep_activations": True},
    "accumulated": {"steps": 10, "gradient_accumulation_steps": 2},
    "streamed": {"keep_small_shards": True},
    "not resharded": {"env": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}},
    "replicas": {"env": {}},
}
LOSS_BOUND, GRADIENT_BOUND = test_sharding.BOUNDS["bf16"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_gemma4(str(tmp_path_factory.mktemp("models") / "gemma4-8"), num_hidden_layers=8)


def say(name: str, **numbers) -> None:
    print("RESULT", json.dumps({"test": name, "gpu": torch.cuda.get_device_name(), **numbers}))


def train_all(checkpoint, out):
    """In each rank's process: what it saw, by scenario."""
    ranks = int(os.environ["WORLD_SIZE"])
    return {
        name: test_sharding.train(checkpoint, f"{out}/{name}", use_cpu=False, bf16=True, **fields)
        for name, fields in SCENARIOS.items()
        if ranks > 1 or "env" not in fields
    }


def worst(one, other) -> tuple[float, float]:
    """The largest relative differences of losses and of gradient norms, over the steps that both ran."""
    pairs = list(zip(one["steps"], other["steps"], strict=False))
    return tuple(max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i in (0, 1))


def test_two_gpus_train_as_one(checkpoint, tmp_path):
    one = run_ranks(1, train_all, checkpoint, str(tmp_path / "one"), gpu=True, timeout=400)[0]
    two = run_ranks(2, train_all, checkpoint, str(tmp_path / "two"), gpu=True, timeout=400)
    for name in SCENARIOS:
        for rank in two:
            loss, norm = worst(rank[name], one[name if name in one else "fused"])
            say(f"two GPUs against one: {name}", loss=loss, grad_norm=norm, packed_bytes=rank[name]["packed_bytes"])
            assert loss < LOSS_BOUND and norm < GRADIENT_BOUND
            assert rank[name]["trainable_sharded"]
    whole = one["fused"]["packed_bytes"]
    assert all(rank["streamed"]["packed_bytes"] <= 1.05 * whole / 2 for rank in two)


def test_every_bit_pattern_arrives():
    for rank in run_ranks(2, test_sharding.gathered_bytes, "cuda", gpu=True):
        assert len(rank) == 16
        for case in rank:
            assert case["same"] and case["noticed"], case
        say("all 65,536 patterns of 16 bits through NCCL", cases=len(rank))


@pytest.mark.parametrize("saved, resumed", [(2, 1), (1, 2), (2, 2)])
def test_another_number_of_gpus_goes_on(tmp_path, saved, resumed):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    base = tiny_gemma4(str(tmp_path / "base"), num_hidden_layers=3, num_kv_shared_layers=1, layer_types=layers, audio=False)
    options = {"gpu": True, "env": FSDP, "timeout": 300, "use_cpu": False, "bf16": True}
    whole = run_ranks(saved, test_checkpoint_ranks.train, base, str(tmp_path / "whole"), **options)[0]
    [*_, last] = run_ranks(
        resumed, test_checkpoint_ranks.train, base, str(tmp_path / "resumed"), resume=str(tmp_path / "whole" / "checkpoint-2"), **options
    )
    loss, norm = worst({"steps": last}, {"steps": whole})
    say(f"saved by {saved}, resumed by {resumed}", loss=loss, grad_norm=norm)
    assert len(last) == len(whole) == 4
    assert loss < LOSS_BOUND and norm < GRADIENT_BOUND
