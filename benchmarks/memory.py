"""Peak accelerator memory and speed of QLoRA training: stock TRL, TRL with everything unquantised in bf16, and this project.

    python benchmarks/memory.py CHECKPOINT --name e2b --out benchmarks/results/memory_e2b.json

Each contender trains in a process of its own, on the same checkpoint and the same random tokens: LoRA r=16 on the seven
usual projections of the language model, gradient checkpointing, fused AdamW. Memory is `torch.cuda.max_memory_allocated`
(and reserved), speed the median of the steps after warm-up. The result names the card, the versions and the shapes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STOCK_TARGETS = rf".*language_model.*\.({'|'.join(PROJECTIONS)})"
CONTENDERS = ("trl", "trl_bf16", "ours", "ours_fsdp_config")
WARM_UP = 3


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--name", default=None, help="name of the model in the result")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--one_batch", action="store_true", help="train every step on the same rows, so that the loss must fall")
    parser.add_argument("--memory_gib", type=float, default=None, help="limit of the process, as on a smaller card")
    parser.add_argument("--extra", nargs="*", default=[], metavar="FIELD=VALUE", help="config fields for this project's runs")
    parser.add_argument("--out", default=None, help="JSON file that the results are added to")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)  # this process is one contender
    return parser.parse_args(argv)


def main():
    args = parse()
    if args.only:
        print("RESULT " + json.dumps(run(args.only, args)), flush=True)
        return
    for contender in args.contenders:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", contender]
        environment = dict(os.environ)
        if contender == "ours_fsdp_config":
            environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        line = next((li for li in done.stdout.splitlines() if li.startswith("RESULT ")), None)
        if line is None:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            result = {"contender": contender, **shape(args), "error": last[:300]}
            print(contender, "failed:", last[:300], flush=True)
            print(done.stderr[-3000:], file=sys.stderr, flush=True)
        else:
            result = json.loads(line.removeprefix("RESULT "))
            print(summary(result), flush=True)
        if args.out:
            write(Path(args.out), [result])


def shape(args) -> dict:
    return {"model": args.name or Path(args.checkpoint).name, "seq": args.seq, "batch": args.batch, "limit_gib": args.memory_gib}


def make_trainer(contender: str, args):
    """A trainer as each contender's users would make it, on the rows that all contenders train on."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig

    vocabulary = AutoConfig.from_pretrained(args.checkpoint).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    count = args.batch if args.one_batch else args.steps * args.batch * int(os.environ.get("WORLD_SIZE", 1))
    rows = torch.randint(6, vocabulary, (count, args.seq), generator=generator)
    rows = rows.repeat(args.steps, 1) if args.one_batch else rows
    common = dict(
        output_dir=f"/tmp/benchmark_{contender}",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        max_length=args.seq,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        bf16=True,
        optim="adamw_torch_fused",
    )
    lora = dict(r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM")
    inputs = dict(
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}), processing_class=AutoTokenizer.from_pretrained(args.checkpoint)
    )
    if contender.startswith("ours"):
        from trl_fsdp_qlora import QLoRASFTConfig, QLoRASFTTrainer

        extra = {key: json.loads(value) for key, value in (field.split("=", 1) for field in args.extra)}
        config = QLoRASFTConfig(**common, lora_target_modules=PROJECTIONS, **extra)
        trainer = QLoRASFTTrainer(args.checkpoint, config, **inputs)
    else:
        from trl import SFTConfig, SFTTrainer

        kept = {"gradient_checkpointing": False} if contender == "trl_bf16_kept" else {}
        config = SFTConfig(**common, **kept, model_init_kwargs={"dtype": "bfloat16"} if contender.startswith("trl_bf16") else None)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        )
        trainer = SFTTrainer(
            args.checkpoint,
            config,
            quantization_config=quantization,
            peft_config=LoraConfig(target_modules=STOCK_TARGETS, **lora),
            **inputs,
        )
    return trainer


def run(contender: str, args) -> dict:
    import torch
    from transformers import TrainerCallback

    gpu = torch.cuda.is_available()  # without one, memory is 0: to see that the benchmark works
    if gpu and args.memory_gib:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory_gib * 2**30 / total)
    start = time.perf_counter()
    trainer = make_trainer(contender, args)
    load_seconds = time.perf_counter() - start
    load_peak, resident = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    packed = packed_bytes(trainer.model)
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            synchronize()
            times.append(time.perf_counter() - self.start)

    trainer.add_callback(Clock())
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    step = statistics.median(times[WARM_UP:] or times)
    return {
        "contender": contender,
        **shape(args),
        "extra": args.extra,
        "gpu": torch.cuda.get_device_name() if gpu else "cpu",
        "versions": versions(),
        "weights": "random",
        "load_seconds": round(load_seconds, 1),
        "load_peak_gib": gib(load_peak),
        "resident_gib": gib(resident),
        "packed_mib": round(packed / 2**20, 1),
        "graphs": graphs(trainer.model),
        "train_peak_gib": gib(peak_bytes(trainer.model)),
        "train_reserved_gib": gib(torch.cuda.max_memory_reserved()),
        "first_step_seconds": round(times[0], 3),
        "step_seconds": round(step, 4),
        "tokens_per_second": round(args.seq * args.batch / step),
        "loss": [round(entry["loss"], 5) for entry in logged],
        "grad_norm": [round(float(entry["grad_norm"]), 5) for entry in logged],
    }


def packed_bytes(model) -> int:
    """Of the 4-bit weights that are on this rank."""
    from trl_fsdp_qlora.packed import packed_weights

    local = [p.to_local() if hasattr(p, "to_local") else p for p in (packed.weight for packed in packed_weights(model).values())]
    return sum(p.numel() * p.element_size() for p in local)


def graphs(model) -> dict | None:
    """Of one rank: how many layers' recordings there are, how many of them keep activations, and whether they made way."""
    pool = next((m.replay.replays for m in model.modules() if hasattr(m, "replay")), None)
    if pool is None:
        return None
    recordings = [recording for kinds in pool.recordings.values() for recording in kinds.values()]
    return {"recordings": len(recordings), "keep": sum(r.keep for r in recordings), "off": pool.broken}


def peak_bytes(model) -> int:
    """Allocated at most. CUDA graphs that made way have had PyTorch forget an earlier peak, and remember it themselves."""
    import torch

    replays = {m.replay.replays for m in model.modules() if hasattr(m, "replay")}
    return max(torch.cuda.max_memory_allocated(), *(r.peak for r in replays), 0)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")}


def gib(count: int) -> float:
    return round(count / 2**30, 3)


def summary(result: dict) -> str:
    return (
        f"{result['model']} {result['contender']:<17} seq {result['seq']} batch {result['batch']}: "
        f"load peak {result['load_peak_gib']:.2f}, resident {result['resident_gib']:.2f}, "
        f"train peak {result['train_peak_gib']:.2f} (reserved {result['train_reserved_gib']:.2f}) GiB, "
        f"{result['tokens_per_second']} tokens/s, loss {result['loss'][0]} -> {result['loss'][-1]}"
    )


def write(path: Path, results: list[dict], keep: bool = True) -> None:
    """Add `results` to the list in `path`, or write them instead of it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if keep and path.exists() else []
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(known + results, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    main()
