"""A kind of decoder layer for one shape of batch, recorded as CUDA graphs on tensors at fixed addresses. See `replay`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._utils import _unflatten_dense_tensors
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from .replay import LayerReplay

INPUTS = ("x", "ple", "k", "v", "cos", "sin", "mask")

# A place that holds a tensor: the dictionary of a module (or of a quantisation state) and a key in it.
Place = tuple[dict, str]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` as a row of 32-bit integers, or of bytes where it does not fit."""
    row = tensor.view(-1).view(torch.uint8)
    return row.view(torch.int32) if row.numel() % 4 == 0 and row.storage_offset() % 4 == 0 else row


def nothing_saved_elsewhere() -> saved_tensors_hooks:
    """Inside, saved tensors stay where they are, whatever hooks (activation offloading) do with those of the step around."""
    return saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


@contextmanager
def in_place_of(places: list[Place], tensors: list[torch.Tensor]):
    originals = [owner[key] for owner, key in places]
    for (owner, key), tensor in zip(places, tensors, strict=True):
        owner[key] = tensor
    try:
        yield
    finally:
        for (owner, key), tensor in zip(places, originals, strict=True):
            owner[key] = tensor


def _launches(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> list[list[int]]:
    """Numbers of the tensors that one launch copies: of one dtype, and laid out like their sources."""
    groups: dict[tuple, list[int]] = {}
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        groups.setdefault((target.dtype, target.stride() == source.stride()), []).append(i)
    return list(groups.values())


def _given(inputs: dict) -> list[torch.Tensor]:
    return [t for t in inputs.values() if t is not None]


class Recording:
    """A kind of layer for one shape of batch: fixed tensors, and the graphs that run on them."""

    def __init__(self, layer: LayerReplay, adapter_places: list[Place], inputs: dict, wants: dict[str, bool], grad: bool, keep: bool):
        replays = layer.replays
        self.replays, self.wants, self.keep, self.released = replays, wants, keep, False
        self.forward_graph = self.backward_graph = self.kept = None
        self.forwards = 0  # counts what has been written to the memory that is kept
        self.number = replays.new_number() if keep else None
        self.inputs = {name: None if t is None else replays.buffer_like(name, t) for name, t in inputs.items()}
        places = layer.kind.packed + layer.kind.other + adapter_places
        originals = [owner[key].detach().as_subclass(torch.Tensor) for owner, key in places]
        stand_ins = replays.weights_like(originals)
        n_packed = len(layer.kind.packed)
        self.trains = [owner[key].requires_grad for owner, key in adapter_places]
        targets = [as_integers(t) for t in stand_ins[:n_packed]] + stand_ins[n_packed:] + _given(self.inputs)
        # Behind autograd's back: what a kept forward pass has saved of them is there again before its backward pass.
        targets = [t.data for t in targets]
        sources = [as_integers(t) for t in originals[:n_packed]] + originals[n_packed:] + _given(inputs)
        self.launches = [(group, [targets[i] for i in group]) for group in _launches(targets, sources)]
        self.load(layer, originals[len(originals) - len(adapter_places) :], inputs)

        @contextmanager
        def on_fixed_tensors():
            # Around the backward pass as well: it reads the weights again.
            with torch.autocast(replays.device.type, enabled=False), in_place_of(places, stand_ins), nothing_saved_elsewhere():
                yield layer.kind.run

        def compute():
            with torch.no_grad(), on_fixed_tensors() as run:
                return run(**self.inputs)

        def forward():
            torch._foreach_copy_(self.outputs, list(compute()))

        self.outputs = [replays.buffer_like(f"out{i}", t) for i, t in enumerate(replays.warm_up(compute))]
        if not keep:
            self.forward_graph = replays.record(forward)
        if grad:
            self._record_backward(on_fixed_tensors, stand_ins, len(adapter_places))

    def _record_backward(self, on_fixed_tensors, stand_ins: list[torch.Tensor], n_adapters: int) -> None:
        """The backward pass of what is computed again, or of a forward pass that is recorded here and keeps what it takes."""
        replays = self.replays
        leaves = {name: t.detach().requires_grad_() for name, t in self.inputs.items() if self.wants[name]}
        first_adapter = len(stand_ins) - n_adapters
        adapters = zip(stand_ins[first_adapter:], self.trains, strict=True)
        stand_ins[first_adapter:] = [t.detach().requires_grad_(trains) for t, trains in adapters]
        trained = [t for t in stand_ins[first_adapter:] if t.requires_grad]
        wanted = [*leaves.values(), *trained]
        self.d_outputs = [replays.buffer_like(f"d_out{i}", t) for i, t in enumerate(self.outputs)]
        for d_output in self.d_outputs:
            d_output.zero_()
        flat = torch.empty(sum(t.numel() for t in trained), dtype=trained[0].dtype, device=replays.device)
        self.flat = replays.buffer_like("d_adapters", flat)
        self.d_inputs = {name: replays.buffer_like(f"d_{name}", t) for name, t in leaves.items()}
        results = [*self.d_inputs.values(), *_unflatten_dense_tensors(self.flat, trained)]

        def forward():
            with torch.enable_grad(), on_fixed_tensors() as run:
                self.kept = run(**{**self.inputs, **leaves})
            with torch.no_grad():
                torch._foreach_copy_(self.outputs, list(self.kept))

        def backward():
            with torch.enable_grad(), on_fixed_tensors() as run:
                outputs = self.kept if self.keep else run(**{**self.inputs, **leaves})
                used, d_used = zip(*((o, d) for o, d in zip(outputs, self.d_outputs, strict=True) if o.requires_grad), strict=True)
                gradients = torch.autograd.grad(used, wanted, d_used, allow_unused=True, retain_graph=self.keep)
            with torch.no_grad():
                for result, gradient in zip(results, gradients, strict=True):
                    result.zero_() if gradient is None else result.copy_(gradient)

        if self.keep:
            replays.warm_up(forward)
        replays.warm_up(backward)
        if self.keep:
            self.kept = None
            self.forward_graph = replays.record(forward, kept=True)
        self.backward_graph = replays.record(backward, kept=self.keep)

    def release(self) -> None:
        """Give up graphs and tensors; whoever still wants a backward pass issues the layer's operations."""
        self.released = True
        self.forward_graph = self.backward_graph = self.kept = None
        self.inputs = self.outputs = self.launches = self.d_outputs = self.d_inputs = self.flat = None

    def load(self, layer: LayerReplay, adapters: list[torch.Tensor], inputs: dict) -> None:
        """Copy everything that a replay reads to where it reads it."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            sources = layer.packed() + [owner[key] for owner, key in layer.kind.other] + adapters + _given(inputs)
            for group, targets in self.launches:
                torch._foreach_copy_(targets, [sources[i] for i in group])

    def forward(self) -> list[torch.Tensor]:
        self._replay_forward()
        return [t.clone() for t in self.outputs]

    def _replay_forward(self) -> None:
        self.forward_graph.replay()
        self.forwards += 1
        if self.keep:
            self.replays.note_use(self.number)

    def backward(self, d_outputs, of_forward: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if self.keep and (of_forward != self.forwards or self.replays.written_over(self.number)):
            self._replay_forward()
        for target, source in zip(self.d_outputs, d_outputs, strict=True):
            target.copy_(source)
        self.backward_graph.replay()
        if self.keep:
            self.replays.note_use(self.number)
        return {name: t.clone() for name, t in self.d_inputs.items()}, self.flat.clone()
