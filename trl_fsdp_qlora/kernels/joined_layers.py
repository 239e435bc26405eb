"""PEFT's LoRA layers run through `qlora_linear`, alone or several that share an input as one.

What PEFT says at the moment of the call counts: active adapters, disabled adapters, merged weights, dropout. Kinds of
adapters that `active_adapters` does not know take PEFT's own forward.
"""

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from ..logging import get_logger, warn_once
from ..packed import quant_state_of
from .gated_gelu import gated_gelu
from .qlora_linear import LinearGroup, QLoRAGatedLinear, QLoRALinear, Slot

logger = get_logger(__name__)


def base_of(layer: nn.Module) -> nn.Module:
    """The frozen linear layer inside `layer`, or `layer` itself where it carries no adapter."""
    return layer.get_base_layer() if isinstance(layer, LoraLayer) else layer


def unknown_kind(layer: nn.Module) -> str | None:
    """Why `layer` keeps PEFT's forward, or None if it need not. Looks at what adapters are, not at which are active."""
    base = base_of(layer)
    # Others make numbers of their weight in a way of their own, as those in 8 bit do.
    if quant_state_of(base) is None and type(base).forward is not nn.Linear.forward:
        return f"a {type(base).__name__} inside"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "a base layer that trains"
    if not isinstance(layer, LoraLayer):
        return None if isinstance(layer, nn.Linear) else f"an adapter of type {type(layer).__name__}"
    if not isinstance(layer.lora_A, nn.ModuleDict):  # AdaLoRA
        return f"an adapter of type {type(layer).__name__}"
    if layer.lora_variant:
        return f"an adapter of kind {type(next(iter(layer.lora_variant.values()))).__name__}"
    if any(layer.lora_bias.values()):
        return "an adapter with a bias"
    if layer.lora_embedding_A or getattr(layer, "fan_in_fan_out", False):
        return "a transposed weight"
    return None


def active_names(layer: nn.Module) -> list[str]:
    """Names of the adapters of `layer` that count now."""
    if not isinstance(layer, LoraLayer) or layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def active_adapters(layer: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor, float, nn.Module]]:
    """(A, B, scale, dropout) of every adapter that counts now."""
    return [
        (layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], layer.lora_dropout[name])
        for name in active_names(layer)
    ]


def drops_out(dropout: nn.Module) -> bool:
    """Whether `dropout` changes its input now."""
    return dropout.training and getattr(dropout, "p", 0.0) > 0.0


def hooked(modules: list[nn.Module]) -> bool:
    """Whether anyone hooked into one of `modules`, such as FSDP, for which it is a unit of its own."""
    return any(m._forward_pre_hooks or m._forward_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def fused_forward(layer: LoraLayer, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """A LoRA layer's forward as one function, or PEFT's own for what that function does not do."""
    if layer.joined is not None and not layer.joined.is_current():
        reason = unknown_kind(layer)
        layer.joined = JoinedLayers([layer]) if reason is None else None
        if reason is not None:
            warn_once(logger, f"LoRA layers have changed, and take PEFT's operations instead of fused ones from now on: {reason}.")
    joined = layer.joined
    own = joined is None or args or kwargs or not x.is_floating_point() or x.dtype != joined.group.dtype or hooked(joined.inner)
    return type(layer).forward(layer, x, *args, **kwargs) if own else joined(x)


def inner_modules(layer: nn.Module) -> list[nn.Module]:
    """Modules in a LoRA layer, whose own forward is not called."""
    return [base_of(layer), *layer.lora_A.values(), *layer.lora_B.values()] if isinstance(layer, LoraLayer) else []


class JoinedLayers:
    """Layers that share an input, as one call. The result has their outputs side by side, (..., O)."""

    def __init__(self, layers: list[nn.Module]):
        self.layers = layers
        self.group = LinearGroup([base_of(layer) for layer in layers])
        self.alone = [LinearGroup([base_of(layer)]) for layer in layers]
        self.sizes = self.group.sizes
        self.inner = [m for layer in layers for m in inner_modules(layer)]
        # What was joined: how weights are packed, and the adapters, of which A stands for the rest. Looked at in each call.
        self._bases = [base_of(layer) for layer in layers]
        self._adapters = [(la.lora_A._modules, tuple(la.lora_A.values())) for la in layers if isinstance(la, LoraLayer)]

    def is_current(self) -> bool:
        """Whether no adapter was put on the layers, merged into them or taken off since. PEFT changes a layer that has one in place."""
        unchanged = all(tuple(found.values()) == adapters for found, adapters in self._adapters)
        return unchanged and all(quant_state_of(base) is state for base, state in zip(self._bases, self.group.states, strict=True))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        active = [active_adapters(layer) for layer in self.layers]
        if any(drops_out(dropout) for adapters in active for *_, dropout in adapters):
            y = self._with_dropout(rows, active)
        else:
            y = QLoRALinear.apply(rows, None, self.group, *self._slots(active))
        return y.view(*x.shape[:-1], y.shape[-1])

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The same for `gelu(gate) * up`, given gate and up side by side, (..., 2 I)."""
        rows = gate_up.reshape(-1, gate_up.shape[-1])
        active = [active_adapters(layer) for layer in self.layers]
        if any(drops_out(dropout) for adapters in active for *_, dropout in adapters):
            return self(gated_gelu(*gate_up.chunk(2, dim=-1)))
        y = QLoRAGatedLinear.apply(rows, self.group, *self._slots(active))
        return y.view(*gate_up.shape[:-1], y.shape[-1])

    def _slots(self, active) -> tuple:
        """Where each adapter works, then A and B of each in turn."""
        slots, adapters, rank = [], [], 0
        for found, columns in zip(active, self.group.columns, strict=True):
            for a, b, scale, _ in found:
                slots.append(Slot(columns, slice(rank, rank + a.shape[0]), scale))
                adapters += [a, b]
                rank += a.shape[0]
        return slots, *adapters

    def _with_dropout(self, rows: torch.Tensor, active) -> torch.Tensor:
        """Each layer by itself, because each draws its own mask; PEFT's own forward where adapters draw several."""
        outputs = []
        for layer, group, adapters in zip(self.layers, self.alone, active, strict=True):
            if len(adapters) > 1:
                outputs.append(type(layer).forward(layer, rows))  # its own: the instance's may be this one
                continue
            low, slots = None, []
            for a, _, scale, dropout in adapters:
                low = dropout(rows)
                slots.append(Slot(slice(0, group.sizes[0]), slice(0, a.shape[0]), scale))
            outputs.append(QLoRALinear.apply(rows, low, group, slots, *(t for a, b, *_ in adapters for t in (a, b))))
        return torch.cat(outputs, dim=-1)
