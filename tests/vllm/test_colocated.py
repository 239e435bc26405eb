"""A real vLLM engine in the trainer's process, on the CPU."""

import os
from importlib.util import find_spec

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.distributed.test_grpo_ranks import grpo_trainer, logged
from tests.vllm.support import BLOCK, ENGINE, ENV, TOKENS, Witness, engine_greedy, environment_for_towers, prompt_ids, resident_megabytes

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, which the set 'vllm' has")
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 160, "vllm_engine_kwargs": ENGINE}
STEPS = 5


@pytest.fixture(scope="module")
def checkpoints(model_cache):
    from trl_fsdp_qlora.demo.models import tiny_gemma4

    return {
        "Gemma4ForCausalLM": tiny_gemma4(str(model_cache / "grpo"), text_only=True),
        "Gemma4ForConditionalGeneration": tiny_gemma4(str(model_cache / "grpo_towers")),
    }


def colocated_trainer(checkpoint, output_dir, **fields):
    return grpo_trainer(checkpoint, output_dir, **{**COLOCATED, "max_steps": STEPS, "learning_rate": 0.02, **fields})


def greedy(trainer, tokens=TOKENS):
    outputs = engine_greedy(trainer.vllm_generation.llm, prompt_ids(trainer), tokens)
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def packed_bytes(model):
    from trl_fsdp_qlora.packed import packed_weights

    return {name: module.weight.detach().view(torch.uint8).clone() for name, module in packed_weights(model).items()}


def train_and_compare(checkpoint, output_dir, **fields):
    """Five updates; after each one, greedy tokens of the engine and of transformers, and what the prefix cache gave."""
    from transformers import TrainerCallback

    trainer = colocated_trainer(checkpoint, output_dir, **fields)
    witness = Witness(trainer, checkpoint)
    before = packed_bytes(trainer.model)
    steps = []

    class Compare(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.vllm_generation.sync_weights()
            tokens, first_cached = greedy(trainer)
            again, cached = greedy(trainer)
            steps.append(
                {"engine": tokens, "again": again, "transformers": witness.with_adapter(), "first": first_cached, "cached": cached}
            )

    trainer.add_callback(Compare())
    trainer.train()
    after = packed_bytes(trainer.model)
    return {
        "steps": steps,
        "base": witness.greedy(witness.base),
        "versions": trainer.vllm_generation.version,
        "syncs": logged(trainer, "adapter_sync/ms", "adapter_sync/megabytes"),
        "gaps": logged(trainer, "logprob_gap/mean", "logprob_gap/max"),
        "same_bytes": bool(before) and all(torch.equal(before[name], after[name]) for name in before),
        "way": trainer.vllm_generation.engine.way,
        "prompt": len(prompt_ids(trainer)[-1]),
        "engine_class": type(trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model).__name__,
        "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }


@pytest.mark.parametrize(
    ("architecture", "way"), [("Gemma4ForCausalLM", "memory"), ("Gemma4ForConditionalGeneration", "memory"), ("Gemma4ForCausalLM", "file")]
)
def test_engine_follows_the_adapter(checkpoints, tmp_path, architecture, way):
    (result,) = run_ranks(
        1, train_and_compare, checkpoints[architecture], str(tmp_path / "out"), vllm_adapter_sync=way,
        env=ENV if architecture == "Gemma4ForCausalLM" else environment_for_towers(tmp_path / "paths"), timeout=280,
    )  # fmt: skip
    assert result["engine_class"] == architecture and result["way"] == way
    outputs = []
    for step in result["steps"]:
        assert step["engine"] == step["again"] == step["transformers"]
        # The engine has these prompts cached, but no block of an earlier adapter serves a later one.
        assert step["first"] == [0, 0, 0] and step["cached"][2] >= result["prompt"] // BLOCK * BLOCK - BLOCK > 2 * BLOCK
        outputs.append(step["engine"])
    assert len(outputs) == STEPS and result["base"] not in outputs
    assert all(earlier != later for earlier, later in zip(outputs, outputs[1:], strict=False))
    assert result["versions"] == 1 + STEPS  # before the first rollout, and after each step, however often one asks
    assert all(megabytes == pytest.approx(4 * result["parameters"] / 1e6) for _, megabytes in result["syncs"])
    assert result["same_bytes"]
    assert all(0 < mean < largest for mean, largest in result["gaps"])  # 4 bit against 16 bit


def train_in_16_bit(checkpoint, output_dir, **fields):
    trainer = colocated_trainer(checkpoint, output_dir, load_in_4bit=False, **fields)
    trainer.train()
    return logged(trainer, "logprob_gap/mean", "logprob_gap/max", "sampling/importance_sampling_ratio/max")


def test_no_gap_on_the_same_base(checkpoints, tmp_path):
    (steps,) = run_ranks(1, train_in_16_bit, checkpoints["Gemma4ForCausalLM"], str(tmp_path / "out"), env=ENV, timeout=280)
    assert all(mean < 1e-4 and largest < 2e-3 and ratio < 1.01 for mean, largest, ratio in steps), steps


def sync_many_times(checkpoint, output_dir, count=200, **fields):
    trainer = colocated_trainer(checkpoint, output_dir, **fields)
    rollout = trainer.vllm_generation
    rollout.sync_weights()
    rollout.sync_weights()
    versions = [rollout.version]
    adapters = [p for p in trainer.model.parameters() if p.requires_grad]
    sizes = []
    for step in range(count):
        with torch.no_grad():
            adapters[step % len(adapters)].add_(0.01)
        rollout.sync_weights()
        if step % 20 == 0:
            greedy(trainer, tokens=1)
        sizes.append(resident_megabytes())
    worker = rollout.llm.llm_engine.model_executor.driver_worker
    return {
        "versions": [*versions, rollout.version],
        "growth": sizes[-1] - sizes[20],
        "loaded": list(worker.model_runner.lora_manager.list_adapters()),
        "seconds": sorted(sync.seconds for sync in rollout.syncs)[count // 2],
        "left": os.listdir(output_dir),
    }


@pytest.mark.parametrize("way", ["memory", "file"])
def test_many_syncs_leave_nothing_behind(checkpoints, tmp_path, way):
    (result,) = run_ranks(
        1, sync_many_times, checkpoints["Gemma4ForCausalLM"], str(tmp_path / "out"), vllm_adapter_sync=way,
        env=ENV, timeout=280,
    )  # fmt: skip
    assert result["versions"] == [1, 201]
    assert result["loaded"] == [201]
    assert result["growth"] < 8, result  # MB; the adapter has half of one
    assert not any("adapter-" in name for name in result["left"])


def misuse(checkpoint, output_dir):
    """What the engine must not swallow."""
    trainer = colocated_trainer(checkpoint, output_dir)
    rollout = trainer.vllm_generation
    said = {}

    from trl_fsdp_qlora import rollout as module

    gather = module.gather_served_adapter

    def renamed(*args):
        adapter = gather(*args)
        adapter.tensors = {name.replace("layers.1.mlp", "layers.1.mlpx"): tensor for name, tensor in adapter.tensors.items()}
        return adapter

    module.gather_served_adapter = renamed
    try:
        rollout.sync_weights()
    except ValueError as error:
        said["unmatched"] = str(error)
    module.gather_served_adapter = gather
    rollout.sync_weights()
    try:
        rollout.generate([[5] * 10, [5] * 160], None, 1)
    except ValueError as error:
        said["long"] = str(error)
    said["short"] = len(rollout.generate([[5] * 155], None, 1)[1][0])
    return said


def test_nothing_is_swallowed(checkpoints, tmp_path):
    (said,) = run_ranks(1, misuse, checkpoints["Gemma4ForCausalLM"], str(tmp_path / "out"), env=ENV, timeout=280)
    assert "found 48 of the adapter's 51 modules" in said["unmatched"]
    for module in ("gate_proj", "up_proj", "down_proj"):
        assert f"model.layers.1.mlpx.{module}" in said["unmatched"]
    assert "A prompt has 160 tokens, and the engine takes 160" in said["long"] and "vllm_max_model_length" in said["long"]
    assert said["short"] == 5
