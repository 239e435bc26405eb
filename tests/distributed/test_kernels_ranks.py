"""Fused and replayed layers on two real FSDP2 ranks: weights come from where the unit was gathered, gradients go where FSDP wants them."""

import pytest

from tests.distributed.launch import run_ranks
from trl_fsdp_qlora.demo.models import tiny_gemma4

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
RESHARDED = {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "true"}
SCENARIOS = {
    "plain": {"how": None, "env": RESHARDED},
    "fused": {"how": "fused", "env": RESHARDED},
    "replayed": {"how": "replayed", "env": RESHARDED},
    "replayed, kept gathered": {"how": "replayed", "env": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}},
    "replayed, replicas": {"how": "replayed", "env": {}},
    "replayed, accumulated": {"how": "replayed", "env": RESHARDED, "gradient_accumulation_steps": 2},
}


def train_all(checkpoint, out):
    """In each rank's process: loss and gradient norm of every step, and the number of recordings, by scenario."""
    import torch

    torch.set_num_threads(1)
    return {name: train(checkpoint, f"{out}/{number}", **scenario) for number, (name, scenario) in enumerate(SCENARIOS.items())}


def train(checkpoint, out, how, env, gradient_accumulation_steps=1):
    import os
    from contextlib import nullcontext

    import torch
    from accelerate.state import AcceleratorState

    from tests.fused_on_cpu import fused_on_cpu
    from tests.tiny import logged, sft_config, token_rows
    from trl_fsdp_qlora import QLoRASFTTrainer
    from trl_fsdp_qlora.kernels.fusing import replays_of

    for name in list(os.environ):
        if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP":
            del os.environ[name]
    os.environ.update(env)
    AcceleratorState._reset_state()
    share = int(os.environ.get("WORLD_SIZE", 1)) * gradient_accumulation_steps
    config = sft_config(
        out,
        max_steps=8,
        bf16=False,
        fused=how is not None,
        per_device_train_batch_size=4 // share,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    torch.manual_seed(0)
    with nullcontext() if how is None else fused_on_cpu(replayed=how == "replayed"):
        trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(64))
    trainer.train()
    replays = replays_of(trainer.model)
    recordings = 0 if replays is None else sum(len(kinds) for kinds in replays.recordings.values())
    return {"logged": logged(trainer), "recordings": recordings}


@pytest.mark.timeout(600)
def test_two_ranks_fused_and_replayed_train_as_one_plain_rank(model_cache, tmp_path):
    checkpoint = tiny_gemma4(str(model_cache / "gemma4-8"), num_hidden_layers=8)
    one = run_ranks(1, train_all, checkpoint, str(tmp_path / "one"), timeout=280)[0]
    two = run_ranks(2, train_all, checkpoint, str(tmp_path / "two"), timeout=280)
    expected = one["plain"]["logged"]
    for result in (one, *two):
        for name, seen in result.items():
            assert len(seen["logged"]) == len(expected), name
            for (loss, norm), (expected_loss, expected_norm) in zip(seen["logged"], expected, strict=True):
                assert loss == pytest.approx(expected_loss, rel=1e-4), name
                assert norm == pytest.approx(expected_norm, rel=2e-3), name
            assert (seen["recordings"] > 0) == name.startswith("replayed"), name


def train_after_a_look(checkpoint, out, look):
    import torch

    from tests.tiny import logged, sft_config, token_rows
    from trl_fsdp_qlora import QLoRASFTTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = sft_config(out, max_steps=3, bf16=False)
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(64), eval_dataset=token_rows(4))
    trainer.evaluate()
    if look:
        sum(p.numel() for p in trainer.model.parameters())
    trainer.train()
    return logged(trainer)


def test_parameters_of_replicas_that_were_asked_for_while_gathered(model_cache, tmp_path):
    """Remembered, they would be those that are clipped and cleared from then on, and have no gradients."""
    checkpoint = tiny_gemma4(str(model_cache / "gemma4-8"), num_hidden_layers=8)
    asked, not_asked = (run_ranks(2, train_after_a_look, checkpoint, str(tmp_path), look) for look in (True, False))
    assert asked == not_asked
    assert all(norm > 0.1 for _, norm in asked[0])
