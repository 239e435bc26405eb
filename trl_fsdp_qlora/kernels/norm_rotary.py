"""RMS norm of every head, then rotary position embedding, in one pass over queries or keys.

Rounds where the unfused layers round: after the norm, after each of the two products, after the sum.

Shapes: B batch, S sequence, H heads, D head dimension (even). cos and sin: (B or 1, S, D).
"""

from __future__ import annotations

import torch

from .rms_norm import rms_norm_reference
from .triton_support import jit, tl, triton, use_triton


def norm_rotary_reference(x_BSHD, weight, eps, cos, sin):
    y = rms_norm_reference(x_BSHD, weight, eps)
    first, second = y.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return y * cos.unsqueeze(2) + rotated * sin.unsqueeze(2)


def norm_rotary(x_BSHD: torch.Tensor, weight, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Norm and rotate `x` (rows of heads any distance apart); the result is contiguous, (B, S, H, D)."""
    half = x_BSHD.shape[-1] // 2
    if not use_triton(x_BSHD) or half != triton.next_power_of_2(half):
        return norm_rotary_reference(x_BSHD, weight, eps, cos, sin)
    return _NormRotary.apply(x_BSHD, weight, eps, cos, sin)


class _NormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _run(_forward_kernel, x, weight, eps, cos, sin, y, y)
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, cos, sin = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _run(_backward_kernel, x, weight, ctx.eps, cos, sin, dy.contiguous(), dx)
        return dx, None, None, None, None


def _run(kernel, x, weight, eps, cos, sin, y, dx):
    batch, length, heads, dim = x.shape
    if x.stride(3) != 1 or x.stride(2) != dim:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    kernel[(batch * length,)](
        x, x.stride(0), x.stride(1), x if weight is None else weight, cos, sin, 0 if cos.shape[0] == 1 else length * dim,
        y, dx, eps, length, heads,
        HAS_WEIGHT=weight is not None, HEADS=triton.next_power_of_2(heads), HALF=dim // 2,
        num_warps=max(1, min(8, triton.next_power_of_2(heads) * dim // 512)),
    )  # fmt: skip


@jit
def _load_normed(x_ptr, offset, weight_ptr, dim, inside, eps, HAS_WEIGHT: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the heads of a token in fp32, their normed values, the weights and 1 / rms."""
    first = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF) + eps)
    first *= rstd[:, None]
    second *= rstd[:, None]
    if HAS_WEIGHT:
        w_first = tl.load(weight_ptr + dim).to(tl.float32)
        w_second = tl.load(weight_ptr + dim + HALF).to(tl.float32)
    else:
        w_first = tl.full((HALF,), 1.0, tl.float32)
        w_second = w_first
    return first, second, w_first, w_second, rstd


@jit
def _load_angles(cos_ptr, sin_ptr, place, HALF: tl.constexpr):
    cos_first, cos_second = tl.load(cos_ptr + place).to(tl.float32), tl.load(cos_ptr + place + HALF).to(tl.float32)
    sin_first, sin_second = tl.load(sin_ptr + place).to(tl.float32), tl.load(sin_ptr + place + HALF).to(tl.float32)
    return cos_first, cos_second, sin_first, sin_second


@jit
def _forward_kernel(
    x_ptr, x_batch_stride, x_token_stride, weight_ptr, cos_ptr, sin_ptr, angle_batch_stride, y_ptr, unused_ptr, eps, length, heads,
    HAS_WEIGHT: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // length, token % length
    head, dim = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (dim < HALF)[None, :]
    within = head[:, None] * (2 * HALF) + dim[None, :]
    x_offset = batch * x_batch_stride + position * x_token_stride + within
    first, second, w_first, w_second, _ = _load_normed(x_ptr, x_offset, weight_ptr, dim, inside, eps, HAS_WEIGHT, HALF)
    angle = batch * angle_batch_stride + position * (2 * HALF) + dim
    cos_first, cos_second, sin_first, sin_second = _load_angles(cos_ptr, sin_ptr, angle, HALF)
    dtype = y_ptr.dtype.element_ty
    first = (first * w_first[None, :]).to(dtype).to(tl.float32)
    second = (second * w_second[None, :]).to(dtype).to(tl.float32)
    y_first = (first * cos_first[None, :]).to(dtype).to(tl.float32) - (second * sin_first[None, :]).to(dtype).to(tl.float32)
    y_second = (second * cos_second[None, :]).to(dtype).to(tl.float32) + (first * sin_second[None, :]).to(dtype).to(tl.float32)
    y_offset = token * heads * (2 * HALF) + within
    tl.store(y_ptr + y_offset, y_first.to(dtype), mask=inside)
    tl.store(y_ptr + y_offset + HALF, y_second.to(dtype), mask=inside)


@jit
def _backward_kernel(
    x_ptr, x_batch_stride, x_token_stride, weight_ptr, cos_ptr, sin_ptr, angle_batch_stride, dy_ptr, dx_ptr, eps, length, heads,
    HAS_WEIGHT: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // length, token % length
    head, dim = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (dim < HALF)[None, :]
    within = head[:, None] * (2 * HALF) + dim[None, :]
    x_offset = batch * x_batch_stride + position * x_token_stride + within
    first, second, w_first, w_second, rstd = _load_normed(x_ptr, x_offset, weight_ptr, dim, inside, eps, HAS_WEIGHT, HALF)
    angle = batch * angle_batch_stride + position * (2 * HALF) + dim
    cos_first, cos_second, sin_first, sin_second = _load_angles(cos_ptr, sin_ptr, angle, HALF)
    offset = token * heads * (2 * HALF) + within
    dy_first = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    dy_second = tl.load(dy_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = dx_ptr.dtype.element_ty
    d_first = (dy_first * cos_first[None, :] + dy_second * sin_second[None, :]).to(dtype).to(tl.float32) * w_first[None, :]
    d_second = (dy_second * cos_second[None, :] - dy_first * sin_first[None, :]).to(dtype).to(tl.float32) * w_second[None, :]
    mean = (tl.sum(d_first * first, axis=1) + tl.sum(d_second * second, axis=1)) / (2 * HALF)
    dx_first = rstd[:, None] * (d_first - first * mean[:, None])
    dx_second = rstd[:, None] * (d_second - second * mean[:, None])
    tl.store(dx_ptr + offset, dx_first.to(dtype), mask=inside)
    tl.store(dx_ptr + offset + HALF, dx_second.to(dtype), mask=inside)
