"""Put the fused operations into a PEFT model, in place."""

from __future__ import annotations

import types
from collections import Counter
from typing import TYPE_CHECKING

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from ..logging import get_logger
from .joined_layers import JoinedLayers, hooked, unknown_kind
from .triton_support import triton

if TYPE_CHECKING:
    from .graph_pool import Replays

logger = get_logger(__name__)

REPLAYS = "_qlora_replays"


def apply_fused_layers(
    model: nn.Module, device: torch.device, *, attention: bool = True, replay: bool = True, keep_activations: bool = False
) -> tuple[str, bool]:
    """Fuse what can be fused; return one line that says what is active, what is not, and why, and whether training replays graphs.

    With `keep_activations`, replayed layers keep what their backward pass needs while there is memory for it.

    Call it before the model is laid over ranks. Gemma 4's decoder layers become fused layers that replay CUDA graphs; of other
    models the LoRA layers alone are fused. On the CPU nothing changes.
    """
    if (missing := what_is_missing(device)) is not None:
        return f"fused operations: none ({missing})", False
    from . import gemma4

    layers, unfused = _decoder_layers(model)
    trains_recorded = False
    if layers:
        active = [f"{len(layers)} decoder layers"]
        active += _use_own_attention(layers[0].config) if attention else []
        never, not_in_training = gemma4.why_not_recorded(layers[0]), gemma4.why_not_in_training(layers[0])
        if replay and never is not None:
            active.append(f"no CUDA graphs of layers ({never})")
        elif replay:
            _replay(model, layers, device, keep_activations)
            trains_recorded = not_in_training is None
            extent = ", which keep activations where there is memory" if keep_activations else ""
            extent = extent if trains_recorded else f", not in training ({not_in_training})"
            active.append(f"CUDA graphs of layers, for shapes that come again{extent}")
    else:
        count, others = _fuse_linears(model)
        active = [f"{count} LoRA layers"] if count else []
        unfused = others + Counter({f"{reason} (decoder layers)": n for reason, n in unfused.items() if reason not in others})
    notes = "".join(f"; {n} not: {reason}" for reason, n in unfused.items())
    return f"fused operations: {', '.join(active) or 'none'}{notes}", trains_recorded


def take_apart(model: nn.Module) -> None:
    """Undo what an earlier trainer of the same model had fused."""
    for module in [module for module in model.modules() if "joined" in vars(module)]:
        if isinstance(module, LoraLayer):
            del module.joined, module.forward
        else:
            from . import gemma4

            gemma4.take_apart(module)
    vars(model).pop(REPLAYS, None)


def what_is_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "no GPU"
    return "Triton is not installed" if triton is None else None


def _decoder_layers(model: nn.Module) -> tuple[list[nn.Module], Counter]:
    """Gemma 4's decoder layers, fused, and why some are not."""
    from . import gemma4

    fused, unfused = [], Counter()
    for module in list(model.modules()):
        if type(module) is gemma4.Gemma4TextDecoderLayer:
            reason = gemma4.why_not(module)
            if reason is None:
                gemma4.fuse(module)
                fused.append(module)
            else:
                unfused[reason] += 1
    return fused, unfused


def _use_own_attention(config) -> list[str]:
    """In place of PyTorch's; another that the user chose stays."""
    from . import attention_interface

    if config._attn_implementation != "sdpa":
        return []
    config._attn_implementation = attention_interface.register()
    return ["attention over stretches of queries"]


def replays_of(model: nn.Module) -> Replays | None:
    """The recordings of a fused model; asked in every step, so they are remembered on the model."""
    return vars(model).get(REPLAYS)


def _replay(model: nn.Module, layers: list[nn.Module], device: torch.device, keep_activations: bool) -> None:
    from . import gemma4, graph_pool

    replays = graph_pool.Replays(device, len(layers), keep_activations)
    vars(model)[REPLAYS] = replays
    for layer in layers:
        gemma4.replay_layer(layer, replays)


def _fuse_linears(model: nn.Module) -> tuple[int, Counter]:
    """LoRA layers of a model whose decoder layers nobody fused, each alone."""
    from .joined_layers import fused_forward

    count, unfused = 0, Counter()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            reason = unknown_kind(module) or ("hooks" if hooked([module]) else None)
            if reason is None:
                module.joined = JoinedLayers([module])
                module.forward = types.MethodType(fused_forward, module)
                count += 1
            else:
                unfused[reason] += 1
    return count, unfused
