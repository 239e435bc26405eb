"""Causal attention as plain matrix products over stretches of queries, for heads and windows that fused kernels do badly.

Fused attention kernels are slow or missing for 512-wide heads, and ignore windows. Here a stretch of queries meets only
the keys it can see: all earlier ones, or those inside the window. Scores of one stretch exist at a time, in fp32.

A query sees the keys from `first_key[query]` (zero if not given: packed rows and left padding set it) up to itself,
and none further back than `window`.

Shapes: B batch, S sequence, K key/value heads, G query heads a key/value head, D head dimension, C queries of a
stretch, T keys it sees. The G query heads of one key/value head are rows of one product.
"""

from __future__ import annotations

import torch

from .triton_support import jit, tl, triton, use_triton

# Scores of a stretch, in numbers: 64 MiB of fp32. With more than half as many, half the queries are faster.
_MAX_SCORES = 2**24
# A kernel holds the scores of one query in registers. Stretches that see more keys go through PyTorch's softmax.
MAX_KEYS = 16384
# Queries of a stretch, unless its scores would be too many.
STRETCH = 512


def visible(first_query: int, queries: int, first: int, keys: int, window: int | None, first_key, device) -> torch.Tensor:
    """Which of `keys` keys from `first` on each query sees: (1 or B, 1, C, 1, T) bool."""
    q = torch.arange(first_query, first_query + queries, device=device)[:, None]
    k = torch.arange(first, first + keys, device=device)[None, :]
    seen = k <= q
    if window is not None:
        seen = seen & (k > q - window)
    seen = seen[None]
    if first_key is not None:
        seen = seen & (k[None] >= first_key[:, first_query : first_query + queries, None])
    return seen[:, None, :, None, :]


def attention_reference(q_BSHD, k_BSKD, v_BSKD, scale: float, window: int | None = None, first_key=None) -> torch.Tensor:
    """(B, S, H, D), in plain PyTorch over all keys at once, softmax in at least fp32."""
    batch, length, kv_heads, dim = k_BSKD.shape
    q = q_BSHD.view(batch, length, kv_heads, -1, dim)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bskgd,btkd->bksgt", q.to(wide), k_BSKD.to(wide)) * scale
    scores = scores.masked_fill(~visible(0, length, 0, length, window, first_key, q.device), -torch.inf)
    weights = scores.softmax(-1).to(q.dtype)
    return torch.einsum("bksgt,btkd->bskgd", weights, v_BSKD).reshape(q_BSHD.shape)


def attention(q_BSHD, k_BSKD, v_BSKD, scale: float, window: int | None = None, first_key=None) -> torch.Tensor:
    """(B, S, H, D). `first_key`: (B, S) int32 or nothing. Every query must see at least one key."""
    if not use_triton(q_BSHD) and k_BSKD.shape[1] <= MAX_KEYS:
        return attention_reference(q_BSHD, k_BSKD, v_BSKD, scale, window, first_key)
    return StretchedAttention.apply(q_BSHD, k_BSKD, v_BSKD, scale, window, first_key)


def stretches(length: int, rows_per_query: int, window: int | None):
    """(first query, end of queries, first key) of each stretch; its keys end where its queries end."""

    def scores(queries: int) -> int:
        return queries * rows_per_query * min(length, (window or length) + queries)

    size = STRETCH if scores(STRETCH) <= _MAX_SCORES // 2 else STRETCH // 2
    while size > 64 and scores(size) > _MAX_SCORES:
        size //= 2
    for start in range(0, length, size):
        yield start, min(start + size, length), 0 if window is None else max(0, start - window + 1) // 64 * 64


class StretchedAttention(torch.autograd.Function):
    """Saves queries, keys and values only: the backward makes scores and weights again."""

    @staticmethod
    def forward(ctx, q, k, v, scale, window, first_key):
        ctx.save_for_backward(q, k, v, first_key)
        ctx.scale, ctx.window = scale, window
        q, k, v = _by_kv_head(q, k.shape[2]), _by_kv_head(k), _by_kv_head(v)
        out = torch.empty_like(q)  # (B, K, S, G, D)
        for start, end, first in stretches(q.shape[2], q.shape[0] * q.shape[1] * q.shape[3], window):
            q_chunk, out_chunk = (t[:, :, start:end].flatten(2, 3).flatten(0, 1) for t in (q, out))  # (BK, CG, D)
            scores = _fp32_product(q_chunk, k[:, :, first:end].flatten(0, 1).mT)
            weights = _softmax(scores, q.shape, start, first, scale, window, first_key, q.dtype)
            torch.bmm(weights, v[:, :, first:end].flatten(0, 1), out=out_chunk)
        return _by_token(out)

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, first_key = ctx.saved_tensors
        scale, window = ctx.scale, ctx.window
        kv_heads = k.shape[2]
        q, k, v, d_out = _by_kv_head(q, kv_heads), _by_kv_head(k), _by_kv_head(v), _by_kv_head(d_out, kv_heads)
        dq = torch.empty_like(q)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = torch.zeros_like(dk)
        for start, end, first in stretches(q.shape[2], q.shape[0] * q.shape[1] * q.shape[3], window):
            q_chunk, d_chunk, dq_chunk = (t[:, :, start:end].flatten(2, 3).flatten(0, 1) for t in (q, d_out, dq))
            k_chunk, v_chunk, dk_chunk, dv_chunk = (t[:, :, first:end].flatten(0, 1) for t in (k, v, dk, dv))
            scores = _fp32_product(q_chunk, k_chunk.mT)
            d_weights = _fp32_product(d_chunk, v_chunk.mT)
            weights, d_scores = _softmax_backward(scores, d_weights, q.shape, start, first, scale, window, first_key, q.dtype)
            torch.bmm(d_scores, k_chunk, out=dq_chunk)
            _add_fp32_product(dk_chunk, d_scores.mT, q_chunk)
            _add_fp32_product(dv_chunk, weights.mT, d_chunk)
        return _by_token(dq), _by_token(dk.to(k.dtype)), _by_token(dv.to(v.dtype)), None, None, None


def _by_kv_head(x_BSHD: torch.Tensor, kv_heads: int | None = None) -> torch.Tensor:
    """(B, K, S, D) of keys, or (B, K, S, G, D) of queries, contiguous; nothing is copied for one key/value head."""
    if kv_heads is None:
        return x_BSHD.transpose(1, 2).contiguous()
    batch, length, heads, dim = x_BSHD.shape
    return x_BSHD.view(batch, length, kv_heads, heads // kv_heads, dim).transpose(1, 2).contiguous()


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Back to (B, S, H, D), contiguous."""
    if x.dim() == 4:
        return x.transpose(1, 2).contiguous()
    batch, kv_heads, length, group, dim = x.shape
    return x.transpose(1, 2).reshape(batch, length, kv_heads * group, dim)


def _fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched `a @ b` of 16-bit matrices, not rounded to 16 bit."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _add_fp32_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.baddbmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.baddbmm_(a.float(), b.float())


def _softmax(scores, shape, start, first, scale, window, first_key, dtype):
    """Weights (BK, CG, T) in `dtype` of raw fp32 scores, which may be overwritten."""
    if not _in_registers(scores):
        return _plain_softmax(scores, shape, start, first, scale, window, first_key).to(dtype)
    weights = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    _run(_softmax_kernel, scores, scores, weights, weights, shape, start, first, scale, window, first_key)
    return weights


def _softmax_backward(scores, d_weights, shape, start, first, scale, window, first_key, dtype):
    """Weights again, and gradients of the raw scores, both in `dtype`; scores and gradients given may be overwritten."""
    if not _in_registers(scores):
        weights = _plain_softmax(scores, shape, start, first, scale, window, first_key)
        narrow, kept = weights.to(dtype), (weights * d_weights).sum(-1, keepdim=True)
        return narrow, d_weights.sub_(kept).mul_(weights).mul_(scale).to(dtype)
    weights = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    d_scores = torch.empty_like(weights)
    _run(_softmax_backward_kernel, scores, d_weights, weights, d_scores, shape, start, first, scale, window, first_key)
    return weights, d_scores


def _in_registers(scores: torch.Tensor) -> bool:
    return use_triton(scores) and scores.shape[-1] <= MAX_KEYS


def _plain_softmax(scores, shape, start, first, scale, window, first_key) -> torch.Tensor:
    """What the kernel computes, (BK, CG, T) in fp32, in place."""
    _, kv_heads, _, group, _ = shape
    seen = visible(start, scores.shape[1] // group, first, scores.shape[2], window, first_key, scores.device)  # (B, 1, C, 1, T)
    by_query = scores.mul_(scale).view(-1, kv_heads, seen.shape[2], group, scores.shape[2])
    by_query.masked_fill_(~seen, -torch.inf)
    torch.softmax(scores, -1, out=scores)
    return scores


def _run(kernel, scores, d_weights, weights, d_scores, shape, start, first, scale, window, first_key):
    _, kv_heads, length, group, _ = shape
    rows, keys = scores.shape[1:]
    block = triton.next_power_of_2(keys)
    kernel[(scores.shape[0] * rows,)](
        scores, d_weights, weights, d_scores, scores if first_key is None else first_key,
        rows, keys, start, first, group, kv_heads, length, scale, window or length,
        HAS_FIRST_KEY=first_key is not None, BLOCK=block, num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip


@jit
def _row_weights(scores_ptr, first_key_ptr, rows, keys, start, first, group, kv_heads, length, scale, window,
                 HAS_FIRST_KEY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The softmax of this program's row, where the row begins, and which keys it has."""
    program = tl.program_id(0).to(tl.int64)
    query = start + (program % rows) // group
    lowest = tl.maximum(query - window + 1, 0)
    if HAS_FIRST_KEY:
        batch = program // rows // kv_heads
        lowest = tl.maximum(lowest, tl.load(first_key_ptr + batch * length + query))
    column = tl.arange(0, BLOCK)
    key = first + column
    seen = (key <= query) & (key >= lowest)
    place = program * keys + column
    inside = column < keys
    scores = tl.load(scores_ptr + place, mask=inside, other=0.0) * scale
    scores = tl.where(seen, scores, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    return weights / tl.sum(weights, axis=0), place, inside


@jit
def _softmax_kernel(scores_ptr, d_weights_ptr, weights_ptr, d_scores_ptr, first_key_ptr, rows, keys, start, first, group, kv_heads,
                    length, scale, window, HAS_FIRST_KEY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    weights, place, inside = _row_weights(
        scores_ptr, first_key_ptr, rows, keys, start, first, group, kv_heads, length, scale, window, HAS_FIRST_KEY, BLOCK
    )
    tl.store(weights_ptr + place, weights.to(weights_ptr.dtype.element_ty), mask=inside)


@jit
def _softmax_backward_kernel(scores_ptr, d_weights_ptr, weights_ptr, d_scores_ptr, first_key_ptr, rows, keys, start, first, group,
                             kv_heads, length, scale, window, HAS_FIRST_KEY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    weights, place, inside = _row_weights(
        scores_ptr, first_key_ptr, rows, keys, start, first, group, kv_heads, length, scale, window, HAS_FIRST_KEY, BLOCK
    )
    d_weights = tl.load(d_weights_ptr + place, mask=inside, other=0.0)
    d_scores = weights * (d_weights - tl.sum(weights * d_weights, axis=0)) * scale
    tl.store(weights_ptr + place, weights.to(weights_ptr.dtype.element_ty), mask=inside)
    tl.store(d_scores_ptr + place, d_scores.to(d_scores_ptr.dtype.element_ty), mask=inside)
