"""Adapters, optimizer state and random numbers on their way to a file and back, whatever the number of ranks.

Everything is written whole and by name, never by position or by rank: a parameter's name is the same at any number of
ranks, and a rank that loads takes its shard out of the whole tensor. Tensors are in safetensors files, the rest is JSON;
nothing that is read here can run code.
"""

import base64
import json
import os
import pickle
import random
import re
from collections.abc import Iterator

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from . import sharding

ADAPTER_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
GATHERED_BYTES = 2**27


def adapter_entries(model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """What belongs to `adapter`, under the keys that PEFT writes. Never a frozen weight of the base."""
    tensors = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    return get_peft_model_state_dict(model, state_dict=tensors, adapter_name=adapter, save_embedding_layers=False)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` unsharded and in host memory. A collective where they are sharded."""
    found: dict[str, torch.Tensor] = {}
    pieces, end = [], 0
    for name, tensor in tensors.items():  # many together, but not more than an accelerator has room for
        if not pieces or end > GATHERED_BYTES:
            pieces.append([])
            end = 0
        pieces[-1].append(name)
        end += tensor.numel() * tensor.element_size()
    for names in pieces:
        gathered = sharding.full_tensors([tensors[name].detach() for name in names])
        found |= {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in zip(names, gathered, strict=True)}
    return found


def own_shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of the whole `tensor` that this rank holds, laid out and placed like the parameter `like`."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    mesh = like.device_mesh
    # Without a source rank nothing is sent: every rank has read the same file and cuts its shard.
    sharded = distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return sharded.to(like.to_local().device)


def gather_adapters(model: PeftModel) -> dict[str, torch.Tensor]:
    """All adapters of `model` as whole tensors under the names of their parameters. Call it on all ranks."""
    sharding.reshard(model)
    wanted = {id(tensor) for adapter in model.peft_config for tensor in adapter_entries(model, adapter).values()}
    tensors = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    return whole({name: tensor for name, tensor in sorted(tensors.items()) if id(tensor) in wanted})


def adapter_folders(model: PeftModel, folder: str) -> dict[str, str]:
    """Where in `folder` PEFT puts each adapter of `model`; those that are not there are left out, the active never is."""
    folders = {}
    for adapter in model.peft_config:
        own = folder if adapter == "default" else os.path.join(folder, adapter)
        if os.path.isfile(os.path.join(own, ADAPTER_FILE)):
            folders[adapter] = own
        elif adapter in model.active_adapters:
            folders[adapter] = folder
    return folders


def load_adapter(model: PeftModel, adapter: str, folder: str) -> None:
    """Read the adapter file in `folder` into `adapter` of `model`, in place; the layout over ranks stays.

    Raises:
        ValueError: if the file is missing, damaged, or holds other modules or shapes than the model.
    """
    sharding.reshard(model)
    path = os.path.join(folder, ADAPTER_FILE)
    entries = adapter_entries(model, adapter)
    with open_tensors(path) as file:
        _check_entries(path, file, entries)
        with torch.no_grad():
            for key, parameter in entries.items():
                part = own_shard(file.get_tensor(key), parameter)
                if isinstance(parameter, DTensor):
                    parameter.to_local().copy_(part.to_local())
                else:
                    parameter.copy_(part)


def _check_entries(path: str, file, entries: dict[str, nn.Parameter]) -> None:
    saved, wanted = set(file.keys()), set(entries)
    if saved != wanted:
        only_saved, only_here = sorted(saved - wanted), sorted(wanted - saved)
        found = [f"{len(only_saved)} tensors that this run lacks, such as {only_saved[0]!r}"] if only_saved else []
        found += [f"none of {len(only_here)} tensors that this run has, such as {only_here[0]!r}"] if only_here else []
        raise ValueError(
            f"{path} holds {' and '.join(found)}. The LoRA targets differ: write those of the checkpoint's "
            "adapter_config.json, or load it with `PeftModel.from_pretrained(..., is_trainable=True)` and pass that model."
        )
    for key, parameter in entries.items():
        shape = tuple(file.get_slice(key).get_shape())
        if shape != tuple(parameter.shape):
            wanted = tuple(parameter.shape)
            low_rank = re.search(r"\.lora_(?:embedding_)?([AB])\b", key)
            features = low_rank is not None and low_rank[1] == "A"  # the dimension that is not the rank
            same_layer = low_rank is not None and len(shape) == len(wanted) == 2 and shape[features] == wanted[features]
            other_rank = "Write the `lora_r` of the checkpoint's adapter_config.json"
            advice = other_rank if same_layer else "It is for another base model: load that"
            raise ValueError(f"{path} holds {key!r} with shape {shape}, and this run has {wanted}. {advice}, or start a new adapter.")


def gather_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state of `optimizer` as whole tensors under `<state>/<parameter>`, and the rest of it as JSON.

    Call it on all ranks.

    Raises:
        ValueError: for state that cannot be written without pickle, or that fits only the shards of so many ranks.
    """
    names = _parameter_names(model)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, object] = {}
    for name, parameter in _by_name(optimizer, names):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            entry = f"{key}/{name}"
            if not isinstance(value, torch.Tensor):
                numbers[entry] = _plain(value, optimizer, key)
            elif isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} for a rank's own shard, which no other number of ranks can resume. "
                    "Choose an optimizer with whole state, such as 'adamw_torch_fused', or write `save_only_model=True`."
                )
            else:
                tensors[entry] = value
    groups = [
        {key: _plain(value, optimizer, key) for key, value in group.items() if key != "params"}
        | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    # One entry, because safetensors orders several by chance: equal states shall make equal files.
    return whole(tensors), {"optimizer": json.dumps({"groups": groups, "numbers": numbers}, sort_keys=True)}


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: str) -> None:
    """Read what `gather_optimizer` returned into `optimizer`; each rank takes its shards.

    Raises:
        ValueError: if the file is damaged or is for other parameters.
    """
    sharding.reshard(model)
    names = _parameter_names(model)
    parameters = dict(_by_name(optimizer, names))
    index = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, object]] = {}
    with open_tensors(path) as file:
        described = json.loads((file.metadata() or {}).get("optimizer", '{"groups": [], "numbers": {}}'))
        groups, numbers = described["groups"], described["numbers"]
        saved = {frozenset(group["params"]): group for group in groups}
        if set(saved) != {frozenset(names[id(p)] for p in group["params"]) for group in optimizer.param_groups}:
            raise ValueError(f"{path} was written for other parameters, or for other parameter groups, than this run has.")
        for entry in file.keys():
            key, _, name = entry.partition("/")
            value = file.get_tensor(entry)
            parameter = parameters[name]
            if value.shape == parameter.shape:
                value = own_shard(value, parameter)
            state.setdefault(index[id(parameter)], {})[key] = value
        for entry, value in numbers.items():
            key, _, name = entry.partition("/")
            state.setdefault(index[id(parameters[name])], {})[key] = value
    new_groups = []
    for group in optimizer.param_groups:
        old = saved[frozenset(names[id(p)] for p in group["params"])]
        values = {key: _like(old[key], group.get(key)) for key in old if key != "params"}
        new_groups.append(values | {"params": [index[id(p)] for p in group["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": new_groups})


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _by_name(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[tuple[str, nn.Parameter]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in names for p in parameters)
    if strangers:
        raise ValueError(
            f"The optimizer holds {strangers} of {len(parameters)} tensors that are not parameters of the model. Pass "
            "`optimizer_cls_and_kwargs` rather than an optimizer made before the trainer laid the model over the ranks."
        )
    yield from sorted((names[id(p)], p) for p in parameters)


def _plain(value, optimizer, key: str):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    try:
        json.dumps(value)
    except TypeError:
        raise ValueError(
            f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}, which cannot be written without pickle. "
            "Choose another optimizer, or write `save_only_model=True`."
        ) from None
    return value


def _like(value, current):
    if isinstance(current, torch.Tensor):
        return torch.tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) else value


def open_tensors(path: str):
    """Open a safetensors file.

    Raises:
        ValueError: naming the file, if it is missing, cut short or something else.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing.") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short, or no safetensors file: {error}.") from None


def load_plain(path: str) -> dict:
    """`torch.load` of numbers and containers; whatever else a pickle may hold is refused."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged or holds more than numbers: {str(error).splitlines()[0]}") from None


def random_state() -> dict:
    """The random-number state of this process, as JSON can carry it."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": _to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_text(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(state["cuda"]))


def _to_text(tensor: torch.Tensor) -> str:
    return base64.b64encode(bytes(tensor.tolist())).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
