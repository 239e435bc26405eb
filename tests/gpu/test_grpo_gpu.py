"""GRPO with a vLLM engine in the same process on one GPU: `python -m pytest tests/gpu/test_grpo_gpu.py -s`.

Each test prints a line `RESULT {json}`. The tests at the real shape want E2B_CHECKPOINT, a folder made by
`benchmarks/make_model.py e2b FOLDER --smooth` (norms scaled down: on plain random weights two runs that round differently
have nothing to do with each other). ENGINE_KWARGS, as JSON, goes to `vllm.LLM`.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
pytest.importorskip("vllm", reason="needs vLLM")

SHORT = {"max_completion_length": 32, "max_steps": 3}  # an engine that issues every launch takes a second for a few tokens
PROMPTS = ["the quick brown fox", "brown 123", "0123456789 the quick", "fox fox the"]
# Ways into an engine that differ between vLLM versions and machines.
ENGINE = {"enforce_eager": True, **json.loads(os.environ.get("ENGINE_KWARGS", "{}"))}


@pytest.fixture(scope="module")
def e2b():
    folder = os.environ.get("E2B_CHECKPOINT")
    if not folder:
        pytest.skip("E2B_CHECKPOINT is not set")
    return folder


def token_reward(completion_ids, **kwargs):
    return [sum(i % 7 for i in ids) / max(1, len(ids)) for ids in completion_ids]


def run(name: str, checkpoint: str, output_dir, **fields) -> dict:
    """Train in a process of its own: an engine gives its memory back only when its process ends."""
    command = [sys.executable, __file__, name, checkpoint, str(output_dir), json.dumps(fields)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, f"exit code {done.returncode}:\n{done.stdout[-3000:]}"
    print(line)
    return json.loads(line.removeprefix("RESULT "))


def test_four_bit_at_the_real_shape(e2b, tmp_path):
    """Rollout, log-probabilities, backward, step, first and later syncs in one process, base and engine in 4 bit."""
    result = run("train", e2b, tmp_path, vllm_base_quantization="bitsandbytes")
    assert result["same_base_bytes"] and result["versions"] == result["steps"]
    assert result["megabytes"] == pytest.approx(2 * result["adapter_parameters"] / 1e6)  # bf16
    assert result["sync_ms"][0] < 1000 and statistics.median(result["sync_ms"][1:]) <= 50
    assert max(result["gap_mean"]) < 0.05 and max(result["gap_max"]) < 0.5
    assert result["kl"][0] == 0 and max(result["kl"]) < 1


def test_sixteen_bit_engine(e2b, tmp_path):
    """The engine's base in bf16 beside a 4-bit base in training: another policy, and corrected for."""
    result = run("train", e2b, tmp_path, vllm_base_quantization="none", **SHORT)
    assert result["same_base_bytes"] and statistics.median(result["sync_ms"][1:]) <= 50
    assert 0 < max(result["gap_mean"]) < 0.5


def test_sleeping_between_rollouts(e2b, tmp_path):
    """Level 1: the base sleeps in host memory and is there when the engine wakes."""
    result = run("train", e2b, tmp_path, vllm_base_quantization="bitsandbytes", vllm_enable_sleep_mode=True, **SHORT)
    assert max(result["gap_mean"]) < 0.05 and result["versions"] == result["steps"]


def test_through_a_file(e2b, tmp_path):
    result = run("train", e2b, tmp_path, vllm_base_quantization="bitsandbytes", vllm_adapter_sync="file", **SHORT)
    assert max(result["gap_mean"]) < 0.05


def test_many_syncs(e2b, tmp_path):
    result = run("sync", e2b, tmp_path, vllm_base_quantization="bitsandbytes")
    assert result["growth_mib"] < 8 and result["median_ms"] <= 50


def make_trainer(checkpoint, output_dir, fields):
    from trl_fsdp_qlora import QLoRAGRPOConfig, QLoRAGRPOTrainer

    defaults = dict(
        use_vllm=True, vllm_mode="colocate", vllm_max_model_length=1024, vllm_gpu_memory_utilization=0.3, vllm_engine_kwargs=ENGINE,
        max_steps=4, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=8, max_completion_length=128,
        learning_rate=1e-4, lr_scheduler_type="constant", beta=0.04, lora_r=16, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )  # fmt: skip
    config = QLoRAGRPOConfig(output_dir, **{**defaults, **fields})
    rows = Dataset.from_dict({"prompt": PROMPTS * 64})
    return QLoRAGRPOTrainer(checkpoint, token_reward, config, train_dataset=rows)


def train(checkpoint, output_dir, fields) -> dict:
    from trl_fsdp_qlora.packed import packed_weights

    start = time.perf_counter()
    trainer = make_trainer(checkpoint, output_dir, fields)
    loaded = {"load_seconds": time.perf_counter() - start, "load_peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    torch.cuda.reset_peak_memory_stats()
    before = {name: module.weight.detach().view(torch.uint8).cpu() for name, module in packed_weights(trainer.model).items()}
    trainer.train()
    after = packed_weights(trainer.model)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    rollout = trainer.vllm_generation
    return {
        "fields": fields,
        "card": torch.cuda.get_device_name(),
        **loaded,
        "train_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "steps": len(log),
        "step_seconds": [entry["step_time"] for entry in log],
        "sync_ms": [entry["adapter_sync/ms"] for entry in log],
        "megabytes": log[0]["adapter_sync/megabytes"],
        "way": rollout.engine.way,
        "versions": rollout.version,
        "gap_mean": [entry["logprob_gap/mean"] for entry in log],
        "gap_max": [entry["logprob_gap/max"] for entry in log],
        "kl": [entry["kl"] for entry in log],
        "loss": [entry["loss"] for entry in log],
        "reward": [entry["reward"] for entry in log],
        "adapter_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "same_base_bytes": all(torch.equal(before[name], after[name].weight.detach().view(torch.uint8).cpu()) for name in before),
    }


def sync(checkpoint, output_dir, fields, count=200) -> dict:
    trainer = make_trainer(checkpoint, output_dir, fields)
    rollout = trainer.vllm_generation
    adapters = [p for p in trainer.model.parameters() if p.requires_grad]
    sizes = []
    for step in range(count):
        with torch.no_grad():
            adapters[step % len(adapters)].add_(0.01)
        rollout.sync_weights()
        sizes.append(torch.cuda.memory_allocated() / 2**20)
    milliseconds = sorted(1000 * s.seconds for s in rollout.syncs)
    assert rollout.version == count
    return {
        "median_ms": milliseconds[count // 2],
        "worst_ms": milliseconds[-1],
        "first_ms": 1000 * rollout.syncs[0].seconds,
        "growth_mib": sizes[-1] - sizes[10],
        "megabytes": rollout.syncs[-1].bytes / 1e6,
    }


if __name__ == "__main__":
    what, checkpoint, output_dir, fields = sys.argv[1:]
    print("RESULT " + json.dumps({"train": train, "sync": sync}[what](checkpoint, output_dir, json.loads(fields))), flush=True)
