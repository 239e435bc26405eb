"""Speed of QLoRA training: stock TRL (defaults, and tuned), this project without and with fused operations, and Unsloth if it is installed.

    python benchmarks/speed.py CHECKPOINT --name e2b --out benchmarks/results/speed.json

Each contender trains in a process of its own, on the same checkpoint and the same random tokens, as `memory.py` sets them up.
`step_ms`: median after the warm-up. `busy_ms`, `kernels`, `launches` (by the host): of one profiled step. `host_ms`: what the
host spent in parts of a step, waiting included. `first_step_after_s`, `fourth_step_after_s`: from the start of the process, imports,
loading and compiling included. `floor`: the arithmetic of a step at the rate of large matrix products, as a
share of the step: forward, recomputation and gradients of the inputs through every frozen linear layer and the head.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import memory
from table import speed_table

CONTENDERS = ("trl", "trl_bf16", "trl_bf16_kept", "ours_plain", "ours", "ours_kept", "ours_16bit", "unsloth")
# Config fields of this project's contenders: `ours_kept` keeps activations where there is memory, as `trl_bf16_kept` keeps all;
# `ours_16bit` trains LoRA on an unquantised base.
OURS = {
    "ours": {},
    "ours_plain": {"fused": False},
    "ours_kept": {"keep_activations": True},
    "ours_16bit": {"load_in_4bit": False},
}
MATMUL_TFLOPS = 790  # large bf16 products on an H200
WARM_UP = 4  # compiling; shapes are recorded in the second step


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--name", default=None, help="name of the model in the result")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--extra", nargs="*", default=[], metavar="FIELD=VALUE", help="config fields for this project's runs")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="print the N kernels that take most of a step, of each contender"
    )
    parser.add_argument("--unsloth_path", default=None, help="PYTHONPATH of Unsloth, which wants other versions of packages")
    parser.add_argument("--host_profile", action="store_true", help="print where this project's host time goes in one step")
    parser.add_argument("--out", default=None, help="JSON file that the results are added to")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)  # this process is one contender
    args = parser.parse_args(argv)
    args.one_batch, args.memory_gib = False, None
    return args


def main() -> None:
    args = parse()
    if args.only:
        print("RESULT " + json.dumps(run(args.only, args)), flush=True)
        return
    results = []
    # Runs on one machine compare, as long as it is not started anew: another may have another host.
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + platform.node()
    about = {**memory.shape(args), "extra": args.extra, "run": time.strftime("%Y-%m-%d %H:%M:%S"), "machine": _short(machine)}
    for contender in args.contenders:
        environment = {**os.environ, "STARTED": str(time.time())}
        if contender == "unsloth" and args.unsloth_path:
            environment["PYTHONPATH"] = args.unsloth_path
        elif contender == "unsloth" and find_spec("unsloth") is None:
            print("unsloth is not installed: left out", flush=True)
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--only", contender]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        line = next((li for li in done.stdout.splitlines() if li.startswith("RESULT ")), None)
        if line is None:
            error = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
            results.append({"contender": contender, **about, "error": error})
            print(done.stderr[-4000:], file=sys.stderr, flush=True)
        else:
            results.append({"contender": contender, **about, **json.loads(line.removeprefix("RESULT "))})
            notes = [li for li in done.stderr.splitlines() if any(part in li for part in ("fused operations", "CUDA graph", "keep their"))]
            print("\n".join(notes + [li for li in done.stdout.splitlines() if not li.startswith(("RESULT ", "{'"))]), flush=True)
        print({k: v for k, v in results[-1].items() if k not in ("loss", "grad_norm", "versions")}, flush=True)
        if args.out:
            memory.write(Path(args.out), results[-1:])
    print(speed_table(results), flush=True)


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def run(contender: str, args) -> dict:
    start = time.perf_counter()
    unsloth = unsloth_trainer(args) if contender == "unsloth" else None  # before anything that it patches
    import torch
    from transformers import TrainerCallback

    args.extra = [*args.extra, *(f"{field}={json.dumps(value)}" for field, value in OURS.get(contender, {}).items())]
    start = start if unsloth else time.perf_counter()
    trainer = unsloth or memory.make_trainer("ours" if contender in OURS else contender, args)
    load_seconds = time.perf_counter() - start
    load_peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    ends: list[float] = []
    host: dict[str, list[float]] = {}
    profiled = {}

    class Clock(TrainerCallback):
        profiler = calls = None

        def on_train_begin(self, _args, state, control, **kwargs):
            _time_parts(trainer, host)

        def on_step_begin(self, _args, state, control, **kwargs):
            torch.cuda.synchronize()
            if state.global_step == args.steps - 1:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]).__enter__()
            if state.global_step == args.steps - 2 and args.host_profile and contender in OURS:
                import cProfile

                self.calls = cProfile.Profile()
                self.calls.enable()
            for parts in host.values():
                parts.append(0.0)
            self.start = time.perf_counter()

        def on_step_end(self, _args, state, control, **kwargs):
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.start)
            ends.append(time.time() - float(os.environ["STARTED"]))
            if self.profiler is not None:
                self.profiler.__exit__(None, None, None)
                profiled.update(_kernels(self.profiler, args.kernels))
            if self.calls is not None:
                import pstats

                self.calls.disable()
                pstats.Stats(self.calls, stream=sys.stdout).sort_stats("cumulative").print_stats(70).sort_stats("tottime").print_stats(30)
                self.calls = None

    trainer.add_callback(Clock())
    begin = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - begin
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    measured = slice(WARM_UP, -2 if args.host_profile else -1)
    step = statistics.median(times[measured] or times)
    layers, head = _frozen_numbers(trainer.model)
    # Forward and gradients of inputs; the head is always computed again, and layers unless their activations are kept.
    flops = 2 * args.batch * args.seq * ((3 - _kept_share(trainer.model)) * layers + 3 * head)
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": memory.versions(),
        "weights": "random",
        "tokens_per_second": round(args.seq * args.batch / step),
        "step_ms": round(step * 1000, 1),
        "spread_ms": [round(t * 1000, 1) for t in sorted(times[measured] or times)[:: max(1, len(times[measured]) - 1)]],
        **profiled,
        "host_ms": {name: round(statistics.median(parts[measured] or parts) * 1000, 1) for name, parts in host.items()},
        "floor_ms": round(flops / MATMUL_TFLOPS / 1e9, 1),
        "floor": round(flops / MATMUL_TFLOPS / 1e12 / step, 3),
        "first_steps_s": [round(t, 2) for t in times[:WARM_UP]],
        "first_step_after_s": round(ends[0], 1),
        "fourth_step_after_s": round(ends[3], 1),
        "load_s": round(load_seconds, 1),
        "between_steps_ms": round((whole - sum(times)) / len(times) * 1000, 1),
        "load_peak_gib": memory.gib(load_peak),
        "train_peak_gib": memory.gib(memory.peak_bytes(trainer.model)),
        "train_reserved_gib": memory.gib(torch.cuda.max_memory_reserved()),
        "loss": [round(entry["loss"], 5) for entry in logged],
        "grad_norm": [round(float(entry["grad_norm"]), 5) for entry in logged],
    }


def _kept_share(model) -> float:
    """The share of the decoder layers that are not computed again."""
    layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing") and type(m).__name__.endswith("TextDecoderLayer")]
    kept = [m for m in layers if not m.gradient_checkpointing or "replay" in vars(m) and m.replay.replays.keepers.get(m.replay)]
    return len(kept) / len(layers) if layers else 0.0


def _time_parts(trainer, host: dict[str, list[float]]) -> None:
    """Measure what the host spends in the parts of a step."""

    def timed(owner, name: str, label: str):
        function = getattr(owner, name)
        host.setdefault(label, [])

        def wrapper(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if host[label]:
                    host[label][-1] += time.perf_counter() - begin

        setattr(owner, name, wrapper)

    timed(trainer, "training_step", "training_step")
    timed(trainer, "compute_loss", "forward")
    timed(trainer.accelerator, "backward", "backward")
    timed(trainer.accelerator, "clip_grad_norm_", "clip")
    timed(trainer.optimizer, "step", "optimizer")
    for name, module in trainer.model.named_modules():
        if name.endswith("embed_tokens_per_layer"):
            timed(module, "forward", "per_layer_embedding")


def _kernels(profiler, shown: int) -> dict:
    events = profiler.events()
    on_device = [
        e for e in events if str(e.device_type).endswith("CUDA") and not getattr(e, "is_user_annotation", False) and "#" not in e.name
    ]
    if shown:
        by_name: dict[str, list[float]] = {}
        for event in on_device:
            by_name.setdefault(event.name, []).append(event.device_time / 1000)
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:shown]:
            print(f"{sum(times):8.2f} ms in {len(times):5} launches  {name[:150]}")
        _print_gaps(on_device, shown)
    launches = sum(e.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync")) for e in events)
    return {"busy_ms": round(sum(e.device_time for e in on_device) / 1000, 1), "kernels": len(on_device), "launches": launches}


def _print_gaps(on_device, shown: int) -> None:
    """The longest times in which the GPU waited for work, when, and between which kernels."""
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_device)
    start, busy_until, last, gaps = spans[0][0], spans[0][1], spans[0][2], []
    for begin, end, name in spans[1:]:
        if begin > busy_until:
            gaps.append((begin - busy_until, busy_until - start, last, name))
        if end > busy_until:
            busy_until, last = end, name
    print(f"from first to last kernel {(busy_until - start) / 1000:.1f} ms, idle {sum(gap[0] for gap in gaps) / 1000:.1f} ms of it")
    for length, at, before, after in sorted(gaps, reverse=True)[:shown]:
        print(f"idle {length / 1000:6.2f} ms at {at / 1000:7.1f} ms, after {before[:60]}, before {after[:60]}")


def _frozen_numbers(model) -> tuple[int, int]:
    """Numbers in the matrices that every token meets: frozen linear layers of the language model, and the head."""
    from torch import nn

    config = model.config.get_text_config()
    linears = {
        id(m): m.in_features * m.out_features
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and "lora_" not in name and "tower" not in name and "embed_" not in name and "lm_head" not in name
    }
    return sum(linears.values()), config.hidden_size * config.vocab_size


def unsloth_trainer(args):
    """As Unsloth's notebooks do it; it patches other libraries, so it comes first in its process."""
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    from unsloth import FastModel  # isort: skip
    import torch
    from datasets import Dataset
    from transformers import default_data_collator
    from trl import SFTConfig, SFTTrainer

    model, processor = FastModel.from_pretrained(
        args.checkpoint, max_seq_length=args.seq, dtype=torch.bfloat16, load_in_4bit=True, use_gradient_checkpointing="unsloth"
    )
    model = FastModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=memory.STOCK_TARGETS, use_gradient_checkpointing="unsloth"
    )
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(6, vocabulary, (args.steps * args.batch, args.seq), generator=torch.Generator().manual_seed(0))
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist(), "labels": ids.tolist()})
    config = SFTConfig(
        "/tmp/benchmark_unsloth", max_steps=args.steps, per_device_train_batch_size=args.batch, max_length=args.seq, learning_rate=1e-4,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, bf16=True,
        optim="adamw_torch_fused", packing=False, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
    )  # fmt: skip
    tokenizer = getattr(processor, "tokenizer", processor)
    return SFTTrainer(model, config, default_data_collator, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    main()
