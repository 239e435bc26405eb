"""The recordings of one model: which there are, which layers keep activations, and when they make way. See `replay`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from ..logging import ANY_RANK, get_logger
from .graph_memory import GraphMemory

if TYPE_CHECKING:
    from .recording import Recording
    from .replay import LayerReplay

logger = get_logger(__name__)

# Shapes of a batch that are recorded; each costs a few seconds once, and tens of MiB.
MAX_SHAPES = 4
# Tokens of a batch above which a layer takes the GPU longer than the host takes to issue it: recording gains nothing then, and the
# memory is worth more.
MAX_TOKENS = 2**14


class Replays(GraphMemory):
    def __init__(self, device: torch.device, layers: int = 0, keep_activations: bool = False):
        super().__init__(device)
        self.layers, self.keep_activations = layers, keep_activations
        self.recordings: dict[tuple, dict[tuple, Recording]] = {}
        self.met: Counter = Counter()  # how often a layer has met a shape of batch, with gradients or without
        self.broken = False
        self._said: set[str] = set()
        self.given_back = 0  # how often memory went back
        # Whether whoever trains takes a step again that has run out of memory, after `make_way`.
        self.steps_are_repeated = False
        self.kept_shape: tuple | None = None  # of batches whose activations are kept; () once that failed
        # Of the checkpointed layers, which keep activations all the same (`keep_activations`).
        self.keepers: dict[LayerReplay, bool] = {}
        self._fitting: set[tuple] = set()  # shapes of batches that fit beside what is kept
        self._next_kept_bytes = 0  # what the next recording that keeps activations may take
        self.seconds = 0.0  # spent on recording and checking
        self.worst_error = 0.0

    def __deepcopy__(self, memo):
        return self

    def may_record(self, shape_key: tuple, keep: bool) -> bool:
        if self.broken:
            return False
        if tokens_of(shape_key) > MAX_TOKENS and not keep:
            self._say_once(f"Batches of more than {MAX_TOKENS} tokens run without CUDA graphs: they keep the GPU busy.")
            return False
        if len(self.recordings) >= MAX_SHAPES and shape_key not in self.recordings:
            self._say_once(
                f"Batches come in more than {MAX_SHAPES} shapes: further ones run without CUDA graphs. `packing` or "
                "`pad_to_multiple_of` make fewer."
            )
            return False
        return True

    def _say_once(self, note: str) -> None:
        if note not in self._said:
            self._said.add(note)
            logger.info(note)

    def give_up(self, reason: str) -> None:
        """No replays from now on, and their memory goes back."""
        self.broken = True
        self.release()
        logger.warning("CUDA graphs are off: %s", reason, extra=ANY_RANK)

    def release(self) -> None:
        """Give all recordings and their memory back."""
        self.given_back += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # one may be running
        for kinds in self.recordings.values():
            for recording in kinds.values():
                recording.release()
        self.recordings.clear()
        self.free_all()

    def forget(self) -> None:
        """Be as new: for a process that trains again under another memory limit, or after it ran out of memory."""
        self.release()
        self.start_new_peak()
        self.met.clear()
        self.keepers.clear()
        self._fitting.clear()
        self.broken, self.kept_shape, self._next_kept_bytes = False, None, 0

    @property
    def hold_memory(self) -> bool:
        return bool(self.recordings or self._buffers)

    @property
    def may_hold_memory(self) -> bool:
        """Whether recordings do, or shapes of batches may come again that are recorded then."""
        return self.hold_memory or bool(self.met) and not self.broken

    def make_way(self, reason: str, *, keeping: bool = False) -> None:
        """Something needs the memory: keep no activations from now on or, where none are kept or about to be, replay nothing."""
        if keeping or any(recording.keep for kinds in self.recordings.values() for recording in kinds.values()):
            self.stop_keeping()
        else:
            self.give_up(reason)

    def make_way_for(self, shape_key: tuple) -> None:
        """A larger batch than those whose activations are kept may not fit beside them, and nobody would take the step again."""
        if self.kept_shape in (None, (), shape_key) or self.steps_are_repeated or shape_key in self._fitting or not self.recordings:
            return
        if self.leaves_room(self.kept_shape, True, times=tokens_of(shape_key) / tokens_of(self.kept_shape)):
            self._fitting.add(shape_key)
        else:
            self.stop_keeping()

    def stop_keeping(self) -> None:
        """Activations are computed again from now on."""
        logger.warning(
            "No memory for CUDA graphs that keep activations: they compute them again, as with gradient checkpointing.", extra=ANY_RANK
        )
        self.forget()  # a step that failed counts for nothing
        self.kept_shape = ()

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
            self.keepers[layer] = self.leaves_room(shape_key, True, more=self._next_kept_bytes, keeping=True)
            if len(self.keepers) == self.layers:
                kept = sum(self.keepers.values())
                logger.info("%d of %d layers keep their activations for batches of shape %s.", kept, self.layers, shape_key[0][:2])
        return self.keepers[layer]

    def note_kept(self, count: int) -> None:
        """A recording that keeps activations took `count` bytes; that of another layer may be twice as large."""
        self._next_kept_bytes = 2 * count


def tokens_of(shape_key: tuple) -> int:
    batch, length, *_ = shape_key[0]
    return batch * length
