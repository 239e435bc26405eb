"""Keep only a rank's own shard of each tensor while a checkpoint streams in.

A model that does not fit on one card in 4 bit can then still be laid over several: at no time does a rank hold more than
its shards and the tensor just read. `fully_shard` meets such a parameter as a meta tensor of the full shape and then gets
the shard (`full_shapes_on_meta`, `put_shards_in_place`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .packed import packed_leaves
from .structure import ModelStructure, is_inside

# Smaller tensors (norms, biases) are loaded whole and sharded later: nothing is saved by treating them one by one.
MIN_BYTES = 2**20
# Blocks of a checksum: sums by position, so that swapped shards are noticed as well as changed bytes.
_CHECKSUM_BLOCKS = 256


@dataclass(frozen=True)
class ShardOf:
    """Which shard this rank keeps: number `rank` of `world_size`, along dimension 0."""

    rank: int
    world_size: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the own shard, sized as FSDP2 sizes it: `ceil(n / world_size)` rows, fewer or none at the end."""
        chunks = tensor.chunk(self.world_size)
        return chunks[self.rank].clone() if self.rank < len(chunks) else tensor[:0].clone()


@contextmanager
def keeping_own_shards(
    shard: ShardOf | None, structure: ModelStructure, host_modules: list[str]
) -> Iterator[None]:
    """While a checkpoint loads, replace each large parameter of the language model and the head by its own shard.

    The seam is `set_param_for_module`, which `from_pretrained` calls for every tensor after renaming, casting and
    quantising it.
    """
    if shard is None:
        yield
        return
    from transformers import core_model_loading

    if not hasattr(core_model_loading, "set_param_for_module"):
        raise ImportError(
            "transformers has no `core_model_loading.set_param_for_module`: this version is outside the tested range, "
            "see setup.cfg."
        )
    set_param = core_model_loading.set_param_for_module

    def set_param_and_keep_shard(model, target_name, *args, **kwargs):
        set_param(model, target_name, *args, **kwargs)
        if structure.in_tower(target_name) or any(is_inside(target_name, name) for name in host_modules):
            return
        owner_name, _, leaf = target_name.rpartition(".")
        owner = model.get_submodule(owner_name)
        parameter = owner._parameters.get(leaf)
        if parameter is not None and parameter.numel() * parameter.element_size() >= MIN_BYTES:
            _keep_shard(owner, leaf, shard)

    core_model_loading.set_param_for_module = set_param_and_keep_shard
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = set_param


def _keep_shard(owner: nn.Module, leaf: str, shard: ShardOf) -> None:
    parameter = owner._parameters[leaf]
    if leaf in packed_leaves(owner):
        owner.checksums_before_sharding = {**getattr(owner, "checksums_before_sharding", {}), leaf: packed_checksum(parameter)}
    owner.full_shapes = {**getattr(owner, "full_shapes", {}), leaf: parameter.shape}
    # A plain parameter, as FSDP2 makes them: bitsandbytes finds the quantisation constants on the module.
    own = nn.Parameter(shard.of(parameter.detach().as_subclass(torch.Tensor)), requires_grad=False)
    own._is_hf_initialized = True
    owner._parameters[leaf] = own


def packed_checksum(weight: torch.Tensor) -> torch.Tensor:
    """Block sums, shape (blocks,) int64, over the bytes of a packed weight read as integers."""
    data = weight.detach().contiguous().view(torch.uint8).flatten()
    padding = -len(data) % _CHECKSUM_BLOCKS
    if padding:
        data = torch.nn.functional.pad(data, (0, padding))
    return data.view(_CHECKSUM_BLOCKS, -1).sum(dim=1, dtype=torch.int64).cpu()


def loaded_in_shards(module: nn.Module) -> dict[str, torch.Size]:
    """Names and full shapes of the parameters of `module` itself that hold a shard."""
    return getattr(module, "full_shapes", {})


# A parameter that holds a shard: its module, its name there, and the shard.
Loaded = tuple[nn.Module, str, torch.Tensor]


def full_shapes_on_meta(model: nn.Module) -> list[Loaded]:
    """Put a meta parameter of the full shape wherever a shard is, tied parameters together, and return the shards."""
    metas: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for leaf, shape in loaded_in_shards(module).items():
            own = module._parameters[leaf]
            metas[own] = nn.Parameter(torch.empty(shape, dtype=own.dtype, device="meta"), requires_grad=False)
    loaded: list[Loaded] = []
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter in metas:
                loaded.append((module, leaf, parameter.data))
                module._parameters[leaf] = metas[parameter]
    return loaded


def put_shards_in_place(loaded: list[Loaded], mesh: DeviceMesh, device: torch.device) -> None:
    """After `fully_shard`: give each sharded meta parameter the shard it stands for, on `device`."""
    placed: dict[int, nn.Parameter] = {}
    for module, leaf, own in loaded:
        # Tied parameters share their storage, and stay one parameter.
        key = own.data_ptr() if own.numel() else id(module._parameters[leaf])
        if key not in placed:
            meta = module._parameters[leaf]
            tensor = DTensor.from_local(
                own.to(device), mesh, [Shard(0)], run_check=False, shape=meta.shape, stride=meta.stride()
            )
            placed[key] = nn.Parameter(tensor, requires_grad=False)
        module._parameters[leaf] = placed[key]
