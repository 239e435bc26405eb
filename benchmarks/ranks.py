"""Several GPUs: memory of each rank, tokens/s and scaling, and whether N ranks train as one, beside stock TRL under FSDP2.

    python benchmarks/ranks.py CHECKPOINT --name e2b --ranks 1 2 --out benchmarks/results/ranks_e2b.json
    python benchmarks/ranks.py CHECKPOINT --name e2b --ranks 1 2 --total_batch 4 --steps 50 --contenders ours ...   # the same rows on all
    python benchmarks/ranks.py CHECKPOINT --name 31b --ranks 1 2 --memory_gib 16 --seq 1024 --contenders ours ...   # which do not fit?

`--batch` rows a rank measure scaling; `--total_batch` rows a step, shared out over the ranks, must give the same losses and gradient
norms at any number of ranks. Contenders: `ours` (sharded), `ours_replicas` (base on each rank), `trl_bf16` (stock, FSDP2). Each runs
on each number of ranks in processes of its own. Without a GPU it runs over gloo, to see that it works; memory is then 0.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import memory

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
STOCK_FSDP = {
    **FSDP,
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Gemma4TextDecoderLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
ENVIRONMENTS = {"ours": FSDP, "ours_replicas": {}, "trl_bf16": STOCK_FSDP}


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--name", default=None, help="name of the model in the result")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contenders", nargs="+", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS))
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="rows a rank and step")
    parser.add_argument("--total_batch", type=int, default=None, help="rows a step over all ranks, instead of --batch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--memory_gib", type=float, default=None, help="limit of each rank")
    parser.add_argument("--seconds", type=float, default=300, help="give a run up after this long")
    parser.add_argument("--extra", nargs="*", default=[], metavar="FIELD=VALUE", help="config fields for this project's runs")
    parser.add_argument("--out", default=None, help="JSON file that the results are added to")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)  # this process is one rank of this contender
    args = parser.parse_args(argv)
    args.one_batch = False
    return args


def main() -> None:
    args = parse()
    if args.only:
        result = run(args.only, args)
        Path(os.environ["RESULTS"], f"{os.environ['RANK']}.json").write_text(json.dumps(result))
        return
    results = []
    about = {**memory.shape(args), "total_batch": args.total_batch, "extra": args.extra, "run": time.strftime("%Y-%m-%d %H:%M:%S")}
    for contender in args.contenders:
        for ranks in args.ranks:
            results.append({**launch(contender, ranks, args), "contender": contender, "ranks": ranks, **about})
            print({key: value for key, value in results[-1].items() if key not in ("loss", "grad_norm", "versions")}, flush=True)
            if args.out:
                memory.write(Path(args.out), results[-1:])
    compare(results)


def launch(contender: str, ranks: int, args) -> dict:
    """The ranks' results as one, or the error of the first that failed."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        common = {
            **os.environ, **ENVIRONMENTS[contender], "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "RESULTS": folder,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]),
        }  # fmt: skip
        free.close()
        if ranks == 1:  # a process that sees several GPUs and is no rank would train with `DataParallel`, which TRL refuses
            common["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = [sys.executable, __file__, *sys.argv[1:], "--only", contender]
        processes = []
        for rank in range(ranks):
            with open(f"{folder}/{rank}.err", "w") as errors:
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors))
        deadline = time.time() + args.seconds
        # A rank that has failed leaves the others waiting for it.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes) and time.time() < deadline:
            time.sleep(0.2)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        late = not failed and any(p.poll() is None for p in processes)
        for process in processes:
            process.kill()
            process.wait()
        if failed or late:
            lines = Path(folder, f"{failed[0] if failed else 0}.err").read_text().strip().splitlines()
            print("\n".join(lines[-25:]), file=sys.stderr, flush=True)
            error = next((li for li in reversed(lines) if "Error" in li), lines[-1] if lines else "no output")
            return {"error": f"not done after {args.seconds:g} s" if late else f"rank {failed[0]}: {error[:300]}"}
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    of_ranks = ("load_peak_gib", "resident_gib", "train_peak_gib", "train_reserved_gib", "packed_mib", "graphs")
    return {**by_rank[0], **{key: [result[key] for result in by_rank] for key in of_ranks}}


def run(contender: str, args) -> dict:
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.total_batch:
        if args.total_batch % ranks:
            raise ValueError(f"--total_batch {args.total_batch} cannot be shared out over {ranks} ranks")
        args.batch = args.total_batch // ranks
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    if ranks == 1:  # as people start one process
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    result = memory.run("ours" if contender.startswith("ours") else contender, args)
    result["tokens_per_second"] *= ranks
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ["RANK"] = str(rank)
    return result


def compare(results: list[dict]) -> None:
    """Print scaling, and how far losses and gradient norms of N ranks are from those of one."""
    for contender in {result["contender"]: None for result in results}:
        same = [result for result in results if result["contender"] == contender and "error" not in result]
        first = next((result for result in same if result["ranks"] == min(r["ranks"] for r in same)), None)
        for result in same:
            if result is first:
                continue
            factor = result["ranks"] / first["ranks"]
            efficiency = result["tokens_per_second"] / first["tokens_per_second"] / factor
            line = f"{contender}: {result['ranks']} ranks against {first['ranks']}: {efficiency:.0%} of {factor:g} times the speed"
            if result["total_batch"]:
                for key in ("loss", "grad_norm"):
                    worst = max(abs(a - b) / abs(b) for a, b in zip(result[key], first[key], strict=True))
                    line += f", {key} within {worst:.1e}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
