"""From what a user wrote, in fields, in `model_init_kwargs` or as objects, to one quantisation, one dtype, one adapter."""

import torch
from peft import LoraConfig, PeftConfig
from transformers import BitsAndBytesConfig

from .config import QLoRAArguments
from .expert_adapters import add_expert_targets, check_expert_targets, teach_peft
from .logging import get_logger
from .precision import DTYPES
from .targets import resolve_peft_config

logger = get_logger(__name__)

BNB_FIELDS = (
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
)
LORA_FIELDS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_exclude_modules", "lora_experts_r")
LOADING_FIELDS = ("attn_implementation", "per_layer_embedding_device", "tower_device")


def qlora_arguments(args) -> QLoRAArguments:
    """`args` where it carries our fields, else the defaults (a plain TRL config was given)."""
    return args if isinstance(args, QLoRAArguments) else QLoRAArguments()


def resolved_adapter(model: torch.nn.Module, qlora: QLoRAArguments, peft_config: PeftConfig | None) -> PeftConfig:
    """`peft_config`, or what the `lora_*` fields say, with exact targets."""
    if peft_config is None:
        peft_config = lora_config(qlora)
        if qlora.lora_experts_r:
            add_expert_targets(peft_config, model, qlora.lora_experts_r)
    elif unused := qlora.changed_fields(*LORA_FIELDS):
        logger.warning("`peft_config` is given and decides; no effect: %s.", ", ".join(unused))
    check_expert_targets(peft_config, model)
    teach_peft()
    return resolve_peft_config(model, peft_config, language_model_only=qlora.language_model_only)


def lora_config(qlora: QLoRAArguments) -> LoraConfig:
    """The LoRA configuration that the `lora_*` fields describe."""
    return LoraConfig(
        r=qlora.lora_r,
        lora_alpha=qlora.lora_alpha,
        lora_dropout=qlora.lora_dropout,
        target_modules=qlora.lora_target_modules,
        exclude_modules=qlora.lora_exclude_modules or None,
        task_type="CAUSAL_LM",
    )


def one_of(name: str, field, from_kwargs):
    if field is not None and from_kwargs is not None and field != from_kwargs:
        raise ValueError(
            f"`{name}={field!r}` and `model_init_kwargs['{name}']={from_kwargs!r}` disagree: write one of them."
        )
    return field if field is not None else from_kwargs


def one_quantization(qlora: QLoRAArguments, argument, from_kwargs):
    if argument is not None and from_kwargs is not None:
        raise ValueError("`quantization_config` is given to the trainer and in `model_init_kwargs`: write one of them.")
    given = argument if argument is not None else from_kwargs
    changed = qlora.changed_fields(*BNB_FIELDS)
    if given is None:
        if changed and not qlora.load_in_4bit:
            raise ValueError(f"`load_in_4bit=False` quantises nothing, and {', '.join(changed)} asks how. Leave one of the two out.")
        return None
    given = BitsAndBytesConfig(**given) if isinstance(given, dict) else given
    if not isinstance(given, BitsAndBytesConfig):
        raise ValueError(f"`quantization_config={given!r}` is not of bitsandbytes: write `BitsAndBytesConfig(load_in_4bit=True, …)`.")
    if not (given.load_in_4bit or given.load_in_8bit):
        raise ValueError(
            "`quantization_config` asks for neither 4 nor 8 bits. Write `BitsAndBytesConfig(load_in_4bit=True, …)`, or leave it out "
            "and write `load_in_4bit=False` in the config to train a LoRA on 16-bit weights."
        )
    if given.load_in_4bit and not qlora.load_in_4bit:
        raise ValueError("`load_in_4bit=False`, and `quantization_config` asks for 4 bits. Leave one of the two out.")
    if changed:
        raise ValueError(
            f"`quantization_config` is given, and so are {', '.join(changed)}: write one of the two. "
            "The fields are read only when there is no `quantization_config`."
        )
    return given


def as_dtype(dtype, default: torch.dtype) -> torch.dtype:
    if dtype is None or dtype == "auto":
        return default
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"`dtype={dtype!r}` is unknown: write one of {', '.join(map(repr, DTYPES))}.")
    return DTYPES[dtype]
