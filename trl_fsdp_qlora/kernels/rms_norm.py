"""RMS norm with a frozen weight, alone or with the residual it is added to.

Both round where the unfused layers round, so that they give the same numbers: the norm in fp32, its result in the
dtype of the input, then the sum.

Shapes: N rows, D columns. A row is one program's work.
"""

from __future__ import annotations

import torch

from .triton_support import jit, tl, triton, use_triton


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)


def add_rms_norm_reference(residual, x, weight, eps, scale=None):
    y = residual + rms_norm_reference(x, weight, eps)
    return y if scale is None else y * scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension."""
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)[0]


def rms_norm_and_residual(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and `x` for whoever else uses it: gradients of both uses are added where that of the norm is made."""
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps), x
    return _RMSNorm.apply(x, weight, eps)


def add_rms_norm(residual, x, weight, eps, scale: torch.Tensor | None = None) -> torch.Tensor:
    """`(residual + rms_norm(x)) * scale`; `scale` is a frozen tensor of one number, or nothing."""
    if not use_triton(x):
        return add_rms_norm_reference(residual, x, weight, eps, scale)
    return _AddRMSNorm.apply(residual, x, weight, eps, scale)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as (N, D), rows any distance apart, without a copy where that can be."""
    return x.reshape(-1, x.shape[-1])


def _launch(columns: int) -> dict:
    block = triton.next_power_of_2(columns)
    return {"D": columns, "BLOCK": block, "num_warps": max(1, min(16, block // 512))}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rows = _rows(x)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _forward_kernel[(rows.shape[0],)](
            rows, rows.stride(0), rows if weight is None else weight, rows, rows, y, eps,
            HAS_WEIGHT=weight is not None, HAS_RESIDUAL=False, HAS_SCALE=False, **_launch(x.shape[-1]),
        )  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(ctx, dy, d_other):
        x, weight = ctx.saved_tensors
        return d_other if dy is None else _backward(x, weight, dy, None, ctx.eps, d_other)[0], None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, x, weight, eps, scale):
        rows = _rows(x)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _forward_kernel[(rows.shape[0],)](
            rows, rows.stride(0), rows if weight is None else weight, residual.contiguous(), rows if scale is None else scale, y, eps,
            HAS_WEIGHT=weight is not None, HAS_RESIDUAL=True, HAS_SCALE=scale is not None, **_launch(x.shape[-1]),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        dx, d_residual = _backward(x, weight, dy, scale, ctx.eps)
        return d_residual, dx, None, None, None


def _backward(x, weight, dy, scale, eps, d_other=None):
    """Gradients of `x`, `d_other` included, and of the residual; the latter is `dy` itself where nothing scales it."""
    rows = _rows(x)
    dy = dy.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_residual = dy if scale is None else torch.empty_like(dy)
    _backward_kernel[(rows.shape[0],)](
        rows, rows.stride(0), rows if weight is None else weight, rows if scale is None else scale,
        dy, dy if d_other is None else d_other.contiguous(), dx, d_residual, eps,
        HAS_WEIGHT=weight is not None, HAS_SCALE=scale is not None, HAS_OTHER=d_other is not None, **_launch(x.shape[-1]),
    )  # fmt: skip
    return dx, d_residual


@jit
def _forward_kernel(
    x_ptr, x_stride, weight_ptr, residual_ptr, scale_ptr, y_ptr, eps,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * D + column, mask=inside, other=0.0).to(tl.float32)
        y = (residual + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
    if HAS_SCALE:
        y = (y.to(tl.float32) * tl.load(scale_ptr).to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * D + column, y, mask=inside)


@jit
def _backward_kernel(
    x_ptr, x_stride, weight_ptr, scale_ptr, dy_ptr, d_other_ptr, dx_ptr, d_residual_ptr, eps,
    HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_OTHER: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * D + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        dy = (dy * tl.load(scale_ptr).to(tl.float32)).to(dx_ptr.dtype.element_ty)
        tl.store(d_residual_ptr + row * D + column, dy, mask=inside)
        dy = dy.to(tl.float32)
    if HAS_WEIGHT:
        dy *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    normed = x * rstd
    dx = (rstd * (dy - normed * (tl.sum(dy * normed, axis=0) / D))).to(dx_ptr.dtype.element_ty)
    if HAS_OTHER:
        other = tl.load(d_other_ptr + row * D + column, mask=inside, other=0.0).to(tl.float32)
        dx = (dx.to(tl.float32) + other).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + row * D + column, dx, mask=inside)
