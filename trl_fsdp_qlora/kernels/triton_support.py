"""Triton where it is installed, and the question whether to use it for a tensor."""

import os

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
except ImportError:
    triton, tl, INTERPRETED = None, None, False

    def jit(function):
        return function


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is somewhere that Triton kernels run, and in a dtype they are written for."""
    return triton is not None and (tensor.is_cuda or INTERPRETED) and tensor.dtype != torch.float64 and tensor.numel() > 0
