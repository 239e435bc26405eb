"""The longest sequence (powers of two) that trains on cards of several sizes.

    python benchmarks/longest_sequence.py CHECKPOINT --name e2b --out benchmarks/results/longest_e2b.json

The model is loaded once, under the smallest limit. For each limit (`torch.cuda.set_per_process_memory_fraction`), training steps
(forward, backward, AdamW; three of each length that CUDA graphs record, so that they are recorded and replayed as in training, and one of
longer ones) run on ever longer rows until one does not fit. What is reported did run under its limit; results are written as they come.
"""

import argparse
import json
import time
from pathlib import Path

from memory import PROJECTIONS, gib, versions, write

STEPS = 3


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--name", default=None)
    parser.add_argument("--limits", type=float, nargs="+", default=[8, 12, 16, 24, 48, 80], help="GiB")
    parser.add_argument("--start", type=int, default=4096)
    parser.add_argument("--stop", type=int, default=131072)
    parser.add_argument("--seconds", type=float, default=120, help="stop after this long, and report what was found")
    parser.add_argument("--extra", nargs="*", default=[], metavar="FIELD=VALUE", help="config fields, values as JSON")
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def main():
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer

    from trl_fsdp_qlora import QLoRASFTConfig, QLoRASFTTrainer
    from trl_fsdp_qlora.kernels.fusing import replays_of
    from trl_fsdp_qlora.kernels.graph_pool import MAX_TOKENS

    args = parse()
    total = torch.cuda.get_device_properties(0).total_memory
    fields = {key: json.loads(value) for key, value in (field.split("=", 1) for field in args.extra)}
    config = QLoRASFTConfig(
        "/tmp/longest_sequence", bf16=True, report_to=[], lora_target_modules=PROJECTIONS, max_length=None, save_strategy="no", **fields
    )
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    rows = Dataset.from_dict({"input_ids": [[6] * 16]})
    trainer = QLoRASFTTrainer(args.checkpoint, config, train_dataset=rows, processing_class=tokenizer)
    model = trainer.accelerator.prepare_model(trainer.model).train()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    replays = replays_of(trainer.model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True)
    vocabulary = model.config.get_text_config().vocab_size

    def step(length: int) -> float:
        """Seconds of one step on random tokens."""
        ids = torch.randint(6, vocabulary, (1, length), device="cuda")
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

        def pass_through():
            with trainer.maybe_activation_offload_context:
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(length, device=ids.device))
                loss.backward()

        started = time.perf_counter()
        trainer.within_memory(pass_through)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    step(64)  # the optimizer's state is there from now on
    deadline = time.perf_counter() + args.seconds
    found, length = [], args.start
    for limit in sorted(args.limits):
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / total))
        best = None
        while length <= args.stop and time.perf_counter() < deadline:
            if replays is not None:  # a training run knows one length and one limit; here each comes in its place
                replays.forget()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                seconds = [step(length) for _ in range(STEPS if length <= MAX_TOKENS else 1)][-1]
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
                trainer.forget_failed_step()
                break
            best = {
                "limit_gib": limit,
                "longest": length,
                "peak_gib": gib(torch.cuda.max_memory_allocated()),
                "reserved_gib": gib(torch.cuda.max_memory_reserved()),
                "step_seconds": round(seconds, 2),
            }
            length *= 2
        if best is None and time.perf_counter() >= deadline:
            break
        if best is None:  # nothing longer than under the limit before
            best = {**found[-1], "limit_gib": limit} if found else {"limit_gib": limit, "longest": None}
        found.append(best)
        print(json.dumps(best), flush=True)
        if args.out:
            write(Path(args.out), [about(args, found, cut_short=time.perf_counter() >= deadline)], keep=False)


def about(args, found: list[dict], cut_short: bool) -> dict:
    import torch

    return {
        "model": args.name or Path(args.checkpoint).name,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "weights": "random",
        "batch": 1,
        "extra": args.extra,
        "cut_short": cut_short,
        "stop": args.stop,
        "longest_sequences": found,
    }


if __name__ == "__main__":
    main()
