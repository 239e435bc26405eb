"""Which dtype 4-bit layers compute in and are packed into, and what the hardware can do."""

import torch

from .logging import get_logger

logger = get_logger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# The containers bitsandbytes can pack two 4-bit numbers per byte into.
STORAGE_DTYPES = {**DTYPES, "uint8": torch.uint8}


def choose_supported_precision(args) -> None:
    """Train on the CPU if there is nothing else; on a GPU without native bf16 (T4, V100), in fp16 if the precision is open.

    `torch.cuda.is_bf16_supported()` says yes on such cards, because it counts emulation; TRL's default is then bf16.
    """
    if not args.use_cpu and not torch.accelerator.is_available():
        # transformers refuses bf16 here, and would train on the CPU without a word with neither precision set.
        logger.info("No accelerator: training on the CPU.")
        args.use_cpu = True
    if args.use_cpu or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 8:
        return
    if args.bf16:
        raise ValueError(
            f"`bf16=True`, but {torch.cuda.get_device_name()} has no native bf16 arithmetic. Write `fp16=True` "
            "(compute and storage are then fp16 throughout), or leave both unset."
        )
    if args.bf16 is None:
        args.fp16, args.bf16 = True, False


def compute_dtype(args) -> torch.dtype:
    """The dtype 4-bit layers compute in and everything unquantised is held in.

    Raises:
        ValueError: if `bnb_4bit_compute_dtype` and the trainer's precision contradict each other.
    """
    trainer_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    chosen = getattr(args, "bnb_4bit_compute_dtype", None)
    if chosen is None or DTYPES[chosen] == trainer_dtype:
        return trainer_dtype
    if trainer_dtype != torch.float32:
        flag = "bf16" if args.bf16 else "fp16"
        raise ValueError(
            f"`bnb_4bit_compute_dtype={chosen!r}` contradicts `{flag}=True`: autocast would cast every product. "
            f"Leave the compute dtype unset, or set `bf16`/`fp16` to match it."
        )
    return DTYPES[chosen]


def storage_dtype(args, compute: torch.dtype) -> torch.dtype:
    """The container dtype of packed weights: the compute dtype unless the user chose another that fits it.

    Raises:
        ValueError: if a 16-bit container meets the other 16-bit compute dtype.
    """
    chosen = getattr(args, "bnb_4bit_quant_storage", None)
    storage = compute if chosen is None else STORAGE_DTYPES[chosen]
    check_storage_fits(storage, compute)
    return storage


def check_storage_fits(storage: torch.dtype, compute: torch.dtype) -> None:
    """fp16 packed storage beside bf16 parameters (or the reverse) is a cast waiting to happen."""
    halves = {torch.bfloat16, torch.float16}
    if storage in halves and storage != compute:
        raise ValueError(
            f"Packed 4-bit storage is {dtype_name(storage)} but the compute dtype is {dtype_name(compute)}: a cast "
            "between them destroys packed bytes. Write the same dtype for `bnb_4bit_quant_storage` and "
            "`bnb_4bit_compute_dtype`, or leave the storage unset."
        )


def dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
