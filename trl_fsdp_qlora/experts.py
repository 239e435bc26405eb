"""Mixture-of-experts weights in 4 bit.

transformers holds the experts of a layer as one parameter of shape (experts, out, in), which bitsandbytes does not see: it
replaces `nn.Linear`. A "4-bit" model then keeps nine tenths of itself in 16 bit, without a word
(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849). Here such a stack is quantised expert by expert, while it
streams in, to the bytes that one `Linear4bit` an expert would hold. Experts are dequantised in groups when they are needed, again in
the backward pass, and never all at once.

Shapes: E experts, K experts a token, T tokens, H hidden size.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import nn
from torch.distributed.tensor import DTensor

from .kernels.dequantize import dequantize_stack, one_launch_can
from .kernels.grouped_matmul import grouped_matmul

BLOCKSIZE = 64  # of `Linear4bit`
# 16-bit bytes of the experts that are dequantised at once.
GROUP_BYTES = 256 * 2**20


def expert_stacks(model: nn.Module) -> dict[str, list[str]]:
    """Modules whose experts can be packed, and the names of their stacks.

    They are known by what transformers' `use_experts_implementation` sets on every class whose forward it may replace.
    """
    return {name: stacks for name, module in model.named_modules() if hasattr(module, "has_gate") and (stacks := stacks_of(module))}


def stacks_of(module: nn.Module) -> list[str]:
    packed = getattr(module, "stack_states", {})
    return [leaf for leaf, p in module._parameters.items() if p is not None and (leaf in packed or (p.ndim == 3 and p.is_floating_point()))]


def quantize_stack(stack: torch.Tensor, *, quant_type: str, double_quant: bool, storage: torch.dtype) -> tuple[torch.Tensor, QuantState]:
    """Pack `stack` (E, rows, columns), each expert as `Linear4bit` packs a weight.

    Returns:
        The packed bytes, shape (words, 1) in dtype `storage`, and the constants with an expert dimension in front.
    """
    options = {"blocksize": BLOCKSIZE, "compress_statistics": double_quant, "quant_type": quant_type, "quant_storage": storage}
    packed, states = zip(*(quantize_4bit(expert.contiguous(), **options) for expert in stack), strict=True)
    first = states[0]
    nested = None
    if double_quant:
        nested = QuantState(
            absmax=torch.stack([s.state2.absmax for s in states]),
            code=first.state2.code,
            blocksize=first.state2.blocksize,
            dtype=first.state2.dtype,
        )
    state = QuantState(
        absmax=torch.stack([s.absmax for s in states]),
        shape=stack.shape,
        code=first.code,
        blocksize=first.blocksize,
        quant_type=quant_type,
        dtype=stack.dtype,
        offset=torch.stack([s.offset for s in states]) if double_quant else None,
        state2=nested,
    )
    return torch.cat(packed), state


def dequantize_experts(packed: torch.Tensor, state: QuantState, experts: list[int] | None = None) -> torch.Tensor:
    """The weights (n, rows, columns) of some experts, or of all, to the last bit what bitsandbytes makes of each on a GPU."""
    count, *size = state.shape
    if experts == list(range(count)):
        experts = None
    if one_launch_can(packed, state):
        chosen = None if experts is None else torch.tensor(experts, dtype=torch.int32, device=packed.device)
        out = torch.empty((count if experts is None else len(experts), *size), dtype=state.dtype, device=packed.device)
        return dequantize_stack(packed.as_subclass(torch.Tensor), state, out, chosen)
    # As bytes: indexing copies numbers, and some bit patterns are no numbers.
    data = packed.detach().as_subclass(torch.Tensor).view(torch.uint8).view(count, -1)
    absmax, offset = state.absmax, state.offset
    scale = state.state2.absmax if state.nested else None
    if experts is not None:
        index = torch.tensor(experts, device=data.device)
        data, absmax = data[index], absmax[index]
        offset, scale = (None, None) if scale is None else (offset[index], scale[index])
    if scale is not None:
        scale = scale.repeat_interleave(state.state2.blocksize, dim=1)[:, : absmax.shape[1]]
        absmax = state.state2.code.index_select(0, absmax.flatten().int()).view(scale.shape) * scale + offset[:, None]
    flat = QuantState(
        absmax=absmax.flatten().float(),
        # One block a row: on the CPU, bitsandbytes 0.50 takes the constants of other blocks where a row ends inside a block.
        shape=torch.Size((absmax.numel(), state.blocksize)),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    return dequantize_4bit(data.reshape(-1, 1), flat).view(len(data), *size)


class PackedExperts:
    """Comes before a class of experts in the bases (`pack_class`) and replaces its forward.

    The packed parameters keep the names of the stacks. To read one as an attribute gives its numbers, whole and in 16 bit: for
    other libraries, not for training.
    """

    stack_states: dict[str, QuantState]

    def unpacked(self, leaf: str) -> torch.Tensor:
        state, parameter = self.stack_states.get(leaf), self._parameters[leaf]
        # FSDP2 looks for its own shards under this name.
        as_it_is = state is None or parameter.is_meta or isinstance(parameter, DTensor)
        return parameter if as_it_is else dequantize_experts(parameter, state)

    def stand_in(self, leaf: str) -> torch.Tensor:
        """A tensor without memory that has the shape, dtype and device of a stack, for who only asks for those."""
        state = self.stack_states[leaf]
        return torch.zeros((), dtype=state.dtype, device=self._parameters[leaf].device).expand(state.shape)

    @contextmanager
    def low_rank(self, leaf: str, factors: list[tuple[torch.Tensor, torch.Tensor, float]]) -> Iterator[None]:
        """Add `scale * left @ right` (E, ...) to the stack while the block runs."""
        self.low_rank_factors[leaf] = factors
        try:
            yield
        finally:
            del self.low_rank_factors[leaf]

    def _apply(self, fn, recurse=True):
        result = super()._apply(fn, recurse)
        for leaf, state in self.stack_states.items():
            if not self._parameters[leaf].is_meta:
                state.to(self._parameters[leaf].device)
        return result

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: (T, H).
            top_k_index, top_k_weights: (T, K), the experts of a token and what they count.
        """
        count = self.stack_states["down_proj"].shape[0]
        experts, order = top_k_index.flatten().sort(stable=True)
        per_expert = torch.zeros(count, dtype=torch.int64, device=experts.device).scatter_add_(0, experts, torch.ones_like(experts))
        ends = per_expert.cumsum(0).tolist()
        # Copied and then put in order, rather than picked by token: no row is picked twice, so the gradient needs no atomic sums.
        x = hidden_states.repeat_interleave(top_k_index.shape[1], dim=0).index_select(0, order)
        first = "gate_up_proj" if self.has_gate else "up_proj"
        y = self._project(first, x, ends, experts)
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        y = self._project("down_proj", y, ends, experts)
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        y = y * top_k_weights.flatten().index_select(0, order)[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return y.index_select(0, back).view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)

    def _project(self, leaf: str, x: torch.Tensor, ends: list[int], experts: torch.Tensor) -> torch.Tensor:
        dtype = self.stack_states[leaf].dtype
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            y = _FrozenExperts.apply(x, self, leaf, ends)
            if self.has_bias:
                y = y + self._parameters[f"{leaf}_bias"].to(dtype).index_select(0, experts)
            for left, right, scale in self.low_rank_factors.get(leaf, ()):
                if not self.is_transposed:
                    left, right = right.transpose(1, 2), left.transpose(1, 2)
                y = y + scale * _low_rank_product(x, left, right, ends)
        return y


def _low_rank_product(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """`x @ left @ right` by expert: (rows, in), (E, in, r), (E, r, out) -> (rows, out)."""
    padding = -left.shape[-1] % 8 if x.device.type == "cuda" else 0  # to a rank that one launch can do
    if padding:
        left, right = nn.functional.pad(left, (0, padding)), nn.functional.pad(right, (0, 0, 0, padding))
    return grouped_matmul(grouped_matmul(x, left, ends), right, ends)


class _FrozenExperts(torch.autograd.Function):
    """Rows sorted by expert times the experts' frozen weights, which are dequantised again in the backward pass."""

    @staticmethod
    def forward(ctx, x, experts: PackedExperts, leaf: str, ends: list[int]):
        ctx.experts, ctx.leaf, ctx.ends = experts, leaf, ends
        return _in_groups(experts, leaf, x, ends, transpose=not experts.is_transposed)

    @staticmethod
    def backward(ctx, d_out):
        return _in_groups(ctx.experts, ctx.leaf, d_out, ctx.ends, transpose=ctx.experts.is_transposed), None, None, None


def _in_groups(experts: PackedExperts, leaf: str, x: torch.Tensor, ends: list[int], *, transpose: bool) -> torch.Tensor:
    """`x` times the weights of the experts that have rows, a group of experts at a time."""
    state, packed = experts.stack_states[leaf], experts._parameters[leaf]
    _, rows, columns = state.shape
    out = x.new_empty(len(x), rows if transpose else columns)
    hit = [e for e, end in enumerate(ends) if end > (ends[e - 1] if e else 0)]
    size = max(1, GROUP_BYTES // (2 * rows * columns))
    for group in (hit[i : i + size] for i in range(0, len(hit), size)):
        start, end = ends[group[0] - 1] if group[0] else 0, ends[group[-1]]
        weights = dequantize_experts(packed, state, group)
        weights = weights.transpose(1, 2) if transpose else weights
        out[start:end] = grouped_matmul(x[start:end], weights, [ends[e] - start for e in group])
    return out


def pack_class(module: nn.Module) -> None:
    """Turn `module` into a `PackedExperts` of its own class, whose stacks may be packed one after the other."""
    if isinstance(module, PackedExperts):
        return
    cls = type(module)
    stacks = {leaf: property(lambda self, leaf=leaf: self.unpacked(leaf)) for leaf in stacks_of(module)}
    module.__class__ = type(cls.__name__, (PackedExperts, cls), {**stacks, "__module__": cls.__module__})
    module.stack_states, module.low_rank_factors = {}, {}
    module._is_hf_initialized = True


def plain_experts(module: nn.Module) -> nn.Module:
    """A shallow copy of experts as transformers made them, with the same parameters. Whoever packed them must put numbers in."""
    plain = copy.copy(module)
    plain._parameters = dict(module._parameters)
    plain.__dict__.pop("forward", None)  # the class's own, whatever was put on `module`
    if isinstance(module, PackedExperts):
        plain.__class__ = type(module).__bases__[1]
    return plain
