"""Checkpoints on one rank: resumed runs go on bit for bit, nothing half-written is read, nothing foreign is taken, nothing is executed."""

import json
import logging
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.tiny import logged, sft_config, token_rows
from trl_fsdp_qlora import QLoRASFTTrainer, load_model
from trl_fsdp_qlora.demo.models import tiny_gemma4
from trl_fsdp_qlora.loading import quantization_from
from trl_fsdp_qlora.provenance import is_complete

ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"
SAVING = dict(save_strategy="steps", save_steps=2, max_steps=4, bf16=False)
# What a resumed run reads: each must be there, whole, and nothing that can run code.
STATE_FILES = ("adapter_config.json", ADAPTER, OPTIMIZER, "rng_state.json", "scheduler.pt", "trainer_state.json")


@pytest.fixture(scope="module")
def base(model_cache):
    return small_gemma4(model_cache / "small-gemma4")


def small_gemma4(folder, **options):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return tiny_gemma4(str(folder), text_only=True, num_hidden_layers=3, num_kv_shared_layers=1, layer_types=layers, **options)


def make(base, folder, rows=None, callbacks=None, model=None, **fields):
    rows = token_rows(16, lengths=(20, 9, 14, 24, 7)) if rows is None else rows
    args = sft_config(folder, **{**SAVING, **fields})
    return QLoRASFTTrainer(model or base, args, train_dataset=rows, eval_dataset=rows.select(range(2)), callbacks=callbacks)


def train(base, folder, resume=None, **fields):
    trainer = make(base, folder, **fields)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """A run of four steps with a checkpoint at the second and the fourth; not to be written to."""
    folder = tmp_path_factory.mktemp("straight")
    trainer = train(base, folder)
    return folder, logged(trainer)


@pytest.fixture
def saved(straight, tmp_path):
    """A copy of its checkpoint at step 2, free to be damaged."""
    return Path(shutil.copytree(straight[0] / "checkpoint-2", tmp_path / "checkpoint-2"))


def edit(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def same_tensors(one, other):
    one, other = load_file(one), load_file(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --- resuming goes on bit for bit ---


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 2, "shuffle_dataset": True, "lora_dropout": 0.2},  # random numbers matter
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},  # an epoch has 3 batches: steps of 2 and of 1
        {"packing": True, "max_length": 32, "per_device_train_batch_size": 1},
        {"optim": "adafactor", "lr_scheduler_type": "cosine"},
        {"bf16": True, "adapter_dtype": "bfloat16"},
        {"load_in_4bit": False, "weight_decay": 0.1},
    ],
    ids=["plain", "dropout", "mid-epoch", "packing", "adafactor", "bf16", "16bit"],
)
def test_resumed_run_continues_bit_for_bit(base, tmp_path, fields):
    whole = train(base, tmp_path / "whole", **fields)
    resumed = train(base, tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoint-2", **fields)
    assert len(logged(whole)) == 4
    assert logged(resumed) == logged(whole)
    for name in (ADAPTER, OPTIMIZER):
        assert same_tensors(tmp_path / "whole/checkpoint-4" / name, tmp_path / "resumed/checkpoint-4" / name)


def test_resume_true_takes_the_newest(base, tmp_path, straight):
    for step in (2, 4):
        shutil.copytree(straight[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    for spelt in (True, "True"):  # a command line gives text
        trainer = make(base, tmp_path, max_steps=5, save_strategy="no")
        trainer.train(resume_from_checkpoint=spelt)
        assert logged(trainer)[:4] == straight[1] and len(logged(trainer)) == 5


def test_evaluation_and_best_model_survive_a_resume(base, tmp_path):
    class WorseAfterwards(TrainerCallback):  # so that the best checkpoint is not the last one
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step >= 4:
                for group in optimizer.param_groups:
                    group["lr"] = 1.0

    fields = dict(max_steps=6, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, callbacks=[WorseAfterwards()])
    whole = train(base, tmp_path / "whole", **fields)
    assert whole.state.best_model_checkpoint == str(tmp_path / "whole" / "checkpoint-4")
    whole.save_model(str(tmp_path / "best"))
    assert same_tensors(tmp_path / "best" / ADAPTER, tmp_path / "whole/checkpoint-4" / ADAPTER)
    state = json.loads((tmp_path / "whole/checkpoint-4/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "whole/checkpoint-4")
    shutil.copytree(tmp_path / "whole/checkpoint-2", tmp_path / "resumed/checkpoint-2")
    resumed = train(base, tmp_path / "resumed", resume=True, **fields)
    resumed.save_model(str(tmp_path / "best_resumed"))
    assert same_tensors(tmp_path / "best" / ADAPTER, tmp_path / "best_resumed" / ADAPTER)


def test_early_stop_is_the_same_after_a_restart(base, tmp_path):
    def run(folder, resume=None):
        fields = dict(max_steps=20, save_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=0.3, metric_for_best_model="loss")
        patience = [EarlyStoppingCallback(early_stopping_patience=3)]
        trainer = make(base, folder, callbacks=patience, restore_callback_states_from_checkpoint=True, **fields)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    stopped = whole.state.global_step
    assert 3 < stopped < 20
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / f"checkpoint-{stopped - 2}"))
    assert resumed.state.global_step == stopped
    assert logged(resumed) == logged(whole)


def test_save_only_model_resumes_with_a_new_optimizer(base, tmp_path, caplog):
    train(base, tmp_path, save_only_model=True)
    assert not (tmp_path / "checkpoint-2" / OPTIMIZER).exists()
    resumed = train(base, tmp_path / "resumed", resume=str(tmp_path / "checkpoint-2"), save_only_model=True)
    assert resumed.state.global_step == 4


# --- what is written ---


def test_a_checkpoint_holds_the_adapter_and_no_base_weight(base, straight):
    folder = straight[0] / "checkpoint-4"
    adapter = load_file(folder / ADAPTER)
    assert all(key.startswith("base_model.model.model.layers.") or "per_layer_model_projection" in key for key in adapter)
    assert all(".lora_A.weight" in key or ".lora_B.weight" in key for key in adapter)
    numbers = sum(tensor.numel() for tensor in adapter.values())
    assert (folder / ADAPTER).stat().st_size < 4 * numbers + 200 * len(adapter)
    assert (folder / OPTIMIZER).stat().st_size < 8 * numbers + 600 * len(adapter)
    assert {"tokenizer.json", "qlora_state.json", "README.md", "training_args.json", *STATE_FILES} <= set(os.listdir(folder))
    assert all(file.stat().st_mode & 0o044 for file in folder.iterdir())  # as readable as other files
    record = json.loads((folder / "qlora_state.json").read_text())
    assert record["base"]["name"] == base and record["quantization"]["bnb_4bit_quant_type"] == "nf4"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base and "self_attn" in config["target_modules"]


def test_the_adapter_gives_the_trainers_logits_elsewhere(base, tmp_path):
    trainer = train(base, tmp_path, save_strategy="no", bf16=True)
    trainer.save_model(str(tmp_path / "adapter"))
    ids = torch.arange(8, 40).reshape(2, 16)
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
    assert expected.isfinite().all()
    four_bit = load_model(base, quantization_config=quantization_from("nf4", True, torch.bfloat16, torch.bfloat16))
    loaded = PeftModel.from_pretrained(four_bit, tmp_path / "adapter").eval()
    plain = PeftModel.from_pretrained(load_model(base), tmp_path / "adapter").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as the trainer computes with `bf16=True`
        assert torch.equal(loaded(input_ids=ids).logits.float(), expected)
        assert (plain(input_ids=ids).logits - expected).abs().mean() < 0.5


def test_the_final_model_replaces_files_and_keeps_what_else_is_there(base, tmp_path, straight):
    trainer = make(base, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        trainer.save_model()
    found = set(os.listdir(tmp_path))
    assert {"notes.txt", ADAPTER, "adapter_config.json", "tokenizer.json", "qlora_state.json"} <= found and "_saving" not in found
    assert not found & {"training_args.bin", OPTIMIZER}


def test_save_total_limit_keeps_the_newest_and_the_best(base, tmp_path):
    for name in ("checkpoint-100", "checkpoint-x"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "checkpoint-100", (1, 1))  # of an older run
    train(base, tmp_path, save_steps=1, save_total_limit=1)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "checkpoint-4", "checkpoint-x"]


# --- whole or not at all ---


def test_a_half_written_checkpoint_is_never_picked_up_and_cleared_away(base, tmp_path, straight):
    shutil.copytree(straight[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    shutil.copytree(straight[0] / "checkpoint-4", tmp_path / "_saving" / "checkpoint-4")
    (tmp_path / "_saving" / "checkpoint-4" / OPTIMIZER).unlink()
    trainer = train(base, tmp_path, resume=True)
    assert logged(trainer) == straight[1]
    assert sorted(os.listdir(tmp_path)) == ["README.md", "checkpoint-2", "checkpoint-4"]


def test_a_checkpoint_complete_but_for_its_name_is_rescued(base, tmp_path, straight):
    shutil.copytree(straight[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    shutil.copytree(straight[0] / "checkpoint-4", tmp_path / "_saving" / "checkpoint-4")
    trainer = train(base, tmp_path, resume=True)
    assert logged(trainer) == straight[1] and trainer.state.global_step == 4  # and no step beyond the last
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4"]


def test_a_damaged_newest_checkpoint_is_passed_over_only_by_true(base, tmp_path, straight):
    for step in (2, 4):
        shutil.copytree(straight[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-4" / ADAPTER).unlink()
    assert make(base, tmp_path)._check_start(True) == str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=rf"checkpoint-4/{ADAPTER} is missing"):
        train(base, tmp_path, resume=str(tmp_path / "checkpoint-4"))


def test_killed_at_random_moments_while_saving(capfd):
    command = [sys.executable, str(Path(__file__).with_name("kill_while_saving.py")), "--kills", "32"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    last = result.stdout.splitlines()[-1]
    counts = {name: int(count) for name, count in re.findall(r"([a-z][a-z ]*): (\d+)", last)}
    with capfd.disabled():
        print(f"\n{last}")
    assert counts["kills"] == 32 and counts["inside a save"] >= 10


@pytest.mark.parametrize("limit", [1000, 100_000, 400_000])  # bytes: fails in a JSON, in the adapter, in the optimizer
def test_a_full_disk_is_an_error_and_leaves_the_earlier_checkpoint(base, tmp_path, straight, limit):
    shutil.copytree(straight[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    trainer = make(base, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"checkpoint-4 could not be written .*What was there is as it was"):
            trainer.train(resume_from_checkpoint=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(set(os.listdir(tmp_path)) - {"README.md"}) == ["checkpoint-2"]
    assert is_complete(tmp_path / "checkpoint-2")


def test_a_full_file_system_is_an_error_and_leaves_the_earlier_checkpoint(base, tmp_path, straight):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no file system of its own can be mounted here: {mount.stderr.strip()}")
    try:
        with pytest.raises(OSError, match=r"checkpoint-4 could not be written"):  # the second does not fit
            train(base, disk / "run")
        assert sorted(os.listdir(disk / "run")) == ["README.md", "checkpoint-2"]
        assert is_complete(disk / "run" / "checkpoint-2")
        with pytest.raises(OSError, match="could not be written"):
            with open(disk / "filler", "wb") as filler:
                filler.write(b"x" * (500 << 10))
            make(base, tmp_path / "other").save_model(str(disk / "model"))
        assert not os.path.exists(disk / "model" / ADAPTER)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_cannot_be_written_is_refused_before_training(base):
    with pytest.raises(ValueError, match="`output_dir='/proc/outputs'` cannot be written"):
        make(base, "/proc/outputs")


def test_saving_to_a_folder_that_cannot_be_written_names_it(base, tmp_path):
    with pytest.raises(OSError, match="/proc/model could not be written"):
        make(base, tmp_path).save_model("/proc/model")


# --- what is refused ---


@pytest.fixture(scope="module")
def reader(base, tmp_path_factory):
    """A trainer that tries to read damaged checkpoints."""
    return make(base, tmp_path_factory.mktemp("reader"), save_strategy="no")


@pytest.mark.parametrize("name", [*STATE_FILES, "qlora_state.json"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "emptied"])
def test_a_missing_or_damaged_file_is_named(reader, saved, name, damage):
    if damage == "missing":
        (saved / name).unlink()
    else:
        data = (saved / name).read_bytes()
        (saved / name).write_bytes(data[: len(data) // 2] if damage == "cut short" else b"")
    if (name, damage) == ("qlora_state.json", "missing"):  # then nothing tells that it is ours: the adapter alone is taken
        assert reader._check_start(str(saved)) is None
        return
    with pytest.raises(ValueError, match=rf"checkpoint-2/{name} is (missing|cut short|damaged)"):
        reader.train(resume_from_checkpoint=str(saved))


class Planted:
    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (self.proof,)


@pytest.mark.parametrize("name", [*STATE_FILES, "qlora_state.json", "adapter_model.bin", "optimizer.pt", "scaler.pt", "rng_state.pth"])
def test_a_planted_pickle_is_never_executed(reader, tmp_path, saved, name):
    proof = tmp_path / "executed"
    payload = pickle.dumps(Planted(str(proof)))
    (saved / name).write_bytes(payload)
    record = json.loads((straight_record := saved / "qlora_state.json").read_bytes()) if name != "qlora_state.json" else None
    if record:  # as whoever plants it would make it fit
        straight_record.write_text(json.dumps(record | {"files": record["files"] | {name: len(payload)}}))
    try:
        reader.train(resume_from_checkpoint=str(saved))
    except (ValueError, pickle.UnpicklingError):
        refused = True
    else:
        refused = False
    assert not proof.exists()
    # Without a gradient scaler, and with a file of random numbers of our own, the last two are not even opened.
    assert refused == (name not in ("scaler.pt", "rng_state.pth"))


def test_a_newer_format_is_refused(reader, saved):
    edit(saved / "qlora_state.json", format_version=99)
    with pytest.raises(ValueError, match=r"qlora_state.json has format version 99, and this package reads up to 1"):
        reader.train(resume_from_checkpoint=str(saved))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"bnb_4bit_quant_type": "fp4"}, r"`bnb_4bit_quant_type='nf4'`, here 'fp4'"),
        ({"bnb_4bit_use_double_quant": False}, r"`bnb_4bit_use_double_quant=True`, here False"),
        ({"load_in_4bit": False}, r"a base that is quantised, here not quantised"),
        ({"lora_alpha": 64}, r"`lora_alpha=32`, here 64"),
        ({"per_device_train_batch_size": 1}, r"2 rows a step .*, here 1 rows a step .*`gradient_accumulation_steps=2` would"),
        ({"rows": token_rows(18)}, r"16 training rows, here 18"),
    ],
)
def test_other_settings_are_named_and_can_be_forced(base, tmp_path, straight, fields, message):
    checkpoint = str(straight[0] / "checkpoint-2")
    trainer = make(base, tmp_path, save_strategy="no", **fields)
    with pytest.raises(ValueError, match=message + r".*`force_resume=True` to go on"):
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.args.force_resume = True
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.state.global_step == 4


def test_another_base_is_named(base, tmp_path, straight, model_cache):
    other = small_gemma4(model_cache / "small-gemma4-other", seed=1)  # same configuration and shapes
    with pytest.raises(ValueError, match=rf"base model '{base}', here '{other}' \(fingerprints \w+ and \w+\)"):
        train(other, tmp_path, resume=str(straight[0] / "checkpoint-2"))


def test_a_copy_of_the_base_elsewhere_is_the_same_base(base, tmp_path, straight):
    copied = shutil.copytree(base, tmp_path / "copied")
    assert logged(train(str(copied), tmp_path / "out", resume=str(straight[0] / "checkpoint-2"))) == straight[1]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lora_r": 8, "lora_alpha": 32}, r"`r=16`, here 8"),
        ({"lora_target_modules": ["q_proj"]}, r"holds \d+ tensors that this run lacks, such as 'base_model"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_even_by_force(base, tmp_path, straight, fields, message):
    trainer = make(base, tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(straight[0] / "checkpoint-2"))
    trainer.args.force_resume = True
    with pytest.raises(ValueError, match=r"with shape|tensors that this run lacks"):
        trainer.train(resume_from_checkpoint=str(straight[0] / "checkpoint-2"))


def test_no_checkpoint_to_resume_is_said(base, tmp_path):
    trainer = make(base, tmp_path)
    with pytest.raises(ValueError, match="has no folder checkpoint-N"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="is no folder .*Write True for the newest checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))


# --- going on from an adapter ---


def test_an_adapter_of_other_tools_is_a_starting_point(base, tmp_path, straight):
    stock = tmp_path / "stock"
    model = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), straight[0] / "checkpoint-4")
    model.save_pretrained(stock)  # as peft and TRL write it
    trainer = train(base, tmp_path / "out", resume=str(stock), max_steps=1, learning_rate=0.0)
    assert trainer.state.global_step == 1
    trainer.save_model(str(tmp_path / "again"))
    assert same_tensors(tmp_path / "again" / ADAPTER, stock / ADAPTER)


def test_an_adapter_of_another_base_is_said(base, tmp_path, straight, model_cache, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trl_fsdp_qlora"), "propagate", True)
    stock, other = tmp_path / "stock", small_gemma4(model_cache / "wider", hidden_size=128)
    model = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), straight[0] / "checkpoint-4")
    model.save_pretrained(stock)
    with pytest.raises(ValueError, match="with shape .*It is for another base model"):
        make(other, tmp_path / "out").train(resume_from_checkpoint=str(stock))
    assert f"has an adapter for the base model {base!r}, here {str(other)!r}" in caplog.text


def test_a_final_model_is_a_starting_point(base, tmp_path):
    train(base, tmp_path, save_strategy="no").save_model()
    trainer = train(base, tmp_path / "more", resume=str(tmp_path), rows=token_rows(30, seed=5), learning_rate=0.0, max_steps=1)
    trainer.save_model(str(tmp_path / "again"))
    assert same_tensors(tmp_path / "again" / ADAPTER, tmp_path / ADAPTER)


def test_a_peft_model_is_trained_on_and_neither_frozen_nor_wrapped_nor_reset(base, tmp_path, straight):
    four_bit = load_model(base, quantization_config=quantization_from("nf4", True, torch.float32, torch.float32), dtype=torch.float32)
    model = PeftModel.from_pretrained(four_bit, straight[0] / "checkpoint-4", is_trainable=True)
    trainer = make(base, tmp_path, model=model, rows=token_rows(30, seed=5))
    assert trainer.model is model and type(model.base_model.model).__name__ == "Gemma4ForCausalLM"
    trainer.save_model(str(tmp_path / "before"))
    assert same_tensors(tmp_path / "before" / ADAPTER, straight[0] / "checkpoint-4" / ADAPTER)
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    before, after = load_file(tmp_path / "before" / ADAPTER), load_file(tmp_path / "after" / ADAPTER)
    assert before.keys() == after.keys() and not any(torch.equal(before[key], after[key]) for key in before)
    resumed = train(base, tmp_path / "resumed", resume=str(tmp_path / "checkpoint-2"), rows=token_rows(30, seed=5))
    assert logged(resumed) == logged(trainer)


def test_going_on_from_an_output_folder_that_holds_checkpoints_too(base, tmp_path):
    first = train(base, tmp_path / "first")
    first.save_model()
    assert (tmp_path / "first/checkpoint-4").is_dir()
    second = train(base, tmp_path / "second", resume=str(tmp_path / "first"), max_steps=1, learning_rate=0.0)
    assert second.state.global_step == 1
    second.save_model()
    before, after = (load_file(tmp_path / name / ADAPTER) for name in ("first", "second"))
    assert all(torch.equal(before[name], after[name]) for name in before)
