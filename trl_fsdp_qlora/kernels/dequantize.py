"""4-bit weights back to numbers, constants and all in one launch.

bitsandbytes needs three launches for a doubly quantised weight: constants, their offset, then the weight. The values
are the same to the last bit.
"""

from __future__ import annotations

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.functional import dequantize_4bit as bnb_dequantize_4bit

from .triton_support import jit, tl, triton, use_triton

_BYTES_PER_PROGRAM = 2048


def dequantize_reference(packed: torch.Tensor, state: QuantState, out: torch.Tensor) -> torch.Tensor:
    """What bitsandbytes makes of `packed`, in `out` (rows, columns)."""
    return out.copy_(bnb_dequantize_4bit(packed.detach(), state).view(out.shape))


def dequantize(packed: torch.Tensor, state: QuantState, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers of `packed` (bytes in a container of any dtype) to `out` (rows, columns), rows any distance apart."""
    if out.dtype != state.dtype or not one_launch_can(packed, state):
        return dequantize_reference(packed, state, out)
    _launch(packed.detach(), state, out, matrices=1, chosen=None)
    return out


def dequantize_stack(packed: torch.Tensor, state: QuantState, out: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    """Write the numbers of some matrices of a stack (`experts.quantize_stack`) to `out` (n, rows, columns), in one launch.

    Args:
        chosen: (n,) int32 numbers of the matrices, or None for all. Only where `one_launch_can`.
    """
    _launch(packed.detach(), state, out, matrices=out.shape[0], chosen=chosen)
    return out


def one_launch_can(packed: torch.Tensor, state: QuantState) -> bool:
    """Whether the kernel runs where `packed` is, and is for numbers quantised like that."""
    return use_triton(packed) and (not state.nested or state.state2.blocksize == 256)


def _launch(packed: torch.Tensor, state: QuantState, out: torch.Tensor, matrices: int, chosen: torch.Tensor | None) -> None:
    n_bytes = out.numel() // 2 // matrices
    nested = state.nested
    _dequantize_kernel[(triton.cdiv(n_bytes, _BYTES_PER_PROGRAM), matrices)](
        packed.view(torch.uint8),
        state.code,
        state.absmax,
        state.state2.code if nested else state.code,
        state.state2.absmax if nested else state.code,
        state.offset if nested else state.code,
        state.code if chosen is None else chosen,
        out,
        out.stride(-2),
        n_bytes,
        triton.cdiv(n_bytes, state.blocksize // 2),
        BYTES_PER_BLOCK=state.blocksize // 2,
        NESTED=nested,
        CHOSEN=chosen is not None,
        COLUMNS=0 if out.is_contiguous() else out.shape[-1],
        BLOCK=_BYTES_PER_PROGRAM,
        num_warps=4,
        # A fused multiply-add would round differently from bitsandbytes.
        enable_fp_fusion=False,
    )


@jit
def _dequantize_kernel(
    packed_ptr,  # (matrices, bytes) uint8, first number in the high half
    code_ptr,  # (16,) fp32
    absmax_ptr,  # (matrices, blocks) uint8 if nested, else fp32
    absmax_code_ptr,  # (256,) fp32
    absmax_scale_ptr,  # (matrices, blocks / 256) fp32
    offset_ptr,  # (matrices,) fp32
    chosen_ptr,  # numbers of the matrices wanted
    out_ptr,  # (matrices wanted, 2 * bytes), or one matrix whose rows are `row_stride` numbers apart
    row_stride,
    n_bytes,
    n_blocks,
    BYTES_PER_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a row; 0 where rows follow each other
    BLOCK: tl.constexpr,
):
    target = tl.program_id(1).to(tl.int64)
    matrix = target
    if CHOSEN:
        matrix = tl.load(chosen_ptr + target).to(tl.int64)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < n_bytes
    byte = tl.load(packed_ptr + matrix * n_bytes + position, mask=inside, other=0).to(tl.int32)
    block = position // BYTES_PER_BLOCK
    absmax = tl.load(absmax_ptr + matrix * n_blocks + block, mask=inside, other=0)
    if NESTED:
        scale = tl.load(absmax_scale_ptr + matrix * ((n_blocks + 255) // 256) + block // 256, mask=inside, other=0.0)
        absmax = tl.load(absmax_code_ptr + absmax.to(tl.int32)) * scale + tl.load(offset_ptr + matrix)
    high = tl.load(code_ptr + (byte >> 4)) * absmax
    low = tl.load(code_ptr + (byte & 15)) * absmax
    numbers = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    start = tl.program_id(0).to(tl.int64) * (2 * BLOCK)
    place = start + tl.arange(0, 2 * BLOCK)
    inside = place // 2 < n_bytes
    if COLUMNS:
        place = place // COLUMNS * row_stride + place % COLUMNS
    tl.store(out_ptr + target * 2 * n_bytes + place, numbers, mask=inside)
