"""Mixtures of experts on several ranks: packed stacks as shards, LoRA on experts, a checkpoint that another number of ranks resumes."""

import pytest

from tests.distributed.launch import run_ranks
from tests.tiny import tiny_glm
from trl_fsdp_qlora.demo.models import tiny_gemma4

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
STEPS = 8
# As in test_sharding.py for fp32: sums of other order, over more steps than one.
LOSS_BOUND, NORM_BOUND = 2e-5, 2e-3


@pytest.fixture(scope="module", params=["gemma", "glm"])
def checkpoint(request, model_cache):
    if request.param == "glm":
        # Sees every token: the indexer's scores are zero for many, and which of those it takes depends on the padding of the batch.
        return tiny_glm(model_cache / "glm-ranks", index_topk=64)
    moe = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    return tiny_gemma4(str(model_cache / "gemma4-moe-ranks"), **moe)


def train(checkpoint, output_dir, small_shards=False, resume=None):
    import os

    from torch.distributed.tensor import DTensor

    from tests.tiny import logged, sft_config, token_rows
    from trl_fsdp_qlora import QLoRASFTTrainer, streaming
    from trl_fsdp_qlora.packed import packed_weights
    from trl_fsdp_qlora.streaming import packed_checksum

    if small_shards:
        streaming.MIN_BYTES = 64
    world_size = int(os.environ["WORLD_SIZE"])
    config = sft_config(
        output_dir, bf16=False, max_steps=STEPS, per_device_train_batch_size=4 // world_size, lora_experts_r=4, save_strategy="steps",
        save_steps=STEPS // 2,
    )  # fmt: skip
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(4 * STEPS, lengths=(24, 9, 17, 30)))
    stacks = {name: p for name, p in packed_weights(trainer.model.get_base_model()).items() if ".experts" in name}
    held = [p.weight.to_local() if isinstance(p.weight, DTensor) else p.weight for p in stacks.values()]
    loaded_in_shards = sum(len(streaming.loaded_in_shards(p.owner)) > 0 for p in stacks.values())
    trainer.train(resume_from_checkpoint=resume)
    whole = {}
    for name, p in stacks.items():
        weight = p.weight.full_tensor() if isinstance(p.weight, DTensor) else p.weight
        whole[name] = packed_checksum(weight).tolist()
    return {
        "steps": logged(trainer),
        "sharded": all(isinstance(p.weight, DTensor) for p in stacks.values()),
        "bytes": sum(p.numel() * p.element_size() for p in held),
        "loaded_in_shards": loaded_in_shards,
        "stacks": len(stacks),
        "whole": whole,
    }


def test_two_ranks_train_as_one_and_resume_each_other(checkpoint, tmp_path):
    (one,) = run_ranks(1, train, checkpoint, str(tmp_path / "one"))
    for small_shards in (False, True):
        two = run_ranks(2, train, checkpoint, str(tmp_path / f"two-{small_shards}"), small_shards, env=FSDP)
        for rank in two:
            assert rank["sharded"] and not one["sharded"]
            assert rank["loaded_in_shards"] == (rank["stacks"] if small_shards else 0)
            assert rank["whole"] == one["whole"]
            assert len(rank["steps"]) == STEPS
            assert_same(rank["steps"], one["steps"])
        assert sum(rank["bytes"] for rank in two) == one["bytes"] and abs(two[0]["bytes"] - two[1]["bytes"]) <= 4 * two[0]["stacks"]
    for rank in run_ranks(2, train, checkpoint, str(tmp_path / "replicas")):
        assert not rank["sharded"] and rank["whole"] == one["whole"]
        assert_same(rank["steps"], one["steps"])
    (again,) = run_ranks(1, train, checkpoint, str(tmp_path / "again"), resume=str(tmp_path / "two-True" / f"checkpoint-{STEPS // 2}"))
    assert_same(again["steps"][-STEPS // 2 :], one["steps"][-STEPS // 2 :])


def assert_same(steps, expected):
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=LOSS_BOUND)
        assert norm == pytest.approx(expected_norm, rel=NORM_BOUND)
