"""Weights in 4 bit, wherever a model holds them: in bitsandbytes' linear layers, and in stacks of experts."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class PackedWeight:
    """A packed parameter: the module and the name under which it is registered, and its quantisation constants.

    The parameter is looked up each time: sharding, gathering and moving put others in its place.
    """

    owner: nn.Module
    leaf: str
    quant_state: object

    @property
    def weight(self) -> nn.Parameter:
        return self.owner._parameters[self.leaf]

    @property
    def constants(self) -> list[torch.Tensor]:
        """The tensors that every rank keeps beside its share of the bytes."""
        state, nested = self.quant_state, self.quant_state.state2
        tensors = [state.absmax, state.offset, nested.absmax if nested is not None else None]
        return [t for t in tensors if isinstance(t, torch.Tensor)]


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Every packed weight of `model`: by the name of its module for a layer, by that of the parameter for a stack of experts."""
    found = {}
    for name, module in model.named_modules():
        for leaf, state in packed_leaves(module).items():
            found[name if leaf == "weight" else f"{name}.{leaf}"] = PackedWeight(module, leaf, state)
    return found


def packed_leaves(module: nn.Module) -> dict[str, object]:
    """The packed parameters of `module` itself, and their quantisation states."""
    stacks = getattr(module, "stack_states", None)
    if stacks is not None:
        return stacks
    state = quant_state_of(module)
    return {} if state is None else {"weight": state}


def quant_state_of(layer: nn.Module):
    """How the weight of `layer` is packed, or `None`.

    What the layer itself has noted counts where the weight does not say it, as a gathered shard does not. It may be the note of a copy:
    bitsandbytes leaves the original's layer in the copy of a weight, and writes there when an adapter is merged into the copy.
    """
    state = getattr(layer._parameters.get("weight"), "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def quantised_modules(model: nn.Module) -> set[str]:
    """Names of the modules of `model` that own a weight in 4 or 8 bit."""
    from bitsandbytes.nn import Int8Params

    eight_bits = {name for name, module in model.named_modules() if isinstance(module._parameters.get("weight"), Int8Params)}
    return eight_bits | {name for name, module in model.named_modules() if packed_leaves(module)}
