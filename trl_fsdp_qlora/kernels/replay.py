"""CUDA graphs of decoder layers: one recording a kind of layer, replayed for every layer of that kind.

Issuing the launches of a layer one by one takes the host several times as long as the GPU needs for the work. A recording
issues them all at once. It works on tensors at fixed addresses, so before each replay the layer's own weights (packed, a
third of a millisecond for 35 layers) and inputs are copied to them, from wherever they are at that moment: under FSDP
that is where the unit was gathered. Weights are frozen and layers of a kind differ in nothing else, so few recordings serve
a whole model.

With gradient checkpointing, the backward recording computes the layer again from its inputs, and nothing but those is kept
between the two. Without it, each layer has recordings of its own, for one shape of batch: what the backward pass needs stays in
their memory. Should a second forward pass, or another layer's, have written over it, the backward pass runs the forward recording
again. With `keep_activations`, layers have recordings of the second sort as long as there is memory for them, and then of the
first.

The first replay of each layer is compared with the layer's own operations, forward and backward. If they differ, replaying
stops with a warning, and training goes on without it. So it does when recordings would not leave a whole step the memory it took
without them; backward passes under way then issue the operations of their layers.

A shape is recorded when a layer meets it for the second time, and the first few such shapes are kept. Everything else (other
shapes, batches large enough to keep the GPU busy, generation with a cache, dropout, hooks on inner modules) takes the layer's own
forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._utils import _unflatten_dense_tensors

from ..logging import get_logger
from .graph_pool import Replays
from .recording import INPUTS, Place, Recording, as_integers, in_place_of, nothing_saved_elsewhere

logger = get_logger(__name__)

RECORD_AT = 2
# Relative error of a replay against the same operations issued one by one; the same kernels, so far less is seen.
MAX_ERROR = 2e-2


@dataclass
class Kind:
    """What a layer tells about itself: where its frozen tensors are, what else must be equal to share a recording."""

    packed: list[Place]
    other: list[Place]
    constants: tuple
    # run(x, ple, k, v, cos, sin, mask) -> (output, or output, keys and values)
    run: Callable
    # The places of A and B of each adapter that counts now, and numbers that are recorded with them; None to not replay.
    adapters: Callable
    # Whether the layer is checkpointed now.
    checkpoints: Callable


class LayerReplay:
    """One layer's side: its kind, and where its tensors are."""

    def __init__(self, replays: Replays, kind: Kind):
        self.replays, self.kind = replays, kind
        self.checked: set[Recording] = set()
        self._views: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(kind.packed)

    def packed(self) -> list[torch.Tensor]:
        """The packed weights as integers: bytes copied as 16-bit numbers would not all arrive."""
        for i, (owner, key) in enumerate(self.kind.packed):
            parameter, known = owner[key], self._views[i]
            if known is None or known[0] is not parameter or known[1].data_ptr() != parameter.data_ptr():
                self._views[i] = parameter, as_integers(parameter.detach().as_subclass(torch.Tensor))
        return [view for _, view in self._views]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: LayerReplay, recording: Recording, *tensors):
        inputs = dict(zip(INPUTS, tensors, strict=False))
        ctx.layer, ctx.recording = layer, recording
        ctx.save_for_backward(*tensors)
        recording.load(layer, list(tensors[len(INPUTS) :]), inputs)
        outputs = recording.forward()
        ctx.of_forward = recording.forwards
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx, *d_outputs):
        tensors = ctx.saved_tensors
        inputs, adapters = dict(zip(INPUTS, tensors, strict=False)), tensors[len(INPUTS) :]
        recording = ctx.recording
        if recording.released:
            _, gradients = _issue(ctx.layer, inputs, adapters, recording.wants, recording.trains, lambda _: d_outputs)
            gradients = iter(gradients)
            d_inputs = {name: next(gradients) for name in INPUTS if recording.wants[name]}
        else:
            recording.load(ctx.layer, list(adapters), inputs)
            d_inputs, flat = recording.backward(d_outputs, ctx.of_forward)
            trained = [t for t, trains in zip(adapters, recording.trains, strict=True) if trains]
            gradients = iter(_unflatten_dense_tensors(flat, trained))
        d_adapters = [next(gradients) if trains else None for trains in recording.trains]
        return None, None, *(d_inputs.get(name) for name in INPUTS), *d_adapters


def _issue(layer: LayerReplay, inputs: dict, adapters, wants: dict[str, bool], trains, make_d_outputs: Callable | None):
    """Outputs of `layer`, its operations issued one by one, and gradients of the inputs and adapters that want one."""
    leaves = {name: None if t is None else t.detach().requires_grad_(wants[name]) for name, t in inputs.items()}
    adapters = [t.detach().requires_grad_(wanted) for t, wanted in zip(adapters, trains, strict=True)]
    places, _ = layer.kind.adapters()
    grad = make_d_outputs is not None
    with (
        torch.set_grad_enabled(grad), torch.autocast(layer.replays.device.type, enabled=False), in_place_of(places, adapters),
        nothing_saved_elsewhere(),
    ):  # fmt: skip
        outputs = list(layer.kind.run(**leaves))
        if not grad:
            return outputs, []
        wanted = [t for t in (*leaves.values(), *adapters) if t is not None and t.requires_grad]
        d_outputs = make_d_outputs(outputs)
        used, d_used = zip(*((o, d) for o, d in zip(outputs, d_outputs, strict=True) if o.requires_grad), strict=True)
        gradients = torch.autograd.grad(used, wanted, d_used, allow_unused=True)
    return outputs, [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, gradients, strict=True)]


def _make_recording(layer, shape_key, places, inputs, wants, grad, keep) -> Recording | None:
    """None if there can be none: then replays are off, or this layer, or all of them, no longer keep anything."""
    begin, replays = time.perf_counter(), layer.replays
    bytes_before, mark = replays.own_bytes(), replays.mark()
    try:
        recording = Recording(layer, places, inputs, wants, grad, keep)
    except RuntimeError as error:  # out of memory included
        failure = str(error).splitlines()[0]
        recording, out_of_memory = None, isinstance(error, torch.OutOfMemoryError)
    replays.seconds += time.perf_counter() - begin
    if recording is None:
        reason = f"recording one failed. {failure}"
        replays.make_way(reason, keeping=keep) if out_of_memory else replays.give_up(reason)
        return None
    if keep:
        replays.note_kept(replays.own_bytes() - bytes_before)
    # What is kept instead of checkpointing takes the place of what a step without recordings kept, and is seen when it does not fit.
    if (not keep or layer.kind.checkpoints()) and not replays.leaves_room(shape_key, grad, keeping=keep):
        recording.release()
        replays.back_to(mark)
        if keep:
            replays.keepers[layer] = False
        else:
            replays.make_way("a step needs the memory. Shorter rows, a smaller batch, or a smaller `mlp_tile_size` leave them some.")
        return None
    return recording


def _same_as_issued(layer: LayerReplay, recording: Recording, inputs: dict, adapters: list[torch.Tensor], grad: bool) -> bool:
    """Whether `layer` computes the same by replay and by issuing its operations, gradients included; noted for next time."""
    begin = time.perf_counter()
    try:
        worst = _replay_error(layer, recording, inputs, adapters, grad)
    except torch.OutOfMemoryError:
        worst = None
    if worst is None:
        layer.replays.make_way("there is no memory to check one.", keeping=recording.keep)
        return False
    layer.checked.add(recording)
    layer.replays.seconds += time.perf_counter() - begin
    layer.replays.worst_error = max(layer.replays.worst_error, worst)
    if not worst <= MAX_ERROR:
        layer.replays.give_up(f"a replayed layer differs from its operations by {worst:.1e} (relative).")
    return not layer.replays.broken


def _replay_error(layer: LayerReplay, recording: Recording, inputs: dict, adapters: list[torch.Tensor], grad: bool) -> float:
    """The largest relative error of an output or gradient of a replay against the operations of `layer` issued one by one."""
    # Any gradients will do; drawing some would move the random numbers of training.
    d_outputs = (lambda outputs: [t.detach().flip(-1) for t in outputs]) if grad else None
    outputs, gradients = _issue(layer, inputs, adapters, recording.wants, recording.trains if grad else [False] * len(adapters), d_outputs)
    with torch.no_grad():
        recording.load(layer, adapters, inputs)
        got = recording.forward()
        if grad:
            d_inputs, flat = recording.backward(d_outputs(outputs), recording.forwards)
            got += [*d_inputs.values(), *_unflatten_dense_tensors(flat, [t for t in adapters if t.requires_grad])]
        errors = [(a - b).float().norm() / b.float().norm().clamp_min(1e-12) for a, b in zip(got, outputs + gradients, strict=True)]
        return torch.stack(errors).max().item()


def _like(tensor: torch.Tensor | None) -> tuple | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def replay(layer: LayerReplay, x, ple, k, v, cos, sin, mask):
    """(output, ...) of `layer` by replaying a recording, or None where there is none to replay."""
    adapters = layer.kind.adapters()
    if adapters is None:
        return None
    places, numbers = adapters
    tensors = [owner[key] for owner, key in places]
    inputs = dict(zip(INPUTS, (x, ple, k, v, cos, sin, mask), strict=True))
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs.values(), *tensors))
    if grad and not any(t.requires_grad for t in tensors):
        return None
    shape_key = (tuple(x.shape), _like(mask))
    wants = {name: grad and t is not None and t.requires_grad for name, t in inputs.items()}
    trains = tuple(t.requires_grad for t in tensors) if grad else None
    if grad:
        layer.replays.make_way_for(shape_key)
    layer.replays.met[layer, shape_key, grad] += 1
    if layer.replays.met[layer, shape_key, grad] < RECORD_AT or layer.replays.broken:
        return None
    layer.replays.note_step(shape_key, grad)
    keep = grad and layer.replays.keeps(layer, shape_key)
    if not layer.replays.may_record(shape_key, keep):
        return None
    kind_key = (
        layer.kind.constants, numbers, grad, trains, tuple(wants.values()), id(layer) if keep else None,
        tuple(_like(t) for t in inputs.values()), tuple(_like(t) for t in tensors),
    )  # fmt: skip
    recording = layer.replays.recordings.get(shape_key, {}).get(kind_key)
    if recording is None:
        recording = _make_recording(layer, shape_key, places, inputs, wants, grad, keep)
        if recording is None:
            return None
        if shape_key not in layer.replays.recordings:
            logger.info("Recording CUDA graphs for batches of shape %s.", tuple(x.shape[:2]))
        layer.replays.recordings.setdefault(shape_key, {})[kind_key] = recording
    if layer.replays.broken or recording not in layer.checked and not _same_as_issued(layer, recording, inputs, tensors, grad):
        return None
    if grad:
        outputs = _Replayed.apply(layer, recording, *inputs.values(), *tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)
    recording.load(layer, tensors, inputs)
    return tuple(recording.forward())
