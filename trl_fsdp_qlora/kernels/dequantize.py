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
    """Write the numbers of `packed` (bytes in a container of any dtype) to `out` (rows, columns), contiguous."""
    nested = state.nested
    one_launch = use_triton(out) and out.dtype == state.dtype and (not nested or state.state2.blocksize == 256)
    if not one_launch:
        return dequantize_reference(packed, state, out)
    data = packed.detach().view(torch.uint8)
    _dequantize_kernel[(triton.cdiv(data.numel(), _BYTES_PER_PROGRAM),)](
        data,
        state.code,
        state.absmax,
        state.state2.code if nested else state.code,
        state.state2.absmax if nested else state.code,
        state.offset if nested else state.code,
        out,
        data.numel(),
        BYTES_PER_BLOCK=state.blocksize // 2,
        NESTED=nested,
        BLOCK=_BYTES_PER_PROGRAM,
        num_warps=4,
        # A fused multiply-add would round differently from bitsandbytes.
        enable_fp_fusion=False,
    )
    return out


@jit
def _dequantize_kernel(
    packed_ptr,  # (bytes,) uint8, first number in the high half
    code_ptr,  # (16,) fp32
    absmax_ptr,  # (blocks,) uint8 if nested, else fp32
    absmax_code_ptr,  # (256,) fp32
    absmax_scale_ptr,  # (blocks / 256,) fp32
    offset_ptr,  # () fp32
    out_ptr,  # (2 * bytes,)
    n_bytes,
    BYTES_PER_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < n_bytes
    byte = tl.load(packed_ptr + position, mask=inside, other=0).to(tl.int32)
    block = position // BYTES_PER_BLOCK
    absmax = tl.load(absmax_ptr + block, mask=inside, other=0)
    if NESTED:
        scale = tl.load(absmax_scale_ptr + block // 256, mask=inside, other=0.0)
        absmax = tl.load(absmax_code_ptr + absmax.to(tl.int32)) * scale + tl.load(offset_ptr)
    high = tl.load(code_ptr + (byte >> 4)) * absmax
    low = tl.load(code_ptr + (byte & 15)) * absmax
    numbers = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    start = tl.program_id(0).to(tl.int64) * (2 * BLOCK)
    place = tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + start + place, numbers, mask=(start + place) // 2 < n_bytes)
