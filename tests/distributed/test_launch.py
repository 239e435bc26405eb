"""The helper that starts ranks: results by rank, a failing rank's traceback, no rank left after a time-out."""

import os
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import RankError, run_ranks


def all_reduce(values):
    torch.distributed.init_process_group("gloo")
    tensor = torch.tensor(values) * (torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(tensor)
    return {"rank": torch.distributed.get_rank(), "sum": tensor.tolist(), "threads": torch.get_num_threads()}


def what_accelerate_sees():
    from accelerate import Accelerator

    state = Accelerator().state
    return [state.num_processes, state.process_index, state.device.type, state.backend]


def fail_on_rank_1():
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 1:
        raise ValueError("the reason of rank 1")
    torch.distributed.barrier()


def hang(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def test_results_come_by_rank():
    results = run_ranks(2, all_reduce, [1, 10])
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert results == [{"rank": rank, "sum": [3, 30], "threads": threads} for rank in range(2)]


def test_accelerate_sees_the_ranks():
    assert run_ranks(2, what_accelerate_sees) == [[2, 0, "cpu", "gloo"], [2, 1, "cpu", "gloo"]]


def test_script_returns_what_it_prints(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])")
    assert run_ranks(2, script, "--steps", 3) == ["0 ['--steps', '3']\n", "1 ['--steps', '3']\n"]


def test_failing_rank_ends_all_and_says_why():
    start = time.monotonic()
    with pytest.raises(RankError, match="the reason of rank 1"):
        run_ranks(2, fail_on_rank_1)
    assert time.monotonic() - start < 60  # not the 120 s that rank 0 would have waited for


def test_timeout_says_where_each_rank_hangs_and_leaves_none(tmp_path):
    with pytest.raises(RankError, match=r"still running after 5 s(.|\n)*in hang(.|\n)*in hang"):
        run_ranks(2, hang, str(tmp_path), timeout=5)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
