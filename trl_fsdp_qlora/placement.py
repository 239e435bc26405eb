"""Which part of a model lives where, and how a part in host memory is used from the accelerator.

Training on text never touches a vision or audio tower, and looks up a few rows of a per-layer-embedding table that
is larger than all 4-bit layers together. Both stay in host memory: of a table only the rows of a batch travel, and a
tower moves in when a batch has an image or sound for it.
"""

import functools
import os
import types
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from .checks import same_device
from .experts import expert_stacks
from .logging import get_logger
from .packed import packed_weights
from .structure import ModelStructure, find_structure, is_inside

logger = get_logger(__name__)

# Below this, an embedding is not worth a copy per batch.
MIN_HOST_EMBEDDING_BYTES = 16 * 2**20
# One thread reads scattered rows at a fraction of the rate of host memory, and pays for every page met for the first time.
GATHER_THREADS = min(8, os.cpu_count() or 1)
ROWS_A_PIECE = 256


@dataclass(frozen=True)
class Part:
    """One line of the placement table: a named part of the model, in one dtype, on one device."""

    name: str
    dtype: str
    bytes: int
    device: str


def choose_host_modules(
    skeleton: nn.Module,
    structure: ModelStructure,
    device: torch.device,
    *,
    per_layer_embedding_device: str = "auto",
    tower_device: str = "auto",
) -> list[str]:
    """Names of the modules that live in host memory, decided on a model without weights.

    `"auto"` means host memory exactly when `device` is an accelerator (and, for a table, when it is large).
    """
    host: list[str] = []
    on_accelerator = device.type != "cpu"
    for name in structure.side_embeddings:
        large = skeleton.get_submodule(name).weight.numel() * 2 >= MIN_HOST_EMBEDDING_BYTES
        if per_layer_embedding_device == "cpu" or (per_layer_embedding_device == "auto" and on_accelerator and large):
            host.append(name)
    if tower_device == "cpu" or (tower_device == "auto" and on_accelerator):
        host.extend(structure.towers)
    return host


def attach_host_modules(model: nn.Module, host_modules: list[str], device: torch.device) -> None:
    """Make the modules named in `host_modules`, whose parameters are in host memory, work for inputs on `device`."""
    for name in host_modules:
        module = model.get_submodule(name)
        module.requires_grad_(False)
        module.lives_on_host = True
        if isinstance(module, nn.Embedding):
            _look_up_in_host_memory(module, device)
        else:
            _move_in_on_demand(name, module, device)
    if host_modules:
        _report_device(model, device)


def _report_device(model: nn.Module, device: torch.device) -> None:
    """Let `model.device` be where it computes. transformers says where the first parameter is, which may be a tower in
    host memory, and `generate` puts its tensors there."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"device": property(lambda self: device), "__module__": cls.__module__})


def _look_up_in_host_memory(embedding: nn.Embedding, device: torch.device) -> None:
    """Replace the forward of `embedding` by a lookup that moves only the distinct rows a batch needs.

    The embedding's own forward then runs on the accelerator over this small table, so that scaling and whatever else
    a subclass does there stays as it is, bit for bit.
    """
    for buffer_name, buffer in list(embedding.named_buffers(recurse=False)):
        embedding._buffers[buffer_name] = buffer.to(device)

    def forward(self, input_ids: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        # ids: (batch, length) on any device -> distinct rows (n, dim) on `device` -> the module's own forward.
        distinct, local_ids = torch.unique(input_ids.to("cpu"), return_inverse=True)
        host_table = self._parameters["weight"]
        self._parameters["weight"] = nn.Parameter(_fetch_rows(host_table, distinct, device), requires_grad=False)
        try:
            return type(self).forward(self, local_ids.to(device, non_blocking=True), *args, **kwargs)
        finally:
            self._parameters["weight"] = host_table

    embedding.forward = types.MethodType(forward, embedding)


@functools.cache
def _gatherers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(GATHER_THREADS, thread_name_prefix="gather_rows")


def _fetch_rows(host_table: torch.Tensor, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rows `ids` (n,) of `host_table` on `device`: some threads gather, and each piece travels as soon as it is there."""
    with torch.inference_mode(False):  # tensors of that mode cannot be written by other threads
        rows = torch.empty((len(ids), host_table.shape[1]), dtype=host_table.dtype, pin_memory=device.type == "cuda")
    fetched = torch.empty_like(rows, device=device)
    pieces = list(zip(ids.split(ROWS_A_PIECE), rows.split(ROWS_A_PIECE), fetched.split(ROWS_A_PIECE), strict=True))
    gather = partial(torch.index_select, host_table, 0)
    later = [_gatherers().submit(gather, some, out=piece) for some, piece, _ in pieces[1:]]
    # The first one here: that is all there is of a token in generation.
    finish = [partial(gather, pieces[0][0], out=pieces[0][1]), *(future.result for future in later)]
    for wait, (_, piece, target) in zip(finish, pieces, strict=True):
        wait()
        # The pinned block is not reused before this copy is done: the caching host allocator records an event.
        target.copy_(piece, non_blocking=True)
    return fetched


def _move_in_on_demand(name: str, tower: nn.Module, device: torch.device) -> None:
    def move_in(module: nn.Module, args):
        away = [t for t in (*module.parameters(), *module.buffers()) if not same_device(t.device, device)]
        for tensor in away:
            tensor.data = tensor.data.to(device)  # the same objects: FSDP and an optimizer know those that train
        if away:
            logger.info("Moved %s to %s: a batch needs it.", name, device)

    tower.register_forward_pre_hook(move_in, prepend=True)


def move_in_trained_parts(model: nn.Module, device: torch.device) -> None:
    """What trains of the parts in host memory goes to `device` now, so that an optimizer's state that is read is there too."""
    for parameter in host_parameters(model):
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device)


def host_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of the modules that `attach_host_modules` took charge of."""
    return {
        parameter
        for module in model.modules()
        if getattr(module, "lives_on_host", False)
        for parameter in module.parameters()
    }


def list_parts(model: nn.Module) -> list[Part]:
    """What is where: bytes of every part of `model` by dtype and device, tied tensors counted once.

    For DTensors the bytes are those of this rank's shard. Quantisation constants are listed on their own.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    structure = find_structure(base)
    totals: dict[tuple[str, str, str], int] = defaultdict(int)
    base_names = {id(p): n for n, p in base.named_parameters()}
    packed_here = packed_weights(base).values()
    packed_ids = {id(packed.weight) for packed in packed_here}
    experts = tuple(expert_stacks(base))
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        packed = id(parameter) in packed_ids
        part = _part_of(base_names.get(id(parameter), name), structure, packed, experts)
        dtype = "4 bit" if packed else str(local.dtype).removeprefix("torch.")
        totals[part, dtype, str(local.device)] += local.numel() * local.element_size()
    for packed in packed_here:
        for tensor in packed.constants:
            dtype = str(tensor.dtype).removeprefix("torch.")
            totals["quantisation constants", dtype, str(tensor.device)] += tensor.numel() * tensor.element_size()
    return [Part(part, dtype, count, device) for (part, dtype, device), count in totals.items()]


def _part_of(name: str, structure: ModelStructure, packed: bool, experts: tuple[str, ...]) -> str:
    if "lora_" in name or "modules_to_save" in name:
        return "adapters"
    for tower in structure.towers:
        if is_inside(name, tower):
            return tower
    for embedding in structure.side_embeddings:
        if is_inside(name, embedding):
            return embedding
    if any(is_inside(name, stack) for stack in experts):
        return "language model, experts"
    if is_inside(name, structure.input_embedding):
        return "token embedding"
    if structure.output_head and is_inside(name, structure.output_head):
        return "output head"
    return "language model, linear" if packed else "language model, other"


def placement_table(model: nn.Module) -> str:
    """The parts of `model` as a text table, for the start of a run."""
    parts = list_parts(model)
    width = max(len(part.name) for part in parts)
    lines = [f"{'part':<{width}}  {'dtype':<9} {'MiB':>10}  device"]
    for part in sorted(parts, key=lambda p: -p.bytes):
        lines.append(f"{part.name:<{width}}  {part.dtype:<9} {part.bytes / 2**20:>10.1f}  {part.device}")
    return "\n".join(lines)
