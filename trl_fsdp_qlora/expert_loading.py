"""Stacks of experts are quantised while a checkpoint streams in, by transformers' own 4-bit quantiser with one more case."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import auto
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from .experts import BLOCKSIZE, expert_stacks, pack_class, quantize_stack, stacks_of
from .logging import get_logger
from .structure import ModelStructure, is_inside

logger = get_logger(__name__)

# Stacks of experts below this are not worth a warning.
WARN_BYTES = 2**20


def packable_stacks(model: nn.Module, skipped: list[str]) -> set[str]:
    """Names of the parameters that are stacks of experts and will be quantised; `skipped` are modules that will not."""
    return {
        f"{name}.{leaf}"
        for name, leaves in expert_stacks(model).items()
        if not any(is_inside(name, skip) for skip in skipped) and not _blocks_cross_experts(model.get_submodule(name))
        for leaf in leaves
    }


def warn_of_16_bit_experts(skeleton: nn.Module, structure: ModelStructure, skipped: list[str]) -> None:
    """Say how many bytes of experts stay in 16 bit, and why, before a model is called a 4-bit one."""
    packable = expert_stacks(skeleton)
    for name, module in skeleton.named_modules():
        may_hold_experts = is_inside(name, structure.layers) and not isinstance(module, nn.modules.conv._ConvNd)
        stacks = stacks_of(module) if may_hold_experts else []
        size = 2 * sum(module._parameters[leaf].numel() for leaf in stacks)
        if name not in packable:
            why = f"{type(module).__name__} does not take transformers' experts interface"
        elif any(is_inside(name, skip) for skip in skipped):
            why = "they are in `llm_int8_skip_modules`"
        elif _blocks_cross_experts(module):
            why = f"an expert's size is no multiple of {BLOCKSIZE}"
        else:
            continue
        if size >= WARN_BYTES:
            logger.warning("%s keeps %.1f MiB of experts (%s) in 16 bit: %s.", name, size / 2**20, ", ".join(stacks), why)


def _blocks_cross_experts(module: nn.Module) -> bool:
    return any(module._parameters[leaf][0].numel() % BLOCKSIZE for leaf in stacks_of(module))


class ExpertsBnb4BitHfQuantizer(Bnb4BitHfQuantizer):
    """transformers' quantiser, which also quantises stacks of experts as they are read."""

    stacks: set[str] = set()

    def _process_model_before_weight_loading(self, model, device_map, **kwargs):
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        self.stacks = packable_stacks(model, self.modules_to_not_convert)

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        return param_name in self.stacks or super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self):
        return _QuantizeStacks(self, super().get_quantize_ops())


class _QuantizeStacks(ConversionOps):
    def __init__(self, quantizer: ExpertsBnb4BitHfQuantizer, others: ConversionOps):
        self.quantizer, self.others = quantizer, others

    def convert(self, input_dict, model=None, **kwargs):
        stacks = {name: value for name, value in input_dict.items() if name in self.quantizer.stacks}
        if not stacks:
            return self.others.convert(input_dict, model=model, **kwargs)
        config, result = self.quantizer.quantization_config, {}
        for name, value in stacks.items():
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            pack_class(module)
            packed, module.stack_states[leaf] = quantize_stack(
                value[0] if isinstance(value, list) else value,
                quant_type=config.bnb_4bit_quant_type,
                double_quant=config.bnb_4bit_use_double_quant,
                storage=config.bnb_4bit_quant_storage,
            )
            result[name] = nn.Parameter(packed, requires_grad=False)
        return result


@contextmanager
def quantising_experts() -> Iterator[None]:
    """While a checkpoint loads, let transformers' 4-bit quantiser quantise stacks of experts too."""
    stock = auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
    auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = ExpertsBnb4BitHfQuantizer
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = stock
