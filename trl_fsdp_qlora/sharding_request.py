"""What the user's accelerate or trainer configuration asks of several ranks.

The configuration is read with accelerate's own plugin class and then kept from accelerate, because `sharding` does the work.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from .logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class ShardingRequest:
    """What the user's accelerate or trainer configuration asks for.

    Attributes:
        fsdp: shard the base model; otherwise every rank holds all of it and only adapters are sharded.
        reshard_after_forward: free gathered weights after the forward pass (and gather again for the backward).
        offload_params: keep shards and optimizer state in host memory.
        unit_classes: class names of modules that form a unit; empty for the decoder layers.
        activation_checkpointing: FSDP's own switch for what is `gradient_checkpointing` in a trainer.
    """

    fsdp: bool = False
    reshard_after_forward: bool = True
    offload_params: bool = False
    unit_classes: tuple[str, ...] = ()
    activation_checkpointing: bool = False


def read_sharding_request(args) -> ShardingRequest:
    """Read FSDP settings from `args.fsdp` or from the environment that `accelerate launch` sets.

    Raises:
        ValueError: for settings that cannot work with packed 4-bit weights.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    if not args.fsdp_plugin_args and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return ShardingRequest()
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **_environment_version(), **(args.fsdp_plugin_args or {})})
    if plugin.fsdp_version != 2:
        logger.warning("FSDP version 1 was asked for; these trainers shard with FSDP2 (`fully_shard`).")
        plugin = FullyShardedDataParallelPlugin(**{**(args.fsdp_plugin_args or {}), "fsdp_version": 2, "reshard_after_forward": True})
    if plugin.mixed_precision_policy is not None:
        check_mixed_precision(plugin.mixed_precision_policy)
    if plugin.cpu_ram_efficient_loading:
        logger.warning(
            "`fsdp_cpu_ram_efficient_loading` has no effect here: every rank streams the checkpoint tensor by tensor, "
            "so none holds it whole."
        )
    if plugin.min_num_params:
        logger.warning("`fsdp_min_num_params` has no effect here: a decoder layer is a unit, whatever its size.")
    classes = plugin.transformer_cls_names_to_wrap or ()
    classes = classes.split(",") if isinstance(classes, str) else classes
    return ShardingRequest(
        fsdp=True,
        reshard_after_forward=bool(plugin.reshard_after_forward),
        offload_params=isinstance(plugin.cpu_offload, CPUOffloadPolicy) or plugin.cpu_offload is True,
        unit_classes=tuple(name.strip() for name in classes if name.strip()),
        activation_checkpointing=bool(plugin.activation_checkpointing),
    )


def _environment_version() -> dict[str, int]:
    version = os.environ.get("FSDP_VERSION")
    return {"fsdp_version": int(version)} if version else {}


@contextmanager
def hidden_from_accelerate(args) -> Iterator[None]:
    """Let accelerate and transformers see no FSDP configuration, because the sharding is done here.

    Raises:
        ValueError: if an `Accelerator` with FSDP already exists in this process; its state cannot be taken back.
    """
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and getattr(AcceleratorState(), "fsdp_plugin", None) is not None:
        raise ValueError(
            "An `Accelerator` with FSDP was created before the trainer, and would wrap the model a second time. Make "
            "the trainer first, or use `accelerate.PartialState` where you only need ranks."
        )
    saved = {name: os.environ.pop(name, None) for name in ("ACCELERATE_USE_FSDP",)}
    saved_args = args.fsdp, args.fsdp_plugin_args
    args.fsdp, args.fsdp_plugin_args = None, None
    try:
        yield
    finally:
        args.fsdp, args.fsdp_plugin_args = saved_args
        os.environ.update({name: value for name, value in saved.items() if value is not None})


def check_mixed_precision(policy: MixedPrecisionPolicy) -> None:
    """Refuse policies that treat packed bytes as numbers or round log-probabilities.

    Raises:
        ValueError: if the policy casts parameters, or outputs to 16 bit.
    """
    if getattr(policy, "param_dtype", None) is not None:
        raise ValueError(
            f"`MixedPrecisionPolicy(param_dtype={policy.param_dtype})` casts parameters while they are gathered, which "
            "destroys packed 4-bit bytes. Write `param_dtype=None`: layers compute in `bnb_4bit_compute_dtype`."
        )
    if getattr(policy, "output_dtype", None) not in (None, torch.float32):
        raise ValueError(
            f"`MixedPrecisionPolicy(output_dtype={policy.output_dtype})` rounds log-probabilities and the loss to "
            "16 bit. Write `output_dtype=None`."
        )
