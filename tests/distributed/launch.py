"""Real ranks for tests: `run_ranks` starts gloo processes on the CPU (or, with `gpu`, a process for each GPU), collects what each
returns, and never leaves one behind.

    losses = run_ranks(2, train_some_steps, str(model_folder), steps=20, env={"ACCELERATE_USE_FSDP": "true"})
    outputs = run_ranks(2, "recipes/sft_gemma4.py", "--max_steps", "1")

A function must be importable (defined at a module's top level) and take and return what JSON can carry. It opens the process group itself
(`Accelerator()`, any TrainingArguments, or `torch.distributed.init_process_group("gloo")`); the group is closed for it.

Ranks are forked from a process that has imported the libraries, which takes longer than most tests; but those with a `PYTHONPATH` of
their own, who may import other things under the same names, are new processes.
"""

import atexit
import faulthandler
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE = 2.0  # seconds for the other ranks to say what they saw, once one has failed or the time is over


class RankError(RuntimeError):
    """A rank failed or the time ran out. The message holds what each such rank wrote to stderr, the first to fail first."""


def run_ranks(world_size, target, *args, timeout=120, env=None, gpu=False, **kwargs):
    """Runs `target(*args, **kwargs)` on `world_size` ranks and returns the list of their results, by rank.

    With a script's path as target, the `args` are its command line and a rank's result is what it printed.
    """
    if callable(target):
        spec = {"module": target.__module__, "function": target.__qualname__, "args": args, "kwargs": kwargs}
    else:
        if kwargs:
            raise TypeError(f"a script takes no keyword arguments, got {sorted(kwargs)}")
        spec = {"script": str(target), "args": [str(arg) for arg in args]}

    start = _Fresh if gpu or "PYTHONPATH" in (env or {}) else _Forked
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        folder = Path(folder)
        (folder / "spec.json").write_text(json.dumps(spec))
        ranks = []
        try:
            for rank_env in _environments(world_size, env or {}, gpu):
                ranks.append(start(folder, len(ranks), rank_env))
            failed, timed_out = _wait(ranks, timeout)
            if failed or timed_out:
                raise RankError(_report(folder, ranks, failed, timeout if timed_out else None))
        finally:
            for rank in ranks:
                _kill(rank)
        if callable(target):
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
        return [(folder / f"{rank}.out").read_text() for rank in range(world_size)]


def _environments(world_size, extra, gpu):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **({} if gpu else {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size)),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if sys.platform == "linux":
        common["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the host's name, which need not resolve
    for rank in range(world_size):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **extra}


class _Fresh:
    """A rank in a new process."""

    def __init__(self, folder, rank, env):
        with open(folder / f"{rank}.out", "w") as out, open(folder / f"{rank}.err", "w") as err:
            # A session of its own, so that what a rank starts can be ended with it. Its stdin is a pipe that closes when this process ends.
            command = [sys.executable, "-m", __name__, str(folder)]
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True)
        self.pid, self.poll, self.wait = self.process.pid, self.process.poll, self.process.wait

    def close(self):
        self.process.stdin.close()


class _Forked:
    """A rank in a process that starts with everything imported."""

    def __init__(self, folder, rank, env):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.preload"])
        self.process = context.Process(target=_forked_main, args=(folder, rank, env))
        self.process.start()
        self.pid, self.wait = self.process.pid, self.process.join

    def poll(self):
        return self.process.exitcode

    def close(self):
        self.process.close()


def _forked_main(folder, rank, env):
    os.setsid()
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(env)
    import torch

    # Read from the environment once, before the fork.
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    torch._dynamo.config.disable = env.get("TORCHDYNAMO_DISABLE") == "1"
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (wait([parent]), os._exit(1)), daemon=True).start()  # ends with the process that started it
    try:
        _main(folder)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out, and ranks tell each other there that they end


def _wait(ranks, timeout):
    """The failed ranks in the order they failed, and whether the time ran out."""

    def newly_failed():
        return [i for i, rank in enumerate(ranks) if rank.poll() and i not in failed]

    deadline, failed = time.monotonic() + timeout, []
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        failed += newly_failed()
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    running = [rank for rank in ranks if rank.poll() is None]
    timed_out = bool(running) and not failed
    if timed_out:
        for rank in running:
            os.kill(rank.pid, signal.SIGUSR1)  # faulthandler writes where it hangs
        time.sleep(GRACE)
    return failed + newly_failed(), timed_out


def _report(folder, ranks, failed, timeout):
    lines = [f"{len(failed)} of {len(ranks)} ranks failed" if timeout is None else f"ranks still running after {timeout} s"]
    for i in failed or range(len(ranks)):
        lines.append(f"--- rank {i} (exit code {ranks[i].poll()}), end of stderr:\n{(folder / f'{i}.err').read_text()[-6000:].strip()}")
    return "\n".join(lines)


def _kill(rank):
    try:
        os.killpg(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    rank.wait()
    rank.close()


def _main(folder):
    """The process of one rank."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    spec = json.loads((folder / "spec.json").read_text())
    if "script" in spec:
        sys.argv = [spec["script"], *spec["args"]]
        sys.path[0] = str(Path(spec["script"]).resolve().parent)
        runpy.run_path(spec["script"], run_name="__main__")
        return
    import torch.distributed

    function = importlib.import_module(spec["module"])
    for name in spec["function"].split("."):
        function = getattr(function, name)
    result = function(*spec["args"], **spec["kwargs"])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()  # ends with the process that started it
    _main(Path(sys.argv[1]))
