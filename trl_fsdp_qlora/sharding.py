"""FSDP2 for a 4-bit model with adapters: which modules form a unit, and packed bytes that arrive bit for bit.

accelerate's own FSDP2 preparation is not used: it gathers the per-layer-embedding table and the towers for the whole
step, keeps a second copy of the model alive while it shards, casts log-probabilities to bf16, wraps at world size 1,
and turns FSDP into plain DDP on the CPU without a word. What a user wrote in an accelerate config is read
(`read_sharding_request`) and done here instead, the same way for every trainer and every world size.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from . import streaming
from .logging import get_logger
from .packed import PackedWeight, packed_weights
from .placement import host_parameters
from .sharding_request import ShardingRequest, check_mixed_precision
from .structure import find_structure, is_inside

logger = get_logger(__name__)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    request: ShardingRequest,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Lay `model` over the ranks of `mesh`, in place, and return it.

    Units, each gathered as a whole and freed after use: every decoder layer; the token embedding, together with the
    head where their weights are tied; a head of its own; each large side embedding on the accelerator. The root holds
    the little that is left, adapters on towers included: one rank's batch may have an image and another's none, so towers
    cannot be gathered. Their frozen weights and parts in host memory are left alone: every rank has them.

    Without FSDP (`request.fsdp` false) the frozen weights are left alone as well. Adapters and the optimizer are then
    sharded as one unit, which trains exactly as DDP does and needs no broadcast of the base.

    Raises:
        ValueError: for a forbidden policy, packed weights in a container that cannot be sharded, trainable parameters
            of several dtypes, or a unit class that the model does not have.
        RuntimeError: if packed bytes do not arrive as they were sent.
    """
    mp_policy = mp_policy or MixedPrecisionPolicy()
    check_mixed_precision(mp_policy)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    _check_trainable_dtypes(model)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if request.offload_params else OffloadPolicy()
    options = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload}
    _reach_in_every_pass(base, [place for name in find_structure(base).towers for place in _trained(base.get_submodule(name))])

    if not request.fsdp:
        frozen = {p for p in model.parameters() if not p.requires_grad}
        fully_shard(model, reshard_after_forward=False, ignored_params=frozen, **options)
        _register_generate(model)
        return model

    packed = packed_weights(model)
    _check_storage(packed)
    checksums = {name: _checksum_of(weight) for name, weight in packed.items()}
    loaded = streaming.full_shapes_on_meta(model)
    ignored = {p for p in host_parameters(model) | _in_towers(base) if not p.requires_grad}
    managed: set[nn.Parameter] = set(ignored)
    for unit in find_units(base, request.unit_classes):
        own = _unmanaged(unit, managed)
        if own:
            _guard_bytes(unit[0], own, packed, mesh.device_type)
            fully_shard(
                unit if len(unit) > 1 else unit[0],
                # Kept for the head, which reads the tied weight after the last layer.
                reshard_after_forward=request.reshard_after_forward and len(unit) == 1,
                ignored_params=ignored,
                **options,
            )
        managed |= own
    _guard_bytes(model, _unmanaged([model], managed), packed, mesh.device_type)
    fully_shard(model, ignored_params=ignored, **options)
    home = torch.device("cpu") if request.offload_params else torch.device(mesh.device_type)
    streaming.put_shards_in_place(loaded, mesh, home)
    _register_generate(model)
    verify_packed_bytes(model, checksums)
    return model


def check_all_trained_are_laid_out(model: nn.Module) -> None:
    """Raise `ValueError` for parameters that train and came after `shard_model`: each rank would train them for itself."""
    added = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if added:
        raise ValueError(
            f"{len(added)} parameters are to train that were not there, or did not train, when the trainer laid the model over its ranks, "
            f"such as {added[0]!r}. Put all adapters on the model first, and pass the `PeftModel` to the trainer."
        )


def find_units(base: nn.Module, unit_classes: Iterable[str] = ()) -> list[list[nn.Module]]:
    """Groups of modules that are gathered together, innermost first; the root is not among them.

    Raises:
        ValueError: if a class in `unit_classes` does not occur in the model.
    """
    structure = find_structure(base)
    if unit_classes:
        chosen = [(name, m) for name, m in base.named_modules() if type(m).__name__ in set(unit_classes)]
        missing = set(unit_classes) - {type(m).__name__ for _, m in chosen}
        if missing:
            layer = type(base.get_submodule(structure.layers)[0]).__name__
            raise ValueError(
                f"`fsdp_transformer_layer_cls_to_wrap` names {', '.join(sorted(missing))}, which {type(base).__name__} "
                f"does not contain. Leave it out, or write {layer!r}."
            )
        chosen = [(name, m) for name, m in chosen if not structure.in_tower(name)]
    else:
        layers = base.get_submodule(structure.layers)
        chosen = [(f"{structure.layers}.{i}", layer) for i, layer in enumerate(layers)]
    embedding = base.get_submodule(structure.input_embedding)
    head = base.get_submodule(structure.output_head) if structure.output_head else None
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", object())
    # Embeddings are units of their own even inside a chosen parent: multimodal models look tokens up before they call
    # their language model, when a unit around it is not gathered yet.
    units = [(structure.input_embedding, [embedding, head] if tied else [embedding])]
    units += [(name, [base.get_submodule(name)]) for name in structure.side_embeddings]
    units += [(structure.output_head, [head])] if head is not None and not tied else []
    own = {module for _, unit in units for module in unit}
    units += [(name, [module]) for name, module in chosen if module not in own]
    # A module inside another comes first: fully_shard goes from the leaves up.
    return [unit for _, unit in sorted(units, key=lambda item: -item[0].count("."))]


def _in_towers(base: nn.Module) -> set[nn.Parameter]:
    return {p for name in find_structure(base).towers for p in base.get_submodule(name).parameters()}


def _trained(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the parameters of `module` are that train: the module that owns one, and its name there."""
    return [(m, name) for m in module.modules() for name, p in m.named_parameters(recurse=False) if p.requires_grad]


def _reach_in_every_pass(base: nn.Module, trained: list[tuple[nn.Module, str]]) -> None:
    """Let parameters that only some batches use have gradients in every backward pass, zeros if need be.

    FSDP reduces what has a gradient, and ranks would wait for ever for one that has none. `DistributedDataParallel` calls such
    parameters unused, and asks to be told of them (`find_unused_parameters`).
    """

    def add_nothing(module, args, output: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return output
        return output + 0 * sum(owner._parameters[name].sum() for owner, name in trained).to(output.dtype)

    if trained:
        base.get_submodule(find_structure(base).input_embedding).register_forward_hook(add_nothing)


def _unmanaged(modules: list[nn.Module], managed: set[nn.Parameter]) -> set[nn.Parameter]:
    return {p for module in modules for p in module.parameters() if p not in managed and not isinstance(p, DTensor)}


def _guard_bytes(module: nn.Module, own: set[nn.Parameter], packed: dict[str, PackedWeight], device_type: str) -> None:
    """Add one frozen fp32 number to a unit that would otherwise be all of one 16-bit dtype and hold packed bytes.

    FSDP2 gathers a unit of several dtypes as bytes. A unit of one dtype is copied as numbers of that dtype, and on
    CUDA a bf16 number that is a NaN pattern is rewritten on the way (`_foreach_copy_` goes through fp32): about one
    in a thousand packed words. https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1945
    """
    holds_packed = any(m.weight in own for m in packed.values())
    if holds_packed and len({p.dtype for p in own}) == 1:
        guard = torch.zeros(1, dtype=torch.float32, device=device_type)
        module.register_parameter("byte_guard", nn.Parameter(guard, requires_grad=False))
        own.add(module.byte_guard)


def _checksum_of(packed: PackedWeight) -> torch.Tensor:
    """Of the whole weight: taken while loading where only a shard of it was kept."""
    known = getattr(packed.owner, "checksums_before_sharding", {}).get(packed.leaf)
    return streaming.packed_checksum(packed.weight) if known is None else known


def verify_packed_bytes(model: nn.Module, checksums: dict[str, torch.Tensor]) -> None:
    """Gather every unit once and compare the packed bytes that arrive with what was there before sharding.

    Raises:
        RuntimeError: naming the modules whose bytes differ.
    """
    packed = packed_weights(model)
    owners = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    wrong: list[str] = []
    for owner_name, owner in owners.items():
        mine = [
            name for name in checksums if _owner_of(name, owners) == owner_name
        ]
        if not mine:
            continue
        owner.unshard()
        wrong += [name for name in mine if not torch.equal(streaming.packed_checksum(packed[name].weight), checksums[name])]
        owner.reshard()
    if wrong:
        raise RuntimeError(
            f"Packed 4-bit weights changed on their way between ranks: {len(wrong)} of {len(checksums)} modules, such as "
            f"{wrong[0]!r}. Training would run on a corrupted model, so it stops here."
        )


def _owner_of(name: str, owners: dict[str, nn.Module]) -> str:
    return max((owner for owner in owners if is_inside(name, owner)), key=len)


def _check_storage(packed: dict[str, PackedWeight]) -> None:
    integers = [name for name, m in packed.items() if not m.weight.dtype.is_floating_point]
    if integers:
        dtype = str(packed[integers[0]].weight.dtype).removeprefix("torch.")
        raise ValueError(
            f"Packed 4-bit weights are stored as {dtype} ({len(integers)} modules, such as {integers[0]!r}), which FSDP "
            "cannot shard: every rank would hold the whole base. Write `bnb_4bit_quant_storage='bfloat16'` (or leave "
            "it unset), or launch without FSDP."
        )


def _check_trainable_dtypes(model: nn.Module) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            dtypes.setdefault(p.dtype, name)
    if len(dtypes) > 1:
        found = ", ".join(f"{str(d).removeprefix('torch.')} ({name})" for d, name in dtypes.items())
        raise ValueError(
            f"Trainable parameters have several dtypes: {found}. FSDP reduces the gradients of a unit in one dtype. "
            "Cast them to one, or set `adapter_dtype`."
        )


def _register_generate(model: nn.Module) -> None:
    # `generate` of a PEFT model calls the base model, not the root; with the hook, weights gathered for the root
    # are gathered once for the whole generation.
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def reshard(model: nn.Module) -> None:
    """Make every unit hold its sharded parameters again.

    A forward pass without a backward one (evaluation, generation) leaves units with `reshard_after_forward=False`
    gathered. Whoever looks at `model.parameters()` then, such as an optimizer, would get tensors that nothing updates.
    """
    for unit in fsdp_units(model):
        unit.reshard()


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def full_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All of `tensors` whole, on every rank. A collective where some are sharded: call it on all ranks, with the same ones.

    One for all that FSDP has sharded, because one for each of some hundred small adapters would be mostly waiting; they are then views
    of one tensor. Shards that are offloaded to host memory travel between accelerators.
    """
    whole = list(tensors)
    by_rows: dict[tuple[DeviceMesh, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),):
            by_rows.setdefault((tensor.device_mesh, tensor.dtype), []).append(i)
        elif isinstance(tensor, DTensor):
            whole[i] = tensor.full_tensor()
    for (mesh, _), numbers in by_rows.items():
        for i, gathered in zip(numbers, _gather_rows([tensors[i] for i in numbers], mesh), strict=True):
            whole[i] = gathered
    return whole


def _gather_rows(tensors: list[DTensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """`tensors` whole, each of which has its rows shared out over the ranks of `mesh`."""
    ranks = mesh.size()
    # A rank has so many rows of a tensor, the last ones fewer or none; so the first rank has most of everything.
    rows = [-(-t.shape[0] // ranks) for t in tensors]
    counts = [
        [max(0, min(n, t.shape[0] - rank * n)) * (t.numel() // max(1, t.shape[0])) for t, n in zip(tensors, rows, strict=True)]
        for rank in range(ranks)
    ]
    longest = sum(counts[0])
    shards = [t.detach().to_local().reshape(-1) for t in tensors]
    padding = shards[0].new_zeros(longest - sum(shard.numel() for shard in shards))
    own = torch.cat([*shards, padding]).to(mesh.device_type)
    gathered = own.new_empty(ranks * longest)
    dist.all_gather_into_tensor(gathered, own, group=mesh.get_group())
    parts = gathered.split([size for of_rank in counts for size in (*of_rank, longest - sum(of_rank))])
    by_tensor = [parts[i :: len(tensors) + 1] for i in range(len(tensors))]  # the last of each rank is padding
    flat = torch.cat([part for of_tensor in by_tensor for part in of_tensor])
    return [whole.view(t.shape) for whole, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
