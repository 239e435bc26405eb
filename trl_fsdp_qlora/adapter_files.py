"""A LoRA adapter on disk, and what it does to one weight of its base. PEFT does the arithmetic, on one layer at a time."""

import copy
import os
import re
from dataclasses import dataclass, field

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
from torch import nn
from transformers.pytorch_utils import Conv1D

from .experts import expert_stacks
from .provenance import read_json
from .training_state import ADAPTER_FILE, open_tensors

PREFIX = "base_model.model."
INSTEAD = "Load the adapter with `peft.PeftModel.from_pretrained` and call `merge_and_unload` instead."


@dataclass
class _Change:
    """What changes one parameter: its module, its name there, and the keys of the tensors by PEFT's names for them."""

    module: str
    leaf: str
    tensors: dict[str, str] = field(default_factory=dict)


class Adapter:
    """A LoRA adapter on disk, applied to one parameter at a time: to the weight of a layer, or to a stack of experts.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        skeleton: the base model on the meta device.

    Raises:
        ValueError: for an adapter that is no LoRA, or changes more than linear layers and experts.
    """

    def __init__(self, folder: str, skeleton: nn.Module):
        self.config = read_adapter_config(folder)
        self.path = os.path.join(folder, ADAPTER_FILE)
        self._skeleton = skeleton
        self._changes: dict[str, _Change] = {}
        names, stacks = set(dict(skeleton.named_modules())), expert_stacks(skeleton)
        with open_tensors(self.path) as file:
            for key in file.keys():
                module, _, tensor = key.removeprefix(PREFIX).partition(".lora_")
                # PEFT wraps the stacks of one module around each other, the first one innermost.
                outer = module.removesuffix(".base_layer")
                depth = 0
                while outer != module:
                    module, depth = outer, depth + 1
                    outer = module.removesuffix(".base_layer")
                if not tensor or module not in names:
                    raise ValueError(
                        f"{self.path} holds {key!r}, which is no LoRA tensor of a module of {type(skeleton).__name__}. Write the "
                        "base model that the adapter was trained on as `base`."
                    )
                leaf = self._wrapped(module, stacks[module])[-1 - depth] if module in stacks else "weight"
                change = self._changes.setdefault(f"{module}.{leaf}", _Change(module, leaf))
                change.tensors[f"{module}.lora_{tensor}"] = key
        for change in self._changes.values():
            layer = skeleton.get_submodule(change.module)
            if not isinstance(layer, (nn.Linear, Conv1D)) and change.module not in stacks:
                what = f"{change.module} ({type(layer).__name__})"
                raise ValueError(f"The adapter changes {what}, and only linear layers and experts can be merged. {INSTEAD}")

    def _wrapped(self, module: str, stacks: list[str]) -> list[str]:
        wanted = self.config.target_parameters or []
        return [leaf for leaf in stacks if any(f".{module}.{leaf}".endswith(f".{name}") for name in wanted)]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that the adapter changes."""
        return list(self._changes)

    def merged(self, parameter: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` of `parameter` with the adapter in it, computed in fp32 by PEFT, in the dtype of `weight`.

        Raises:
            ValueError: if the result is not finite.
        """
        change = self._changes[parameter]
        layer = copy.deepcopy(self._skeleton.get_submodule(change.module))
        layer._parameters.clear()
        layer.register_parameter(change.leaf, nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False))
        root = owner = nn.Module()
        *parents, name = change.module.split(".")
        for parent in parents:
            owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        if isinstance(layer, (nn.Linear, Conv1D)):
            layer.bias = None
        owner.add_module(name, layer)
        config = copy.deepcopy(self.config)
        linear = change.leaf == "weight"
        config.target_modules, config.exclude_modules = re.escape(change.module) if linear else None, None
        config.target_parameters = None if linear else [parameter]
        config.layers_to_transform = config.layers_pattern = None
        with open_tensors(self.path) as file:
            tensors = {name: file.get_tensor(key).float() for name, key in change.tensors.items()}
        inject_adapter_in_model(config, root)
        result = set_peft_model_state_dict(root, tensors)
        if result.unexpected_keys:
            raise ValueError(f"{self.path} holds {result.unexpected_keys[0]!r}, which PEFT does not know for {change.module!r}.")
        adapted = root.get_submodule(change.module)
        adapted.merge(safe_merge=True)
        return getattr(adapted.get_base_layer(), change.leaf).data.to(weight.dtype)


def read_adapter_config(folder: str) -> LoraConfig:
    """The adapter's configuration, if all it does can be merged.

    Raises:
        ValueError: naming the field that cannot be merged.
    """
    path = os.path.join(folder, "adapter_config.json")
    read_json(path)
    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{path} describes {config.peft_type}, and only LoRA can be merged into files. {INSTEAD}")
    refused = {name: getattr(config, name, None) for name in ("modules_to_save", "trainable_token_indices")}
    refused |= {"layer_replication": config.layer_replication, "bias": config.bias if config.bias != "none" else None}
    for name, value in refused.items():
        if value:
            raise ValueError(f"{path} has `{name}={value!r}`, which changes more than the weights of linear layers and experts. {INSTEAD}")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in ("gaussian", "eva", "orthogonal"):
        raise ValueError(
            f"{path} has `init_lora_weights={config.init_lora_weights!r}`, which changed the base before training, so the adapter "
            f"does not fit the base on disk. {INSTEAD}"
        )
    config.inference_mode, config.init_lora_weights, config.lora_dropout = True, True, 0.0
    return config
