"""`gelu(gate) * up` with the tanh form of GELU, in one pass, and its gradients in one.

Rounds where the unfused layers round: after the activation, after the product.
"""

from __future__ import annotations

import torch

from .triton_support import jit, tl, triton, use_triton

_COLUMNS_PER_PROGRAM = 1024


def gated_gelu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gated_gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Elementwise over (..., D); rows of either input may lie any distance apart."""
    if not use_triton(gate):
        return gated_gelu_reference(gate, up)
    return _GatedGelu.apply(gate, up)


def gated_gelu_forward(gate_up: torch.Tensor) -> torch.Tensor:
    """(N, D) of gate and up side by side in one tensor (N, 2 D); nothing is kept for a backward pass."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _forward(gate, up) if use_triton(gate_up) else gated_gelu_reference(gate, up)


def gated_gelu_backward(gate_up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `gate_up`, (N, 2 D), and once more what came out, which may take the place of `dy`, (N, D)."""
    if not use_triton(gate_up):
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            y = gated_gelu_reference(*leaf.chunk(2, dim=-1))
        return torch.autograd.grad(y, leaf, dy)[0], y.detach()
    d_gate_up = torch.empty_like(gate_up)
    _backward(*gate_up.chunk(2, dim=-1), dy, *d_gate_up.chunk(2, dim=-1), y=dy)
    return d_gate_up, dy


def _grid(rows: torch.Tensor) -> tuple[int, int]:
    return rows.shape[0], triton.cdiv(rows.shape[1], _COLUMNS_PER_PROGRAM)


def _forward(gate, up):
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _forward_kernel[_grid(gate)](gate, gate.stride(0), up, up.stride(0), y, gate.shape[1], BLOCK=_COLUMNS_PER_PROGRAM, num_warps=4)
    return y


def _backward(gate, up, dy, d_gate, d_up, y=None):
    """Fills `d_gate` and `d_up`, and `y`, which can be `dy`."""
    _backward_kernel[_grid(gate)](
        gate, gate.stride(0), up, up.stride(0), dy, dy.stride(0), d_gate, d_gate.stride(0), d_up, d_up.stride(0),
        dy if y is None else y, dy.stride(0) if y is None else y.stride(0), gate.shape[1],
        AGAIN=y is not None, BLOCK=_COLUMNS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        width = gate.shape[-1]
        return _forward(gate.reshape(-1, width), up.reshape(-1, width)).view(gate.shape)

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        d_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        _backward(*(t.reshape(-1, width) for t in (gate, up, dy)), d_gate.view(-1, width), d_up.view(-1, width))
        return d_gate, d_up


@jit
def _gelu_tanh(x):
    """GELU in its tanh form, and the tanh."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    t = 2 * tl.sigmoid(2 * inner) - 1
    return 0.5 * x * (1 + t), t


@jit
def _forward_kernel(gate_ptr, gate_stride, up_ptr, up_stride, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = _gelu_tanh(gate)
    y = activated.to(y_ptr.dtype.element_ty).to(tl.float32) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, dy_ptr, dy_stride, d_gate_ptr, d_gate_stride, d_up_ptr, d_up_stride, y_ptr, y_stride,
    width, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    dtype = d_gate_ptr.dtype.element_ty
    activated, t = _gelu_tanh(gate)
    slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
    d_activated = (dy * up).to(dtype).to(tl.float32)
    activated = activated.to(dtype).to(tl.float32)
    d_up = dy * activated
    tl.store(d_gate_ptr + row * d_gate_stride + column, (d_activated * slope).to(dtype), mask=inside)
    tl.store(d_up_ptr + row * d_up_stride + column, d_up.to(dtype), mask=inside)
    if AGAIN:
        tl.store(y_ptr + row * y_stride + column, (activated * up).to(dtype), mask=inside)
