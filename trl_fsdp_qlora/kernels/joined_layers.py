"""PEFT's LoRA layers run through `qlora_linear`, alone or several that share an input as one.

What PEFT says at the moment of the call counts: active adapters, disabled adapters, merged weights, dropout. Kinds of
adapters that `active_adapters` does not know take PEFT's own forward.
"""

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from .qlora_linear import LinearGroup, QLoRALinear, Slot


def base_of(layer: nn.Module) -> nn.Module:
    """The frozen linear layer inside `layer`, or `layer` itself where it carries no adapter."""
    return layer.get_base_layer() if isinstance(layer, LoraLayer) else layer


def unknown_kind(layer: nn.Module) -> str | None:
    """Why `layer` keeps PEFT's forward, or None if it need not. Looks at what adapters are, not at which are active."""
    base = base_of(layer)
    if not isinstance(base, nn.Linear):
        return f"a {type(base).__name__} inside"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "a base layer that trains"
    if not isinstance(layer, LoraLayer):
        return None if isinstance(layer, nn.Linear) else f"an adapter of type {type(layer).__name__}"
    if layer.lora_variant:
        return f"an adapter of kind {type(next(iter(layer.lora_variant.values()))).__name__}"
    if any(layer.lora_bias.values()):
        return "an adapter with a bias"
    if layer.lora_embedding_A or getattr(layer, "fan_in_fan_out", False):
        return "a transposed weight"
    return None


def active_adapters(layer: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor, float, nn.Module]]:
    """(A, B, scale, dropout) of every adapter that counts now."""
    if not isinstance(layer, LoraLayer) or layer.disable_adapters or layer.merged:
        return []
    return [
        (layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], layer.lora_dropout[name])
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


class JoinedLayers:
    """Layers that share an input, as one call. The result has their outputs side by side, (..., O)."""

    def __init__(self, layers: list[nn.Module]):
        self.layers = layers
        self.group = LinearGroup([base_of(layer) for layer in layers])
        self.sizes = self.group.sizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        slots, adapters, dropouts, rank = [], [], [], 0
        for layer, columns in zip(self.layers, self.group.columns, strict=True):
            for a, b, scale, dropout in active_adapters(layer):
                slots.append(Slot(columns, slice(rank, rank + a.shape[0]), scale))
                adapters += [a, b]
                dropouts.append(dropout)
                rank += a.shape[0]
        rows = x.reshape(-1, x.shape[-1])
        y = QLoRALinear.apply(rows, None, self.group, slots, *adapters)
        return y.view(*x.shape[:-1], y.shape[-1])
