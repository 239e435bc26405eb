"""The recordings of one model, the memory they share, and whether there is room for them. See `replay`."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from ..logging import get_logger

if TYPE_CHECKING:
    from .recording import Recording
    from .replay import LayerReplay

logger = get_logger(__name__)

# Shapes of a batch that are recorded; each costs a few seconds once, and tens of MiB.
MAX_SHAPES = 4
# Of the memory there is, what a step may take beside recordings.
MAX_MEMORY = 0.97
# The same where layers keep activations because there is memory for them: what else a run may want has to fit.
MAX_MEMORY_WITH_KEPT = 0.85


class Replays:
    """The recordings of one model, and the memory they share: they run one after another, never two at a time."""

    def __init__(self, device: torch.device, layers: int = 0, keep_activations: bool = False):
        self.device, self.layers, self.keep_activations = device, layers, keep_activations
        self.recordings: dict[tuple, dict[tuple, Recording]] = {}
        self.met: Counter = Counter()  # how often a layer has met a shape of batch, with gradients or without
        self.broken = self.full = False
        self.kept_shape: tuple | None = None  # of batches whose activations are kept; () once that failed
        # Of the checkpointed layers, which keep activations all the same (`keep_activations`).
        self.keepers: dict[LayerReplay, bool] = {}
        self.seconds = 0.0  # spent on recording and checking
        self.worst_error = 0.0
        self._pool = self._stream = self._arena = None
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._pool_bytes = 0
        self._next_kept_bytes = 0  # what the next recording that keeps activations may take
        self._step_bytes: dict[tuple, int] = {}

    def __deepcopy__(self, memo):
        return self

    def may_record(self, shape_key: tuple) -> bool:
        if len(self.recordings) < MAX_SHAPES or shape_key in self.recordings:
            return not self.broken
        if not self.full:
            self.full = True
            logger.info(
                "Batches come in more than %d shapes: further ones run without CUDA graphs. `packing` or `pad_to_multiple_of` make fewer.",
                MAX_SHAPES,
            )
        return False

    def give_up(self, reason: str) -> None:
        """No replays from now on, and their memory goes back."""
        self.broken = True
        self.release()
        logger.warning("CUDA graphs are off: %s", reason)

    def release(self) -> None:
        """Give all recordings and their memory back."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # one may be running
        for kinds in self.recordings.values():
            for recording in kinds.values():
                recording.release()
        self.recordings.clear()
        self._buffers.clear()
        self._arena, self._pool_bytes = None, 0
        self._give_memory_back()

    def forget(self) -> None:
        """Be as new: for a process that trains again under another memory limit, or after it ran out of memory."""
        self.release()
        self.met.clear()
        self.keepers.clear()
        self._step_bytes.clear()
        self.broken, self.full, self.kept_shape = False, False, None

    @property
    def hold_memory(self) -> bool:
        return bool(self.recordings or self._buffers)

    def make_way(self) -> None:
        """A step ran out of memory, and may run again: keep no activations from now on, or else replay nothing."""
        if self.kept_shape and any(recording.keep for kinds in self.recordings.values() for recording in kinds.values()):
            self.forget()  # the step that failed counts for nothing
            self.stop_keeping()
        else:
            self.give_up("a step ran out of memory.")

    def stop_keeping(self) -> None:
        """Activations are computed again from now on."""
        logger.warning("No memory for CUDA graphs that keep activations: they compute them again, as with gradient checkpointing.")
        self.kept_shape = ()
        self.keepers.clear()
        self.release()

    def keeps(self, layer: LayerReplay, shape_key: tuple) -> bool:
        """Whether `layer` keeps the activations of such batches. Of checkpointed layers, the first ones, as long as there is room."""
        checkpoints = layer.kind.checkpoints()
        if checkpoints and not self.keep_activations:
            return False
        if self.kept_shape is None:
            self.kept_shape = shape_key
        if self.kept_shape != shape_key:
            return False
        if not checkpoints:
            return True
        if layer not in self.keepers:
            self.keepers[layer] = self.leaves_room(shape_key, grad=True, more=self._next_kept_bytes)
            if len(self.keepers) == self.layers:
                kept = sum(self.keepers.values())
                logger.info("%d of %d layers keep their activations for batches of shape %s.", kept, self.layers, shape_key[0][:2])
        return self.keepers[layer]

    @property
    def keeps_some(self) -> bool:
        """Whether a checkpointed layer keeps activations, because there is memory for them."""
        return any(self.keepers.values())

    def note_kept(self, count: int) -> None:
        """A recording that keeps activations took `count` bytes; that of another layer may be twice as large."""
        self._next_kept_bytes = 2 * count

    def note_step(self, shape_key: tuple, grad: bool) -> None:
        """How much a step with such batches takes without recordings. Their shape comes again, so one whole step is done."""
        if self.device.type == "cuda" and (shape_key, grad) not in self._step_bytes:
            self._step_bytes[shape_key, grad] = torch.cuda.max_memory_allocated(self.device) - self.own_bytes()

    def leaves_room(self, shape_key: tuple, grad: bool, more: int = 0) -> bool:
        """Whether that much, and `more` bytes, are left beside the recordings. What a replay works on does not count as allocated."""
        if self.device.type != "cuda":
            return True
        free, total = torch.cuda.mem_get_info(self.device)
        # Less than all of the card where others use it, or where the user said so.
        limit = min(free + torch.cuda.memory_reserved(self.device), total * torch.cuda.get_per_process_memory_fraction(self.device))
        share = MAX_MEMORY_WITH_KEPT if self.keeps_some else MAX_MEMORY
        return self._step_bytes[shape_key, grad] + self.own_bytes() + more <= share * limit

    def own_bytes(self) -> int:
        fixed = [*self._buffers.values(), *([] if self._arena is None else [self._arena])]
        return self._pool_bytes + sum(t.numel() * t.element_size() for t in fixed)

    def _give_memory_back(self) -> None:
        # What one stream has freed, another cannot use.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self, function):
        """`function` once outside a recording: kernels are compiled, libraries set up on the stream that records."""
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, function) -> torch.cuda.CUDAGraph:
        self._give_memory_back()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self.device)
        # Other threads (data loading, NCCL's watchdog) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        self._pool_bytes += torch.cuda.memory_reserved(self.device) - before
        return graph

    def weights_like(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like `tensors` in the memory that all recordings use for the weights of a layer."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += math.ceil(tensor.numel() * tensor.element_size() / 512) * 512
        if self._arena is None or self._arena.numel() < end:
            # Earlier recordings keep the smaller one.
            self._arena = torch.empty(end, dtype=torch.uint8, device=self.device)
        return [
            self._arena[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, t in zip(starts, tensors, strict=True)
        ]

    def buffer_like(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like `tensor`, strides included unless they leave gaps; the same one for the same role and shape."""
        key = role, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(tensor)
        return self._buffers[key]
