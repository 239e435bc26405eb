"""The main job on a small real model that a package ships: no hub, and a GPU only if there is one.

    ./demo.sh                        # does all set-up, then runs this
    ./demo.sh --model tiny-gemma4    # a tiny Gemma 4 with towers, made on the spot

Trains SmolLM2-135M-Instruct in 4 bit to turn a note about an expense into one line of JSON, and shows the loss on held-out notes,
answers before and after, and a picture of the curves in the output folder.
"""

import os
import time
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from trl import TrlParser

from trl_fsdp_qlora import QLoRASFTConfig, QLoRASFTTrainer
from trl_fsdp_qlora.demo.data import held_out_rows, training_rows
from trl_fsdp_qlora.demo.models import smollm2, tiny_gemma4
from trl_fsdp_qlora.demo.report import answer_table, answers, exact_matches, plot_curves

MODELS = {"smollm2": smollm2, "tiny-gemma4": tiny_gemma4}


@dataclass
class DemoArguments:
    model: str = field(default="smollm2", metadata={"help": "smollm2, tiny-gemma4, or the folder or id of another model."})
    train_rows: int = field(default=224, metadata={"help": "Training rows."})
    eval_rows: int = field(default=31, metadata={"help": "Held-out rows; their items occur in no training row."})
    shown: int = field(default=8, metadata={"help": "Held-out rows that are answered and printed, before and after."})


@dataclass
class DemoConfig(QLoRASFTConfig):
    output_dir: str | None = field(default="outputs/sft_demo", metadata={"help": "Folder for the adapter and the picture."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Epochs."})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "Rows a step."})
    per_device_eval_batch_size: int = field(default=31, metadata={"help": "Rows an evaluation step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=4, metadata={"help": "Steps until the peak learning rate."})
    bf16: bool | None = field(default=None, metadata={"help": "Unset: bf16 where the processor or GPU computes in it."})
    max_length: int | None = field(default=128, metadata={"help": "Rows are cut to this many tokens."})
    logging_steps: float = field(default=1, metadata={"help": "Steps between two logs."})
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate on the held-out rows."})
    eval_steps: float | None = field(default=14, metadata={"help": "Steps between two evaluations."})
    save_strategy: str = field(default="no", metadata={"help": "The adapter is saved at the end in any case."})
    report_to: str = field(default="none", metadata={"help": "Where to log."})
    # Few short rows: nothing is gained by computing a layer twice.
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Compute activations again instead of keeping them."})

    def __post_init__(self):
        if self.bf16 is None and (self.use_cpu or not torch.cuda.is_available()):
            # Without such instructions a CPU emulates bf16, many times slower than fp32.
            self.bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
        super().__post_init__()


def main() -> None:
    demo, args = TrlParser((DemoArguments, DemoConfig)).parse_args_and_config()
    start = time.perf_counter()
    on_main = args.process_index == 0
    model = MODELS[demo.model]() if demo.model in MODELS else demo.model
    train, held_out = training_rows(demo.train_rows), held_out_rows(demo.eval_rows)
    trainer = QLoRASFTTrainer(model, args, train_dataset=Dataset.from_list(train), eval_dataset=Dataset.from_list(held_out))

    asked = held_out[: demo.shown]
    loss_before = trainer.evaluate()["eval_loss"]
    before = answers(trainer.model, trainer.processing_class, asked, max_new_tokens=32)
    trainer.train()
    loss_after = trainer.evaluate()["eval_loss"]
    after = answers(trainer.model, trainer.processing_class, asked, max_new_tokens=32)
    trainer.save_model()
    if not on_main:
        return
    history = [{"step": 0, "eval_loss": loss_before}, *trainer.state.log_history]
    picture = plot_curves(history, os.path.join(args.output_dir, "curves.png"), f"{demo.model}, 4-bit LoRA")
    print(f"\n{answer_table(asked, before, after)}\n")
    print(f"held-out loss   {loss_before:.3f} before, {loss_after:.3f} after")
    print(f"exact answers   {exact_matches(asked, before)} before, {exact_matches(asked, after)} after, of {len(asked)}")
    print(f"adapter         {os.path.abspath(args.output_dir)}")
    print(f"curves          {os.path.abspath(picture)}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not args.use_cpu else "CPU"
    print(f"{len(train)} training rows, {len(held_out)} held-out rows, {time.perf_counter() - start:.0f} s on {device}")


if __name__ == "__main__":
    main()
