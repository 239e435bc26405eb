"""The fields that `QLoRAGRPOConfig` adds to TRL's, and their checks."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trl import GRPOConfig

from .config import QLoRAArguments, check_training_arguments
from .precision import choose_supported_precision

BASE_QUANTIZATIONS = ("none", "bitsandbytes")
SYNC_WAYS = ("auto", "memory", "file")
# What the engine is told about adapters and quantisation follows from other fields.
SET_ELSEWHERE = {
    "quantization": "vllm_base_quantization",
    "max_model_len": "vllm_max_model_length",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "enable_lora": None,
    "max_lora_rank": None,
    "max_loras": None,
    "lora_target_modules": None,
    "model": None,
    "distributed_executor_backend": None,
    "logprobs_mode": None,
}


@dataclass
class QLoRAGRPOConfig(QLoRAArguments, GRPOConfig):
    """`trl.GRPOConfig` plus the fields of `QLoRAArguments` and those of vLLM rollouts with adapters.

    Parameters:
        vllm_base_quantization: what a colocated engine makes of the base checkpoint: `"none"` serves it in the 16-bit
            dtype the trainer computes in, `"bitsandbytes"` in 4 bit (inside vLLM up to 0.27, later with the package
            vllm-bnb-plugin).
        vllm_engine_kwargs: further arguments of `vllm.LLM` for a colocated engine, such as `enforce_eager`.
        vllm_adapter_sync: how a colocated engine gets adapters: from memory, through a file, or (`"auto"`) from memory
            where the installed vLLM allows it.
        vllm_adapter_dir: where adapters are written for a vLLM server, which must be able to read it under the same
            path. By default `.rollout_adapters` in `output_dir`.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]

    vllm_base_quantization: Literal["none", "bitsandbytes"] = field(
        default="none", metadata={"help": "Base of a colocated engine: none (16 bit) or bitsandbytes (4 bit)."}
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of vllm.LLM for a colocated engine, as JSON."}
    )
    vllm_adapter_sync: Literal["auto", "memory", "file"] = field(
        default="auto", metadata={"help": "How a colocated engine gets adapters: auto, memory or file."}
    )
    vllm_adapter_dir: str | None = field(
        default=None, metadata={"help": "Where adapters are written for a vLLM server. Unset: in output_dir."}
    )

    def __post_init__(self):
        choose_supported_precision(self)
        GRPOConfig.__post_init__(self)
        QLoRAArguments.__post_init__(self)
        check_training_arguments(self)
        _check_rollout_fields(self)


def _check_rollout_fields(args: QLoRAGRPOConfig) -> None:
    for name, choices in (("vllm_base_quantization", BASE_QUANTIZATIONS), ("vllm_adapter_sync", SYNC_WAYS)):
        if getattr(args, name) not in choices:
            raise ValueError(f"`{name}={getattr(args, name)!r}` is unknown: write one of {', '.join(map(repr, choices))}.")
    for name in sorted(set(args.vllm_engine_kwargs or ()) & set(SET_ELSEWHERE)):
        instead = SET_ELSEWHERE[name]
        raise ValueError(
            f"`vllm_engine_kwargs` holds {name!r}, which "
            + (f"is set by `{instead}`. Write that." if instead else "the trainer sets itself. Leave it out.")
        )
    if not args.use_vllm:
        place = "needs `use_vllm=True`"
    elif args.vllm_mode == "server":
        place = "is for a colocated engine; a server takes it from its own command line"
    else:
        place = ""
    for name, default in (("vllm_base_quantization", "none"), ("vllm_engine_kwargs", None), ("vllm_adapter_sync", "auto")):
        if place and getattr(args, name) != default:
            raise ValueError(f"`{name}={getattr(args, name)!r}` {place}. Leave it out.")
    if args.vllm_adapter_dir is not None and not (args.use_vllm and args.vllm_mode == "server"):
        raise ValueError("`vllm_adapter_dir` is for a vLLM server: write `use_vllm=True, vllm_mode='server'`, or leave it out.")
