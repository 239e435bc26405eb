"""Linear layers with a frozen (4-bit) weight and low-rank adapters, as one autograd function.

Layers that read the same input (query, key and value; gate and up) form a group: one product with all their weights,
one with all their A matrices.

Adding the low-rank path to a result much wider than the input reads and writes that result once more, which costs as much as a
quarter of the product that made it. Where that is so, the low-rank path is in the product: `[x u] [W sB]'` instead of
`x W' + s u B'`, for packed weights, which are unpacked into a matrix with room for `sB`.

Shapes: N rows (tokens), I in_features, O out_features of the whole group, R ranks of the whole group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..packed import quant_state_of
from .dequantize import dequantize
from .gated_gelu import gated_gelu_backward, gated_gelu_forward

# Numbers of a group's weights that are dequantised at once: 256 MiB in 16 bit. Above, one product would gain little.
MAX_JOINT = 2**27
# How many times as wide as what goes into a product its result must be for the low-rank path to be part of the product.
WIDE = 2


@dataclass
class Slot:
    """Where one adapter of a group works: columns of the output, rows of the joint A matrix, and its scale."""

    columns: slice
    ranks: slice
    scale: float


class LinearGroup:
    """The frozen layers that share an input: where their weights are, and how to get them as numbers.

    Weights are read when they are needed, never kept: under FSDP they are there only while their unit is gathered.
    """

    def __init__(self, layers: list[nn.Module]):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        self.columns = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        self.states = [quant_state_of(layer) for layer in layers]
        self.packed = all(state is not None for state in self.states)
        self.dtype = self.states[0].dtype if self.packed else layers[0].weight.dtype
        self.inputs, self.outputs = layers[0].in_features, self.columns[-1].stop
        joint = len(layers) == 1 or self.packed and self.outputs * self.inputs <= MAX_JOINT
        self.parts = [(slice(0, self.outputs), slice(None))] if joint else [(c, slice(i, i + 1)) for i, c in enumerate(self.columns)]

    def weights(self, dtype: torch.dtype, below: int = 0, beside: int = 0) -> Iterator[tuple[slice, torch.Tensor]]:
        """Columns of the output, and the weight (O, I) that makes them: one for a packed group that is small enough, else one
        a layer, made when its turn comes. Those of packed groups can have `below` more rows and `beside` more columns, not filled."""
        for columns, part in self.parts:
            yield columns, self._numbers(part, dtype, below, beside) if self.packed else self.layers[part][0].weight.to(dtype)

    def _numbers(self, part: slice, dtype: torch.dtype, below: int, beside: int) -> torch.Tensor:
        """The dequantised weights of the layers `part`, one below the other."""
        layers, sizes = self.layers[part], self.sizes[part]
        whole = torch.empty((sum(sizes) + below, self.inputs + beside), dtype=dtype, device=layers[0].weight.device)
        for rows, layer, state in zip(whole[: sum(sizes), : self.inputs].split(sizes), layers, self.states[part], strict=True):
            dequantize(layer.weight, state, rows)
        return whole

    def add_biases(self, y: torch.Tensor) -> None:
        for columns, layer in zip(self.columns, self.layers, strict=True):
            if layer.bias is not None:
                y[:, columns] += layer.bias.to(y.dtype)


def product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` of 16-bit matrices, not rounded to 16 bit (fp64 stays fp64)."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


def qlora_linear_reference(x, group, slots, adapters):
    """The group's outputs side by side, (N, O), in plain PyTorch: `x W' + s (x A') B'`."""
    dtype = x.dtype
    outputs = [nn.functional.linear(x, weight) for _, weight in group.weights(dtype)]
    y = torch.cat(outputs, dim=-1)
    group.add_biases(y)
    for slot, a, b in zip(slots, adapters[::2], adapters[1::2], strict=True):
        delta = nn.functional.linear(nn.functional.linear(x, a.to(dtype)), b.to(dtype)) * slot.scale
        y = y + nn.functional.pad(delta, (slot.columns.start, y.shape[-1] - slot.columns.stop))
    return y


class QLoRALinear(torch.autograd.Function):
    """`x W' + s (x_low A') B'` for every layer of a group, side by side in one output.

    Adapters are cast to the dtype of `x` inside, and their gradients come out in at least fp32: products of 16-bit
    matrices that are never rounded to 16 bit.
    """

    @staticmethod
    def forward(ctx, x, x_low, group: LinearGroup, slots: list[Slot], *adapters):
        # x: (N, I). x_low: the input of the low-rank path where dropout makes it another, else None.
        low = x if x_low is None else x_low
        y, u = _project(x, low, group, slots, adapters)
        if slots:
            ctx.save_for_backward(low, u, *adapters)
        ctx.group, ctx.slots, ctx.has_own_low = group, slots, x_low is not None
        return y

    @staticmethod
    def backward(ctx, dy):
        group, slots, needs = ctx.group, ctx.slots, ctx.needs_input_grad
        if not slots:
            return _times_weights(dy, group) if needs[0] else None, None, None, None
        low, u, *adapters = ctx.saved_tensors
        du = _gradient_of_u(dy, u, slots, adapters)
        dx = dx_low = None
        if ctx.has_own_low:
            dx = _times_weights(dy, group) if needs[0] else None
            dx_low = du @ _joint_a(slots, adapters, dy) if needs[1] else None
        elif needs[0]:
            dx = _gradient_of_x(dy, du, group, slots, adapters)
        return dx, dx_low, None, None, *_gradients_of_adapters(dy, low, u, du, slots, adapters)


class QLoRAGatedLinear(torch.autograd.Function):
    """`QLoRALinear` of `gelu(gate) * up`, for gate and up side by side in one tensor (N, 2 I).

    The product of gate and up is as large as half of what it is made of, and cheap: the backward pass makes it again.
    """

    @staticmethod
    def forward(ctx, gate_up, group: LinearGroup, slots: list[Slot], *adapters):
        x = gated_gelu_forward(gate_up)
        y, u = _project(x, x, group, slots, adapters)
        ctx.save_for_backward(gate_up, u, *adapters)
        ctx.group, ctx.slots = group, slots
        return y

    @staticmethod
    def backward(ctx, dy):
        group, slots = ctx.group, ctx.slots
        gate_up, u, *adapters = ctx.saved_tensors
        du = _gradient_of_u(dy, u, slots, adapters) if slots else None
        if ctx.needs_input_grad[0]:
            dx = _gradient_of_x(dy, du, group, slots, adapters) if slots else _times_weights(dy, group)
            d_gate_up, x = gated_gelu_backward(gate_up, dx)
        else:
            d_gate_up, x = None, gated_gelu_forward(gate_up)
        return d_gate_up, None, None, *_gradients_of_adapters(dy, x, u, du, slots, adapters)


def _project(x, low, group: LinearGroup, slots: list[Slot], adapters) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`x W' + s u B'` (N, O), biases included, and `u = low A'` (N, R)."""
    y = x.new_empty((x.shape[0], group.outputs))
    u = low @ _joint_a(slots, adapters, x).t() if slots else None
    # Of another rank, rows of `[x u]` would begin where fast kernels do not.
    together = slots and group.packed and group.outputs >= WIDE * group.inputs and u.shape[1] % 8 == 0
    left = torch.cat((x, u), dim=1) if together else x
    for columns, weight in group.weights(x.dtype, beside=u.shape[1] if together else 0):
        if together:
            _put_b(weight[:, group.inputs :], columns, slots, adapters)
        torch.mm(left, weight.t(), out=y[:, columns])
        del weight
    if slots and not together:
        for slot, b in zip(slots, adapters[1::2], strict=True):
            y[:, slot.columns].addmm_(u[:, slot.ranks], b.to(x.dtype).t(), alpha=slot.scale)
    group.add_biases(y)
    return y, u


def _gradient_of_u(dy, u, slots: list[Slot], adapters) -> torch.Tensor:
    """(N, R), scales included."""
    du = torch.empty_like(u)
    for slot, b in zip(slots, adapters[1::2], strict=True):
        torch.mm(dy[:, slot.columns], torch.mul(b, slot.scale, out=_empty_as(b, dy.dtype)), out=du[:, slot.ranks])
    return du


def _gradient_of_x(dy, du, group: LinearGroup, slots: list[Slot], adapters) -> torch.Tensor:
    """`dy W + du A`, (N, I)."""
    a = _joint_a(slots, adapters, dy)
    if not (group.packed and len(group.parts) == 1 and group.inputs >= WIDE * group.outputs and du.shape[1] % 8 == 0):
        return _times_weights(dy, group).addmm_(du, a)
    [(_, weight)] = group.weights(dy.dtype, below=len(a))
    weight[group.outputs :] = a
    return torch.cat((dy, du), dim=1) @ weight


def _gradients_of_adapters(dy, low, u, du, slots: list[Slot], adapters) -> list[torch.Tensor]:
    """Of A and B of each slot in turn."""
    gradients = []
    da = product_in_fp32(du.t(), low) if slots else None  # (R, I)
    for slot, a, b in zip(slots, adapters[::2], adapters[1::2], strict=True):
        db = product_in_fp32(dy[:, slot.columns].t(), u[:, slot.ranks]).mul_(slot.scale)
        gradients += [da[slot.ranks].to(a.dtype), db.to(b.dtype)]
    return gradients


def _times_weights(dy: torch.Tensor, group: LinearGroup) -> torch.Tensor:
    """`dy W`, (N, I)."""
    dx = None
    for columns, weight in group.weights(dy.dtype):
        dx = dy[:, columns] @ weight if dx is None else dx.addmm_(dy[:, columns], weight)
        del weight
    return dx


def _put_b(target: torch.Tensor, columns: slice, slots: list[Slot], adapters) -> None:
    """`sB` of each slot of the outputs `columns`, in the columns of `target` (columns, R) that its ranks have, and zero elsewhere."""
    target.zero_()
    for slot, b in zip(slots, adapters[1::2], strict=True):
        if columns.start <= slot.columns.start and slot.columns.stop <= columns.stop:
            rows = slice(slot.columns.start - columns.start, slot.columns.stop - columns.start)
            torch.mul(b, slot.scale, out=target[rows, slot.ranks])


def _empty_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)


def _joint_a(slots: list[Slot], adapters, like: torch.Tensor) -> torch.Tensor:
    """All A matrices of the group one below the other, (R, I), in the dtype of `like`."""
    if len(slots) == 1:
        return adapters[0].to(like.dtype)
    joint = like.new_empty((slots[-1].ranks.stop, adapters[0].shape[1]))
    for slot, a in zip(slots, adapters[::2], strict=True):
        joint[slot.ranks].copy_(a)
    return joint
