"""Checkpoints on real ranks: any number of them resumes what any other number wrote, and no rank waits for another without a word."""

import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import RankError, run_ranks
from trl_fsdp_qlora.demo.models import tiny_gemma4

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
REPLICAS = {}
# In fp32, one rank and several differ in the order of a few sums only; the same bounds as of their losses without a checkpoint.
LOSS_BOUND, GRADIENT_BOUND = 2e-5, 2e-3
FIELDS = dict(max_steps=4, save_strategy="steps", save_steps=2, bf16=False, gradient_accumulation_steps=2, shuffle_dataset=True)
ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"


def make(base, folder, rows_per_step=8, **fields):
    from tests.tiny import sft_config, token_rows
    from trl_fsdp_qlora import QLoRASFTTrainer

    torch.set_num_threads(1)
    fields = {**FIELDS, **fields}
    size = int(os.environ["WORLD_SIZE"])
    fields["per_device_train_batch_size"] = rows_per_step // size // fields["gradient_accumulation_steps"]
    rows = token_rows(44, lengths=(20, 9, 14, 24, 7))
    return QLoRASFTTrainer(base, sft_config(folder, **fields), train_dataset=rows, eval_dataset=rows.select(range(4)))


def train(base, folder, resume=None, save_to=None, **fields):
    from tests.tiny import logged

    trainer = make(base, folder, **fields)
    trainer.train(resume_from_checkpoint=resume)
    if save_to:
        trainer.save_model(save_to)
    return logged(trainer)


def several(runs):
    """Several runs in one start of the ranks, because starting costs more than they do."""
    return {name: train(**run) for name, run in runs.items()}


@pytest.fixture(scope="module")
def base(model_cache):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = str(model_cache / "three-layer-gemma4")
    return tiny_gemma4(folder, num_hidden_layers=3, num_kv_shared_layers=1, layer_types=layers, audio=False)


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """By number of ranks: the losses of a run, whose folder has checkpoints at steps 2 and 4, and of its resumption at step 2."""
    root, losses = tmp_path_factory.mktemp("written"), {}
    for size in (1, 2):
        whole, resumed = str(root / f"{size}"), str(root / f"{size}-resumed")
        runs = {
            "whole": dict(base=base, folder=whole, save_to=f"{whole}/final"),
            "resumed": dict(base=base, folder=resumed, resume=f"{whole}/checkpoint-2"),
        }
        found = run_ranks(size, several, runs, env=FSDP, timeout=240)
        assert all(rank == found[0] for rank in found)
        losses[size] = found[0]
    return root, losses


def close(one, other):
    assert len(one) == len(other) == 4
    for (loss, gradient), (other_loss, other_gradient) in zip(one, other, strict=True):
        assert loss == pytest.approx(other_loss, abs=LOSS_BOUND)
        assert gradient == pytest.approx(other_gradient, rel=GRADIENT_BOUND)


def identical(one, other):
    one, other = load_file(one), load_file(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(written, size):
    root, losses = written
    assert len(losses[size]["whole"]) == 4
    assert losses[size]["resumed"] == losses[size]["whole"]
    for name in (ADAPTER, OPTIMIZER):
        assert identical(root / f"{size}/checkpoint-4/{name}", root / f"{size}-resumed/checkpoint-4/{name}")


def test_files_are_the_same_at_any_number_of_ranks(written):
    root, losses = written
    close(losses[1]["whole"], losses[2]["whole"])
    for step in (2, 4):
        one, two = root / f"1/checkpoint-{step}", root / f"2/checkpoint-{step}"
        assert sorted(os.listdir(one)) == sorted(os.listdir(two))
        for name in (ADAPTER, OPTIMIZER):
            first, second = load_file(one / name), load_file(two / name)
            assert {k: (v.shape, v.dtype) for k, v in first.items()} == {k: (v.shape, v.dtype) for k, v in second.items()}
    first, second = load_file(root / "1/final" / ADAPTER), load_file(root / "2/final" / ADAPTER)
    assert all(key.startswith("base_model.model.model.language_model.") for key in first)
    assert max((first[key] - second[key]).abs().max() for key in first) < 1e-4
    assert identical(root / "2/final" / ADAPTER, root / "2/checkpoint-4" / ADAPTER)
    assert len(json.loads((root / "2/checkpoint-2/rng_state.json").read_text())["ranks"]) == 2


@pytest.mark.parametrize("saved, size, env", [(2, 1, FSDP), (1, 2, FSDP), (2, 4, FSDP), (2, 2, REPLICAS)])
def test_other_numbers_and_layouts_of_ranks_go_on(base, written, tmp_path, saved, size, env):
    root, losses = written
    resumed = run_ranks(size, train, base, str(tmp_path), resume=str(root / f"{saved}/checkpoint-2"), env=env, timeout=240)
    close(resumed[0], losses[1]["whole"])


def mark_own_shards(base, folder, resume=None):
    """Fill the adapter's shards with numbers that only this rank has, save; or resume, and say what each rank then holds."""
    from trl_fsdp_qlora.sharding import full_tensors

    trainer = make(base, folder)
    rank = trainer.args.process_index
    adapters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in adapters.values():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.fill_(0.0 if resume else 1.0 + rank)
    if resume:
        trainer._load_from_checkpoint(resume)
    else:
        trainer.save_model()
    whole = full_tensors(list(adapters.values()))
    return {name: tensor.double().sum().item() for name, tensor in zip(adapters, whole, strict=True)}


@pytest.mark.parametrize("saving, loading", [(1, 2), (2, 1)])
def test_every_ranks_slice_is_saved_and_loaded(base, tmp_path, saving, loading):
    saved = run_ranks(saving, mark_own_shards, base, str(tmp_path / "adapter"), env=FSDP)
    loaded = run_ranks(loading, mark_own_shards, base, str(tmp_path / "out"), resume=str(tmp_path / "adapter"), env=FSDP)
    assert all(rank == saved[0] for rank in saved + loaded)
    values = {value for tensor in load_file(tmp_path / "adapter" / ADAPTER).values() for value in tensor.unique().tolist()}
    assert values == {1.0 + rank for rank in range(saving)}


def best_model_and_limits(base, folder):
    """Evaluation, the best model at the end, and a limit of one checkpoint, on several ranks."""
    trainer = make(base, folder, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, save_total_limit=1, learning_rate=1e-2)
    trainer.train()
    trainer.save_model(f"{folder}/best")
    return {"best": trainer.state.best_model_checkpoint, "found": sorted(os.listdir(folder))}


def test_the_best_model_at_the_end_on_two_ranks(base, tmp_path):
    first, second = run_ranks(2, best_model_and_limits, base, str(tmp_path / "run"), env=FSDP)
    assert first == second
    assert identical(tmp_path / "run/best" / ADAPTER, Path(first["best"]) / ADAPTER)
    assert [name for name in first["found"] if name.startswith(("checkpoint", "_"))] == [os.path.basename(first["best"])]


# --- no rank waits in silence ---


def save_on_rank_0_only(base, folder, then):
    trainer = make(base, folder, ddp_timeout=6)
    if trainer.args.process_index == 0:
        start = time.monotonic()
        try:
            trainer.save_model(f"{folder}/model")
        except RuntimeError as error:
            # Not through the launcher's usual way: the other rank may be gone or hang.
            Path(folder, "error").write_text(f"{time.monotonic() - start:.1f} {error}")
            os._exit(3)
    elif then == "hang":
        time.sleep(60)
    elif then == "other call":
        trainer.save_model(f"{folder}/other")


@pytest.mark.parametrize(
    "then, message",
    [
        ("hang", r"rank 1 did not come within 6 s \(`ddp_timeout`\)"),
        ("end", r"rank 1 has ended"),
        ("other call", r"Ranks make different calls \(rank 0: `save_model\('.*/model'\)`; rank 1: `save_model\('.*/other'\)`\)"),
    ],
)
def test_saving_on_rank_0_only_is_an_error_that_says_so(base, tmp_path, then, message):
    with pytest.raises(RankError):
        run_ranks(2, save_on_rank_0_only, base, str(tmp_path), then, env=FSDP, timeout=60)
    waited, _, error = (tmp_path / "error").read_text().partition(" ")
    assert float(waited) < 15
    assert re.search(message, error)
    assert "Remove the `if rank == 0`" in error


def meet_slowly(rank_0_comes):
    """What rank 1, which asks the store twice a second, hears from rank 0, whose process ends when it has spoken."""
    from accelerate import PartialState

    from trl_fsdp_qlora import ranks as module

    PartialState(cpu=True)
    ranks, sleep = module.Ranks(timeout=60), time.sleep
    if ranks.rank == 1:
        module.time = SimpleNamespace(sleep=lambda _: sleep(0.5), monotonic=time.monotonic)
    else:
        sleep(0.3)  # the other one is waiting by now
        if not rank_0_comes:
            os._exit(3)
    ranks.meet("`call()`")
    return ranks.hear(f"from rank {ranks.rank}")


def test_the_rank_with_the_store_leaves_last():
    assert run_ranks(2, meet_slowly, True) == ["from rank 0", "from rank 0"]


def test_a_store_that_has_gone_is_an_error_that_says_so():
    with pytest.raises(RankError, match=r"Rank 1 is in `call\(\)`, but rank 0, which holds the store, has ended. Every rank must call"):
        run_ranks(2, meet_slowly, False)


def run_out_of_space(base, folder):
    import resource

    trainer = make(base, folder)
    if trainer.args.process_index == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        trainer.train(resume_from_checkpoint=True)
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(error)


def test_a_full_disk_is_an_error_on_every_rank(base, written, tmp_path):
    shutil.copytree(written[0] / "2/checkpoint-2", tmp_path / "checkpoint-2")
    errors = run_ranks(2, run_out_of_space, base, str(tmp_path), env=FSDP)
    assert all("checkpoint-4 could not be written" in error for error in errors)
    assert sorted(set(os.listdir(tmp_path)) - {"README.md"}) == ["checkpoint-2"]
