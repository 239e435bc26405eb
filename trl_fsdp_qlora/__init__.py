"""Fine-tune language models in 4 bit with TRL, on one GPU or on many, by changing one import.

The public names are imported lazily, so that `import trl_fsdp_qlora` alone stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "QLoRAArguments": "config",
    "QLoRAGRPOConfig": "grpo_config",
    "QLoRAGRPOTrainer": "grpo_trainer",
    "QLoRASFTConfig": "config",
    "QLoRASFTTrainer": "sft_trainer",
    "load_model": "loading",
    "resolve_lora_targets": "targets",
    "shard_model": "sharding",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .config import QLoRAArguments, QLoRASFTConfig
    from .grpo_config import QLoRAGRPOConfig
    from .grpo_trainer import QLoRAGRPOTrainer
    from .loading import load_model
    from .sft_trainer import QLoRASFTTrainer
    from .sharding import shard_model
    from .targets import resolve_lora_targets


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return sorted([*globals(), *__all__])
