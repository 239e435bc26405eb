"""Fine-tune Gemma 4 in 4 bit, adapters on the language model only.

One GPU:

    accelerate launch recipes/sft_gemma4.py

Several GPUs, the 4-bit base sharded over them:

    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/sft_gemma4.py

Other sizes have their settings in a file, and every field can be overridden on the command line:

    accelerate launch recipes/sft_gemma4.py --config recipes/configs/gemma4_31b.yaml --learning_rate 1e-4

Your own rows (JSON lines with `messages`, or `prompt` and `completion`, or `text`), and a smoke run of one step:

    accelerate launch recipes/sft_gemma4.py --train_file rows.jsonl --eval_file held_out.jsonl
    accelerate launch recipes/sft_gemma4.py --max_steps 1 --max_length 64 --max_train_samples 1
"""

import os
from dataclasses import dataclass, field

from datasets import Dataset, DatasetDict, load_dataset
from trl import TrlParser

from trl_fsdp_qlora import QLoRASFTConfig, QLoRASFTTrainer
from trl_fsdp_qlora.data_checks import read_json_rows


@dataclass
class RecipeArguments:
    model_name_or_path: str = field(default="google/gemma-4-E2B-it", metadata={"help": "Model id or folder."})
    dataset_name: str = field(default="trl-lib/Capybara", metadata={"help": "Data set id or folder."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on, if there is one."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on, instead of a data set."})
    eval_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=200, metadata={"help": "Evaluate on the first rows only."})


@dataclass
class SFTConfig(QLoRASFTConfig):
    output_dir: str | None = field(default="outputs/sft_gemma4", metadata={"help": "Folder for adapter and checkpoints."})
    learning_rate: float = field(default=2e-4, metadata={"help": "Peak learning rate."})
    max_length: int | None = field(default=2048, metadata={"help": "Rows are cut to this many tokens."})


def load_rows(recipe: RecipeArguments) -> tuple[Dataset, Dataset | None]:
    """Training rows, and held-out rows if there are any."""
    if recipe.train_file:
        train = read_json_rows(recipe.train_file)
        held_out = read_json_rows(recipe.eval_file) if recipe.eval_file else None
    else:
        try:
            splits = load_dataset(recipe.dataset_name, recipe.dataset_config)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"Data set {recipe.dataset_name!r} cannot be loaded: {str(error).splitlines()[0]} "
                "Write `--train_file rows.jsonl` for a local file."
            ) from error
        splits = splits if isinstance(splits, DatasetDict) else DatasetDict({recipe.dataset_train_split: splits})
        if recipe.dataset_train_split not in splits:
            raise ValueError(f"{recipe.dataset_name!r} has no split {recipe.dataset_train_split!r}, but {', '.join(splits)}.")
        train, held_out = splits[recipe.dataset_train_split], splits.get(recipe.dataset_test_split)
    return first_rows(train, recipe.max_train_samples), first_rows(held_out, recipe.max_eval_samples)


def first_rows(rows: Dataset | None, count: int | None) -> Dataset | None:
    return rows if rows is None or count is None else rows.select(range(min(count, len(rows))))


def main() -> None:
    recipe, args = TrlParser((RecipeArguments, SFTConfig)).parse_args_and_config()
    train, held_out = load_rows(recipe)
    trainer = QLoRASFTTrainer(recipe.model_name_or_path, args, train_dataset=train, eval_dataset=held_out)
    before = trainer.evaluate()["eval_loss"] if held_out is not None else None
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"] if held_out is not None else None
    trainer.save_model()
    if args.process_index == 0:
        if held_out is not None:
            print(f"held-out loss: {before:.4f} before, {after:.4f} after")
        print("adapter in", os.path.abspath(args.output_dir))
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=recipe.dataset_name)


if __name__ == "__main__":
    main()
