"""The memory of CUDA graphs: pools, fixed tensors, and how much a step leaves for them. See `replay`."""

from __future__ import annotations

import math

import torch

from ..logging import get_logger

logger = get_logger(__name__)

# Of the memory there is, what a step and recordings may take.
MAX_MEMORY = 0.97
# The same where a layer is to keep activations because there is memory for them: what else a run may want has to fit.
MAX_MEMORY_WITH_KEPT = 0.85


class GraphMemory:
    """Recordings share all of this: they run one after another, never two at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.peak = 0  # bytes allocated at most, before `start_new_peak` made PyTorch forget
        self._stream = None
        # What recordings keep for a backward pass is in a pool of its own: another graph may write where it finds free memory.
        self._pools: dict[bool, tuple] = {}
        self._arenas: list[torch.Tensor] = []  # the last one is in use; earlier recordings keep smaller ones
        self._buffers: dict[tuple, torch.Tensor] = {}
        # Of the pools: what they took from the card, and what of it stays allocated between replays.
        self._pool_bytes = self._live_bytes = 0
        self._step_bytes: dict[tuple, int] = {}
        self._uses: list[int] = []  # when each recording that keeps something was last replayed, in the order in which they were made
        self._now = 0

    def new_number(self) -> int:
        """Of a recording that keeps something."""
        self._uses.append(0)
        return len(self._uses) - 1

    def note_use(self, number: int) -> None:
        self._now += 1
        self._uses[number] = self._now

    def written_over(self, number: int) -> bool:
        """Whether another recording may have written over what the one of that `number` kept when it was last replayed.

        A recording may keep something where an earlier one had what it needs only while it runs, never where a later one has. Layers are
        recorded in the order in which they run, so this takes passes that a user runs in another one, as with two adapters in turns.
        """
        return max(self._uses[:number], default=0) > self._uses[number]

    def _fixed_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._buffers.values(), *self._arenas))

    def own_bytes(self) -> int:
        return self._pool_bytes + self._fixed_bytes()

    def mark(self) -> tuple[int, int]:
        return self._pool_bytes, self._live_bytes

    def back_to(self, mark: tuple[int, int]) -> None:
        """The graphs recorded since `mark` are gone."""
        self._pool_bytes, self._live_bytes = mark

    def note_step(self, shape_key: tuple, grad: bool) -> None:
        """How much a step with such batches takes without recordings. Their shape comes again, so one whole step is done."""
        if self.device.type == "cuda" and (shape_key, grad) not in self._step_bytes:
            taken = torch.cuda.max_memory_allocated(self.device) - self._fixed_bytes() - self._live_bytes
            self._step_bytes[shape_key, grad] = taken

    def leaves_room(self, shape_key: tuple, grad: bool, more: int = 0, times: float = 1.0, keeping: bool = False) -> bool:
        """Whether that much, or so many times as much, and `more` bytes, are left beside the recordings.

        What a replay works on does not count as allocated.
        """
        if self.device.type != "cuda":
            return True
        free, total = torch.cuda.mem_get_info(self.device)
        # Less than all of the card where others use it, or where the user said so.
        limit = min(free + torch.cuda.memory_reserved(self.device), total * torch.cuda.get_per_process_memory_fraction(self.device))
        share = MAX_MEMORY_WITH_KEPT if keeping else MAX_MEMORY
        return times * self._step_bytes[shape_key, grad] + self.own_bytes() + more <= share * limit

    def start_new_peak(self) -> None:
        """What steps needed beside recordings that are gone says nothing about what they need from now on."""
        self._step_bytes.clear()
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)

    def free_all(self) -> None:
        """The memory goes back, once no graph uses it. New recordings get pools of their own."""
        self._buffers.clear()
        self._arenas.clear()
        self._pools.clear()
        self._pool_bytes = self._live_bytes = 0
        try:
            self._give_memory_back()
        except RuntimeError as error:  # after a recording that failed half-way
            logger.warning("Memory of CUDA graphs stays taken: %s", str(error).splitlines()[0])

    def _give_memory_back(self) -> None:
        # What one stream has freed, another cannot use.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self, function):
        """`function` once outside a recording: kernels are compiled, libraries set up on the stream that records."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, function, kept: bool = False) -> torch.cuda.CUDAGraph:
        """`kept`: whether what the graph leaves allocated is to stay as it is until another graph reads it."""
        self._give_memory_back()
        if kept not in self._pools:
            self._pools[kept] = torch.cuda.graph_pool_handle()
        reserved, allocated = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
        graph = torch.cuda.CUDAGraph()
        # Should recording fail, the stream is the same as before. Other threads (data loading, NCCL's watchdog) may use the device.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pools[kept], stream=self._stream, capture_error_mode="thread_local"),
        ):
            function()
        self._pool_bytes += torch.cuda.memory_reserved(self.device) - reserved
        self._live_bytes += torch.cuda.memory_allocated(self.device) - allocated
        return graph

    def weights_like(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like `tensors` in the memory that all recordings use for the weights of a layer."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += math.ceil(tensor.numel() * tensor.element_size() / 512) * 512
        if not self._arenas or self._arenas[-1].numel() < end:
            self._arenas.append(torch.empty(end, dtype=torch.uint8, device=self.device))
        arena = self._arenas[-1]
        return [
            arena[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, t in zip(starts, tensors, strict=True)
        ]

    def buffer_like(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like `tensor`, strides included unless they leave gaps; the same one for the same role and shape."""
        key = role, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(tensor)
        return self._buffers[key]
