"""Rows and configs that several test files use."""

import torch
from datasets import Dataset

VOCABULARY = 300


def token_rows(count: int, lengths=(24,), seed: int = 0) -> Dataset:
    """`count` rows of random token ids; row i has `lengths[i % len(lengths)]` of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(8, VOCABULARY, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]
    return Dataset.from_dict({"input_ids": rows})


def sft_config(output_dir, **fields):
    """A quiet configuration of `QLoRASFTTrainer` for tiny models on the CPU, every step logged."""
    from trl_fsdp_qlora import QLoRASFTConfig

    defaults = dict(
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        shuffle_dataset=False,
        dataloader_pin_memory=False,
    )
    return QLoRASFTConfig(str(output_dir), **{**defaults, **fields})


def logged(trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    return [(float(e["loss"]), float(e["grad_norm"])) for e in trainer.state.log_history if "loss" in e]
