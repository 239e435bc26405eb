"""GRPO's checkpoints: a run goes on bit for bit in the middle of a generation cycle, and from an adapter of SFT."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.distributed.launch import run_ranks
from tests.tiny import logged, sft_config, token_rows
from trl_fsdp_qlora import QLoRAGRPOConfig, QLoRAGRPOTrainer, QLoRASFTTrainer, load_model
from trl_fsdp_qlora.demo.models import tiny_gemma4
from trl_fsdp_qlora.loading import quantization_from

ADAPTER = "adapter_model.safetensors"
# Four steps from one generation: two batches of it, each used twice. A checkpoint after every step.
CYCLE = dict(num_generations=2, num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=1)
FIELDS = dict(
    use_cpu=True, max_steps=6, per_device_train_batch_size=2, max_completion_length=5, learning_rate=1e-3, logging_steps=1, report_to=[],
    disable_tqdm=True, save_strategy="steps", save_steps=1, bf16=False, beta=0.1, lora_dropout=0.1, dataloader_pin_memory=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(model_cache):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = str(model_cache / "grpo-gemma4")
    return tiny_gemma4(folder, text_only=True, num_hidden_layers=3, num_kv_shared_layers=1, layer_types=layers)


def prefers_low_ids(completion_ids, **kwargs):
    return [-sum(ids) / 100.0 / len(ids) for ids in completion_ids]


def make(base, folder, model=None, **fields):
    from datasets import Dataset

    torch.set_num_threads(1)
    args = QLoRAGRPOConfig(str(folder), **{**FIELDS, **CYCLE, **fields})
    prompts = Dataset.from_dict({"prompt": [f"Say {word} twice." for word in "one two three four five six seven eight".split()]})
    return QLoRAGRPOTrainer(model or base, prefers_low_ids, args, train_dataset=prompts)


def train(base, folder, resume=None, **fields):
    trainer = make(base, folder, **fields)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer)


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    return folder, train(base, folder)


@pytest.mark.parametrize("step", [1, 3, 4, 5])  # 4 is the end of a cycle
def test_a_run_goes_on_in_the_middle_of_a_generation(base, straight, tmp_path, step):
    folder, losses = straight
    assert len(losses) == 6
    assert train(base, tmp_path, resume=str(folder / f"checkpoint-{step}")) == losses
    one, other = (load_file(root / "checkpoint-6" / ADAPTER) for root in (folder, tmp_path))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_without_its_buffer_a_run_generates_anew(base, straight, tmp_path):
    checkpoint = shutil.copytree(straight[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    (checkpoint / "rollout_buffer.safetensors").unlink()
    record = json.loads((checkpoint / "qlora_state.json").read_text())
    del record["files"]["rollout_buffer.safetensors"]
    (checkpoint / "qlora_state.json").write_text(json.dumps(record))
    losses = train(base, tmp_path, resume=True)
    assert losses[:3] == straight[1][:3] and len(losses) == 6
    assert losses != straight[1]  # so the buffer is what made the others equal


def test_two_ranks_go_on_in_the_middle_of_a_generation(base, tmp_path):
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    whole = run_ranks(2, train, base, str(tmp_path / "whole"), env=env, timeout=200)
    resumed = run_ranks(2, train, base, str(tmp_path / "resumed"), resume=str(tmp_path / "whole/checkpoint-3"), env=env, timeout=200)
    assert len(whole[0]) == 6 and resumed == whole
    # One rank has no use for what two held: it generates anew, and says so.
    assert len(train(base, tmp_path / "one", resume=str(tmp_path / "whole/checkpoint-3"), per_device_train_batch_size=4)) == 6


@pytest.mark.parametrize("how", ["folder", "PeftModel"])
def test_sft_goes_on_as_grpo(base, tmp_path, how):
    args = sft_config(tmp_path / "sft", bf16=False)
    sft = QLoRASFTTrainer(base, args, train_dataset=token_rows(8))
    sft.train()
    sft.save_model()
    fields = dict(max_steps=1, learning_rate=0.0, save_strategy="no", beta=0.0)
    if how == "folder":
        trainer = make(base, tmp_path / "grpo", **fields)
        trainer.train(resume_from_checkpoint=str(tmp_path / "sft"))
    else:
        four_bit = load_model(base, quantization_config=quantization_from("nf4", True, torch.float32, torch.float32), dtype=torch.float32)
        model = PeftModel.from_pretrained(four_bit, tmp_path / "sft", is_trainable=True)
        trainer = make(base, tmp_path / "grpo", model=model, **fields)
        trainer.train()
    trainer.save_model()
    before, after = load_file(tmp_path / "sft" / ADAPTER), load_file(tmp_path / "grpo" / ADAPTER)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_reference_adapter_is_kept(base, tmp_path):
    """GRPO from a trained adapter: TRL keeps a frozen copy of it as the reference, and so does a resumed run."""
    args = sft_config(tmp_path / "sft", bf16=False)
    sft = QLoRASFTTrainer(base, args, train_dataset=token_rows(8))
    sft.train()
    sft.save_model()

    whole = from_adapter(base, str(tmp_path / "sft"), str(tmp_path / "whole"))
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    kept, started = load_file(checkpoint / "ref" / ADAPTER), load_file(tmp_path / "sft" / ADAPTER)
    assert kept.keys() == started.keys() and all(torch.equal(kept[key], started[key]) for key in kept)
    assert from_adapter(base, str(tmp_path / "sft"), str(tmp_path / "resumed"), resume=str(checkpoint)) == whole
    with pytest.raises(ValueError, match="an adapter 'ref' beside the one that trains, which this run lacks"):
        train(base, tmp_path / "without", resume=str(checkpoint), max_steps=3)

    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    both = run_ranks(2, from_adapter, base, str(tmp_path / "sft"), str(tmp_path / "two"), env=env, timeout=200)
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    resumed = run_ranks(2, from_adapter, base, str(tmp_path / "sft"), str(tmp_path / "again"), resume=checkpoint, env=env, timeout=200)
    assert resumed == both
    kept = load_file(tmp_path / "again" / "checkpoint-3" / "ref" / ADAPTER)
    assert all(torch.equal(kept[key], started[key]) for key in started)


def from_adapter(base, adapter, folder, resume=None):
    four_bit = load_model(base, quantization_config=quantization_from("nf4", True, torch.float32, torch.float32), dtype=torch.float32)
    trainer = make(base, folder, model=PeftModel.from_pretrained(four_bit, adapter, is_trainable=True), max_steps=3)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer)
