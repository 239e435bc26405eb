"""Compute the MLP of a decoder layer in tiles of tokens, so that long rows do not need all of it at once.

An MLP treats tokens one by one. Its intermediate activations, several times as wide as the hidden state, are most of what
a recomputed layer holds; in tiles, each checkpointed by itself, only those of one tile exist at a time. The price is one
more forward pass of the MLP, paid by rows longer than a tile alone.
"""

import types
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .structure import find_structure


def tile_mlps(base: nn.Module, tile_size: int) -> int:
    """Let the `mlp` of every decoder layer of `base` run in tiles of `tile_size` tokens; returns how many do.

    Rows of at most `tile_size` tokens run as before. A mixture of experts is left alone: its router counts tokens.
    """
    tiled = 0
    for layer in base.get_submodule(find_structure(base).layers):
        mlp = getattr(layer, "mlp", None)
        if mlp is None or any("router" in name or "gate" == name for name, _ in mlp.named_children()):
            continue
        mlp.forward = types.MethodType(_tiled_forward, mlp)
        mlp.tile_size = tile_size  # for fused layers too, which do not call it
        tiled += 1
    return tiled


def _tiled_forward(mlp: nn.Module, x_BLD: torch.Tensor) -> torch.Tensor:
    forward = partial(type(mlp).forward, mlp)
    if x_BLD.ndim != 3 or x_BLD.shape[1] <= mlp.tile_size:
        return forward(x_BLD)
    tiles = x_BLD.split(mlp.tile_size, dim=1)
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1)
    return torch.cat([forward(tile) for tile in tiles], dim=1)
