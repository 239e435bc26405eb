"""Merge a LoRA adapter into the weights of a checkpoint on disk, one tensor in memory at a time.

The files keep their layout: names, order, dtypes and shapes stay, so a merged shard has the head of its source, byte for
byte, and every tensor the adapter does not touch is copied as bytes. PEFT does the arithmetic, on one layer at a time.
"""

import copy
import os
import re
from functools import partial

import torch
from peft import LoraConfig, PeftConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer, BitsAndBytesConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from .drift import Drift, measure_drift
from .loading import _with_skipped_modules, inspect_checkpoint, load_model
from .provenance import has_tokenizer, read_json
from .raw_tensors import merge_file, read_head, read_tensor, weight_files
from .training_state import ADAPTER_FILE, open_tensors

MODES = ("original", "dequantized")
PREFIX = "base_model.model."
_INSTEAD = "Load the adapter with `peft.PeftModel.from_pretrained` and call `merge_and_unload` instead."


class Adapter:
    """A LoRA adapter on disk, applied to one weight at a time.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        skeleton: the base model on the meta device.

    Raises:
        ValueError: for an adapter that is no LoRA, or changes more than the weights of single layers.
    """

    def __init__(self, folder: str, skeleton: nn.Module):
        self.folder = folder
        self.config = read_adapter_config(folder)
        self.path = os.path.join(folder, ADAPTER_FILE)
        self._tensors: dict[str, dict[str, str]] = {}
        names = set(dict(skeleton.named_modules()))
        with open_tensors(self.path) as file:
            for key in file.keys():
                module, _, tensor = key.removeprefix(PREFIX).partition(".lora_")
                if not tensor or module not in names:
                    raise ValueError(
                        f"{self.path} holds {key!r}, which is no LoRA tensor of a module of {type(skeleton).__name__}. Write the "
                        "base model that the adapter was trained on as `base`."
                    )
                self._tensors.setdefault(module, {})[key.removeprefix(PREFIX)] = key
        self._modules = {name: skeleton.get_submodule(name) for name in self._tensors}
        odd = [f"{name} ({type(m).__name__})" for name, m in self._modules.items() if not isinstance(m, (nn.Linear, Conv1D))]
        if odd:
            raise ValueError(
                f"The adapter changes {odd[0]}, and only linear layers can be merged. {_INSTEAD}"
            )

    @property
    def modules(self) -> list[str]:
        return list(self._modules)

    def merged(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` of `module` with the adapter in it, computed in fp32 by PEFT, in the dtype of `weight`.

        Raises:
            ValueError: if the result is not finite.
        """
        root, layer = nn.Module(), copy.deepcopy(self._modules[module])
        layer._parameters.clear()
        layer.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        layer.bias = None
        *parents, leaf = module.split(".")
        owner = root
        for name in parents:
            owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(leaf, layer)
        config = copy.deepcopy(self.config)
        config.target_modules, config.exclude_modules = re.escape(module), None
        config.layers_to_transform = config.layers_pattern = None
        with open_tensors(self.path) as file:
            tensors = {name: file.get_tensor(key).float() for name, key in self._tensors[module].items()}
        inject_adapter_in_model(config, root)
        result = set_peft_model_state_dict(root, tensors)
        if result.unexpected_keys:
            raise ValueError(f"{self.path} holds {result.unexpected_keys[0]!r}, which PEFT does not know for {module!r}.")
        adapted = root.get_submodule(module)
        adapted.merge(safe_merge=True)
        return adapted.get_base_layer().weight.data.to(weight.dtype)


def read_adapter_config(folder: str) -> LoraConfig:
    """The adapter's configuration, if all it does can be merged.

    Raises:
        ValueError: naming the field that cannot be merged.
    """
    path = os.path.join(folder, "adapter_config.json")
    read_json(path)
    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{path} describes {config.peft_type}, and only LoRA can be merged into files. {_INSTEAD}")
    refused = {name: getattr(config, name, None) for name in ("modules_to_save", "trainable_token_indices", "target_parameters")}
    refused |= {"layer_replication": config.layer_replication, "bias": config.bias if config.bias != "none" else None}
    for name, value in refused.items():
        if value:
            raise ValueError(f"{path} has `{name}={value!r}`, which changes more than the weights of linear layers. {_INSTEAD}")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in ("gaussian", "eva", "orthogonal"):
        raise ValueError(
            f"{path} has `init_lora_weights={config.init_lora_weights!r}`, which changed the base before training, so the adapter "
            f"does not fit the base on disk. {_INSTEAD}"
        )
    config.inference_mode, config.init_lora_weights, config.lora_dropout = True, True, 0.0
    return config


def parameter_names(skeleton: nn.Module, folder: str) -> dict[str, str | None]:
    """For every tensor of the checkpoint, the parameter it becomes by renaming alone, or `None`.

    The names on disk need not be those of the modules: `from_pretrained` renames them, and its own rules are used.
    """
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known = skeleton.state_dict()
    names: dict[str, str | None] = {}
    for file in weight_files(folder):
        for entry in read_head(os.path.join(folder, file))[1]:
            name, converted = rename_source_key(entry.name, renamings, converters, skeleton.base_model_prefix, known)
            if name not in known and entry.name in known:
                name, converted = entry.name, None
            names[entry.name] = name if converted is None and name in known else None
    return names


class MergedWeights:
    """The merged weight of every module, made when it is asked for.

    Args:
        folder: the 16-bit base.
        adapter: folder of the adapter.
        quantization: how the base was quantised in training, or `None`.
        dtype: of the base in training, before it was quantised.
    """

    def __init__(self, folder: str, adapter: str, quantization: BitsAndBytesConfig | None, dtype: torch.dtype):
        self.folder, self.adapter_folder, self.dtype = folder, adapter, dtype
        self.checkpoint = inspect_checkpoint(folder)
        self.quantization = quantization and _with_skipped_modules(quantization, self.checkpoint.structure)
        if getattr(self.checkpoint.config, "quantization_config", None) is not None:
            raise ValueError(f"{folder} is itself quantised. Write the 16-bit checkpoint that it was made from as `base`.")
        self.adapter = Adapter(adapter, self.checkpoint.skeleton)
        self.quantised = _quantised_modules(self.checkpoint.skeleton, self.quantization)
        names = parameter_names(self.checkpoint.skeleton, folder)
        self._places = {}  # of a module's weight: file, entry
        for file in weight_files(folder):
            path = os.path.join(folder, file)
            for entry in read_head(path)[1]:
                module, _, leaf = (names[entry.name] or "").rpartition(".")
                if leaf == "weight":
                    self._places[module] = (path, entry)
        self._refuse_lost_and_tied()

    def _refuse_lost_and_tied(self) -> None:
        skeleton = self.checkpoint.skeleton
        skeleton.tie_weights()
        owners: dict[int, list[str]] = {}
        for name, parameter in skeleton.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
        for module in self.adapter.modules:
            shared = owners[id(skeleton.get_submodule(module).weight)]
            if len(shared) > 1:
                raise ValueError(
                    f"The adapter changes {module!r}, whose weight is tied ({', '.join(shared)}) and would change there too. {_INSTEAD}"
                )
        for module in [*self.adapter.modules, *sorted(self.quantised)]:
            if module not in self._places:
                raise ValueError(
                    f"The weight of {module!r} is no tensor of its own in {self.folder}, so it cannot be replaced there. {_INSTEAD}"
                )

    def changed(self, mode: str) -> set[str]:
        """Names of the modules whose weight is not the base's."""
        return set(self.adapter.modules) | (self.quantised if mode == "dequantized" else set())

    def weight(self, module: str, mode: str) -> torch.Tensor:
        path, entry = self._places[module]
        with open(path, "rb") as file:
            weight = read_tensor(file, entry)
        if mode == "dequantized" and module in self.quantised:
            weight = round_to_4bit(weight, self.quantization, self.dtype)
        return self.adapter.merged(module, weight) if module in self.adapter.modules else weight

    def write(self, output: str, mode: str) -> None:
        """Write the files of the base with the merged weights in them."""
        files = weight_files(self.folder)
        modules = {entry.name: module for module, (_, entry) in self._places.items() if module in self.changed(mode)}
        total = sum(os.path.getsize(os.path.join(self.folder, file)) for file in files)
        with tqdm(total=total, unit="B", unit_scale=True, desc=f"Merging into {mode} weights") as bar:
            for file in files:
                merged = {name: partial(self.weight, module, mode) for name, module in modules.items()}
                for written in merge_file(os.path.join(self.folder, file), os.path.join(output, file), merged):
                    bar.update(written)

    def measure(self, texts: tuple[str, ...]) -> dict[str, Drift]:
        """How far each merge is from the unmerged model, on `texts`."""
        model = load_model(self.checkpoint, quantization_config=copy.deepcopy(self.quantization), dtype=self.dtype)
        model = PeftModel.from_pretrained(model, self.adapter_folder).eval()
        modes = MODES if self.quantization is not None else MODES[:1]
        modules = set(self.adapter.modules) | self.quantised
        source = self.adapter_folder if has_tokenizer(self.adapter_folder) else self.folder
        weights = {mode: partial(self.weight, mode=mode) for mode in modes}
        return measure_drift(model, AutoTokenizer.from_pretrained(source), modules, weights, texts)


def round_to_4bit(weight: torch.Tensor, quantization: BitsAndBytesConfig, dtype: torch.dtype) -> torch.Tensor:
    """What a 4-bit layer multiplies with: `weight` quantised as `from_pretrained` does, and back; in the dtype of `weight`."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    packed = Params4bit(
        weight.to(dtype),
        requires_grad=False,
        compress_statistics=quantization.bnb_4bit_use_double_quant,
        quant_type=quantization.bnb_4bit_quant_type,
    ).to("cpu")
    return dequantize_4bit(packed.data, packed.quant_state).to(weight.dtype)


def _quantised_modules(skeleton: nn.Module, quantization: BitsAndBytesConfig | None) -> set[str]:
    """Names of the layers that `from_pretrained` quantises, by transformers' own rule."""
    from bitsandbytes.nn import Linear4bit
    from transformers.integrations import replace_with_bnb_linear

    if quantization is None:
        return set()
    model = copy.deepcopy(skeleton)
    replace_with_bnb_linear(model, quantization.llm_int8_skip_modules, quantization)
    names = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    if any(isinstance(skeleton.get_submodule(name), Conv1D) for name in names):
        raise ValueError(f"{type(skeleton).__name__} has quantised Conv1D layers, which no merge is written for. Write `mode='original'`.")
    return names
