"""`QLoRAGRPOTrainer` on real gloo ranks: sharded, and with a replicated base."""

import os
from importlib.util import find_spec

import pytest
import torch

from tests.distributed.launch import RankError, run_ranks
from tests.tiny import grpo_config, token_reward
from tests.vllm.support import ENGINE, ENV

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
LAYOUTS = {"FSDP2": FSDP, "base replicated": {}}
HAS_VLLM = find_spec("vllm") is not None
PROMPTS = ["hello world", "what is one and two", "a short text", "123 words"]


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    from trl_fsdp_qlora.demo.models import tiny_gemma4

    return tiny_gemma4(str(model_cache / "grpo"), text_only=True)


def grpo_trainer(checkpoint, output_dir, *, global_batch=8, reward=None, model=None, trainer_args=None, **fields):
    from datasets import Dataset

    from trl_fsdp_qlora import QLoRAGRPOTrainer

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fields = {"bf16": False, "max_steps": 5, "max_completion_length": 8, **fields}
    args = grpo_config(output_dir, per_device_train_batch_size=global_batch // ranks, **fields)
    rows = Dataset.from_dict({"prompt": PROMPTS * 6})
    return QLoRAGRPOTrainer(model or checkpoint, reward or token_reward, args, train_dataset=rows, **(trainer_args or {}))


def given_completions(prompts, trainer):
    """The same completions for the same prompts at any number of ranks, of unequal lengths."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    offset = trainer.args.process_index * len(prompts)
    completion_ids = []
    for row in range(len(prompts)):
        generator = torch.Generator().manual_seed(1000 * trainer.state.global_step + offset + row)
        length = int(torch.randint(1, 9, (1,), generator=generator))
        completion_ids.append(torch.randint(8, 300, (length,), generator=generator).tolist())
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def logged(trainer, *names) -> list[list[float]]:
    return [[float(e[name]) for name in names] for e in trainer.state.log_history if "loss" in e]


def train_on_given_completions(checkpoint, output_dir, **fields):
    trainer = grpo_trainer(checkpoint, output_dir, beta=0.1, trainer_args={"rollout_func": given_completions}, **fields)
    trainer.train()
    return logged(trainer, "loss", "grad_norm", "reward", "kl", "entropy", "completions/mean_length")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_losses_as_one_rank(checkpoint, tmp_path, layout):
    env = {**LAYOUTS[layout], "TRL_EXPERIMENTAL_SILENCE": "1"}
    (alone,) = run_ranks(1, train_on_given_completions, checkpoint, str(tmp_path / "1"), env=env)
    both = run_ranks(2, train_on_given_completions, checkpoint, str(tmp_path / "2"), env=env)
    assert len(alone) == 5 and alone[0][3] == 0 and alone[4][3] > 0
    for steps in both:
        for (*numbers, length), (*expected, expected_length) in zip(steps, alone, strict=True):
            assert length == expected_length
            assert numbers == pytest.approx(expected, rel=2e-4, abs=2e-6)


def train_with_unequal_lengths(checkpoint, output_dir, **fields):
    """Rank 0's completions end after a token or two, rank 1's never do."""
    trainer = grpo_trainer(checkpoint, output_dir, max_completion_length=24, **fields)
    ends = list(range(8, 400)) if trainer.args.process_index == 0 else [1]
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = ends
    trainer.train()
    trainable = sum(p.requires_grad for p in trainer.model.parameters())
    return {
        "lengths": logged(trainer, "completions/min_length", "completions/max_length"),
        "gaps": logged(trainer, "logprob_gap/mean", "logprob_gap/max"),
        "trainable": trainable,
        "losses": logged(trainer, "loss", "reward"),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unequal_lengths_do_not_hang(checkpoint, tmp_path, layout):
    both = run_ranks(2, train_with_unequal_lengths, checkpoint, str(tmp_path), env=LAYOUTS[layout], max_steps=3)
    for rank in both:
        assert all(shortest < 8 and longest == 24 for shortest, longest in rank["lengths"])
        # Generation on sharded weights, with a cache, is the policy that is trained.
        assert all(mean < 1e-4 and largest < 1e-3 for mean, largest in rank["gaps"]), rank["gaps"]
        assert rank["trainable"] == 102
    assert both[0]["losses"] == both[1]["losses"]


def continue_an_adapter(checkpoint, output_dir, **fields):
    """From an adapter that does something, whose frozen copy is the reference."""
    from peft import LoraConfig, get_peft_model

    from trl_fsdp_qlora.loading import load_model, quantization_from
    from trl_fsdp_qlora.targets import resolve_peft_config

    dtype = torch.float32
    base = load_model(checkpoint, quantization_config=quantization_from("nf4", True, dtype, dtype), dtype=dtype, device="cpu")
    torch.manual_seed(0)
    model = get_peft_model(base, resolve_peft_config(base, LoraConfig(r=4, target_modules="all-linear")))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    trainer = grpo_trainer(
        checkpoint, output_dir, model=model, beta=0.1, max_steps=3, trainer_args={"rollout_func": given_completions}, **fields
    )
    trainer.train()
    trainer.save_model()
    sharded = sum(type(p).__name__ == "DTensor" for p in trainer.model.parameters())
    return {
        "steps": logged(trainer, "loss", "grad_norm", "kl"),
        "trainable": sum(p.requires_grad for p in trainer.model.parameters()),
        "sharded": sharded,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_of_a_continued_adapter(checkpoint, tmp_path, layout):
    env = {**LAYOUTS[layout], "TRL_EXPERIMENTAL_SILENCE": "1"}
    (alone,) = run_ranks(1, continue_an_adapter, checkpoint, str(tmp_path / "1"), env=env)
    both = run_ranks(2, continue_an_adapter, checkpoint, str(tmp_path / "2"), env=env)
    for rank in [alone, *both]:
        assert rank["steps"][0][2] == 0 and rank["steps"][1][2] > 0 and rank["trainable"] == 102
    for rank in both:
        assert rank["sharded"] > 0
        for numbers, expected in zip(rank["steps"], alone["steps"], strict=True):
            assert numbers == pytest.approx(expected, rel=2e-4, abs=2e-6)
    for rank_folder in ("1", "2"):
        assert {"adapter_model.safetensors", "ref"} <= set(os.listdir(tmp_path / rank_folder))


def train_with_a_reward_that_fails(checkpoint, output_dir):
    def reward(completions, **kwargs):
        if int(os.environ["RANK"]) == 1:
            raise RuntimeError("the verifier is down")
        return [0.0] * len(completions)

    grpo_trainer(checkpoint, output_dir, reward=reward).train()


def test_a_reward_that_fails_on_one_rank(checkpoint, tmp_path):
    """The rank ends with its own error, which is what a launcher watches for."""
    with pytest.raises(RankError, match="the verifier is down"):
        run_ranks(2, train_with_a_reward_that_fails, checkpoint, str(tmp_path), env=FSDP)


def train_with_an_engine_each(checkpoint, output_dir, **fields):
    trainer = grpo_trainer(
        checkpoint, output_dir, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=160, vllm_engine_kwargs=ENGINE,
        beta=0.1, **fields,
    )  # fmt: skip
    trainer.train()
    return {
        "losses": logged(trainer, "loss", "grad_norm", "reward", "kl"),
        "gaps": logged(trainer, "logprob_gap/mean", "logprob_gap/max"),
        "versions": trainer.vllm_generation.version,
        "sent": sum(t.double().sum().item() for t in trainer.vllm_generation._served.tensors.values()),
        "trainable": sum(p.requires_grad for p in trainer.model.parameters()),
    }


@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM, which the set 'vllm' has")
@pytest.mark.parametrize(("layout", "corrected"), [("FSDP2", True), ("base replicated", False)])
def test_an_engine_on_each_rank(checkpoint, tmp_path, layout, corrected):
    env = {**ENV, **LAYOUTS[layout]}
    both = run_ranks(
        2, train_with_an_engine_each, checkpoint, str(tmp_path / "out"), env=env, timeout=280, load_in_4bit=False,
        vllm_importance_sampling_correction=corrected,
    )  # fmt: skip
    assert both[0]["losses"] == both[1]["losses"] and len(both[0]["losses"]) == 5
    assert both[0]["losses"][0][3] == 0 < both[0]["losses"][4][3]
    assert [rank["versions"] for rank in both] == [5, 5] and both[0]["sent"] == both[1]["sent"]
    assert all(mean < 1e-4 and largest < 2e-3 for rank in both for mean, largest in rank["gaps"])  # the same base, 16 bit
    assert both[0]["trainable"] == 102
