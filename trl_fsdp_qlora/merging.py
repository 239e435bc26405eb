"""Merge a LoRA adapter into the weights of a checkpoint on disk, one tensor in memory at a time.

The files keep their layout: names, order, dtypes and shapes stay, so a merged shard has the head of its source, byte for
byte, and every tensor the adapter does not touch is copied as bytes.
"""

import copy
import os
from functools import lru_cache, partial

import torch
from peft import PeftModel
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer, BitsAndBytesConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key, revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from .adapter_files import INSTEAD, Adapter
from .drift import Drift, measure_drift
from .expert_loading import packable_stacks
from .experts import dequantize_experts, quantize_stack
from .loading import _with_skipped_modules, inspect_checkpoint, load_model
from .provenance import has_tokenizer
from .raw_tensors import Entry, merge_file, read_head, read_tensor, weight_files

MODES = ("original", "dequantized")

# A tensor on disk: the file, and where in it.
Place = tuple[str, Entry]


class Sources:
    """Where on disk each parameter of a model comes from, by the rules with which `from_pretrained` renames and joins tensors."""

    def __init__(self, skeleton: nn.Module, folder: str):
        self.skeleton = skeleton
        transforms = get_model_conversion_mapping(skeleton)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known = skeleton.state_dict()
        # Of a parameter that is one tensor on disk: its place. Of one that is joined from several: pattern and place of each.
        self.single: dict[str, Place] = {}
        self.joined: dict[str, dict[str, tuple[str, Place]]] = {}
        for file in weight_files(folder):
            path = os.path.join(folder, file)
            for entry in read_head(path)[1]:
                name, pattern = rename_source_key(entry.name, renamings, converters, skeleton.base_model_prefix, known)
                if name not in known and entry.name in known:
                    name, pattern = entry.name, None
                if name not in known:
                    continue
                if pattern is None:
                    self.single[name] = (path, entry)
                else:
                    self.joined.setdefault(name, {})[entry.name] = (pattern, (path, entry))

    def __contains__(self, parameter: str) -> bool:
        return parameter in self.single or parameter in self.joined

    def tensors_of(self, parameter: str) -> list[str]:
        """Names on disk of the tensors that make up `parameter`."""
        return [self.single[parameter][1].name] if parameter in self.single else list(self.joined[parameter])

    def read(self, parameter: str) -> torch.Tensor:
        if parameter in self.single:
            return _read(self.single[parameter])
        parts = self.joined[parameter]
        converter = copy.deepcopy(self._converters[next(iter(parts.values()))[0]])
        for name in sorted(parts, key=dot_natural_key):
            pattern, place = parts[name]
            converter.add_tensor(parameter, name, pattern, _read(place))
        value = converter.convert(parameter, model=self.skeleton, config=self.skeleton.config)[parameter]
        return value[0] if isinstance(value, list) else value

    def split(self, parameter: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """`value` of `parameter` as the tensors that are on disk for it, by their names there."""
        if parameter in self.single:
            return {self.single[parameter][1].name: value}
        return revert_weight_conversion(self.skeleton, {parameter: value})


def _read(place: Place) -> torch.Tensor:
    path, entry = place
    with open(path, "rb") as file:
        return read_tensor(file, entry)


class MergedWeights:
    """The merged value of every parameter, made when it is asked for.

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
        self.quantised = _quantised_parameters(self.checkpoint.skeleton, self.quantization)
        self.sources = Sources(self.checkpoint.skeleton, folder)
        self._refuse_lost_and_tied()
        # Tensors of two stacks of experts may alternate in a file.
        self._tensors_of = lru_cache(maxsize=2)(self._tensors_of)

    def _refuse_lost_and_tied(self) -> None:
        skeleton = self.checkpoint.skeleton
        skeleton.tie_weights()
        owners: dict[int, list[str]] = {}
        for name, parameter in skeleton.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
        for name in self.adapter.parameters:
            shared = owners[id(skeleton.get_parameter(name))]
            if len(shared) > 1:
                raise ValueError(
                    f"The adapter changes {name!r}, which is tied ({', '.join(shared)}) and would change there too. {INSTEAD}"
                )
        for name in [*self.adapter.parameters, *sorted(self.quantised)]:
            if name not in self.sources:
                raise ValueError(f"{name!r} is no tensor of its own in {self.folder}, so it cannot be replaced there. {INSTEAD}")

    def changed(self, mode: str) -> set[str]:
        """Names of the parameters that are not the base's."""
        return set(self.adapter.parameters) | (self.quantised if mode == "dequantized" else set())

    def weight(self, parameter: str, mode: str) -> torch.Tensor:
        weight = self.sources.read(parameter)
        if mode == "dequantized" and parameter in self.quantised:
            weight = round_to_4bit(weight, self.quantization, self.dtype)
        return self.adapter.merged(parameter, weight) if parameter in self.adapter.parameters else weight

    def _tensors_of(self, parameter: str, mode: str) -> dict[str, torch.Tensor]:
        return self.sources.split(parameter, self.weight(parameter, mode))

    def write(self, output: str, mode: str) -> None:
        """Write the files of the base with the merged weights in them."""
        files = weight_files(self.folder)
        merged = {
            name: partial(self._tensor, name, parameter, mode)
            for parameter in self.changed(mode)
            for name in self.sources.tensors_of(parameter)
        }
        total = sum(os.path.getsize(os.path.join(self.folder, file)) for file in files)
        with tqdm(total=total, unit="B", unit_scale=True, desc=f"Merging into {mode} weights") as bar:
            for file in files:
                for written in merge_file(os.path.join(self.folder, file), os.path.join(output, file), merged):
                    bar.update(written)

    def _tensor(self, name: str, parameter: str, mode: str) -> torch.Tensor:
        return self._tensors_of(parameter, mode)[name]

    def measure(self, texts: tuple[str, ...]) -> dict[str, Drift]:
        """How far each merge is from the unmerged model, on `texts`."""
        model = load_model(self.checkpoint, quantization_config=copy.deepcopy(self.quantization), dtype=self.dtype)
        model = PeftModel.from_pretrained(model, self.adapter_folder).eval()
        modes = MODES if self.quantization is not None else MODES[:1]
        source = self.adapter_folder if has_tokenizer(self.adapter_folder) else self.folder
        weights = {mode: partial(self.weight, mode=mode) for mode in modes}
        parameters = set(self.adapter.parameters) | self.quantised
        return measure_drift(model, AutoTokenizer.from_pretrained(source), parameters, weights, texts)


def round_to_4bit(weight: torch.Tensor, quantization: BitsAndBytesConfig, dtype: torch.dtype) -> torch.Tensor:
    """What a 4-bit layer multiplies with: `weight` quantised as it is while loading, and back; in the dtype of `weight`.

    Args:
        weight: (rows, columns) of a layer, or (experts, rows, columns) of a stack of experts.
    """
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    quant_type, double_quant = quantization.bnb_4bit_quant_type, quantization.bnb_4bit_use_double_quant
    if weight.ndim == 3:
        packed, state = quantize_stack(weight.to(dtype), quant_type=quant_type, double_quant=double_quant, storage=torch.uint8)
        return dequantize_experts(packed, state).to(weight.dtype)
    packed = Params4bit(weight.to(dtype), requires_grad=False, compress_statistics=double_quant, quant_type=quant_type).to("cpu")
    return dequantize_4bit(packed.data, packed.quant_state).to(weight.dtype)


def _quantised_parameters(skeleton: nn.Module, quantization: BitsAndBytesConfig | None) -> set[str]:
    """Names of the parameters that are quantised while loading, by transformers' own rule and by ours for experts."""
    from bitsandbytes.nn import Linear4bit
    from transformers.integrations import replace_with_bnb_linear

    if quantization is None:
        return set()
    model = copy.deepcopy(skeleton)
    replace_with_bnb_linear(model, quantization.llm_int8_skip_modules, quantization)
    names = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    if any(isinstance(skeleton.get_submodule(name), Conv1D) for name in names):
        raise ValueError(f"{type(skeleton).__name__} has quantised Conv1D layers, which no merge is written for. Write `mode='original'`.")
    return {f"{name}.weight" for name in names} | packable_stacks(skeleton, quantization.llm_int8_skip_modules)
