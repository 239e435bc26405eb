"""LoRA on experts in 4 bit, as PEFT's `target_parameters` saves and loads it.

PEFT adapts a stack of experts by replacing the parameter with itself plus the product of the factors, at every call: all experts in
16 bit. Over packed experts its wrapper hands the factors to the layer instead, which applies them to the rows of each expert.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig, PeftConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion
from torch import nn

from .experts import PackedExperts, expert_stacks
from .structure import find_structure


def teach_peft() -> None:
    """Let PEFT know packed experts, and exact targets of models with experts, from now on. All else stays as it is."""
    if hasattr(ParamWrapper, "knows_packed_experts"):
        return
    stock = {name: getattr(ParamWrapper, name) for name in ("get_param", "_activate_lora", "merge")}
    convert_config = transformers_weight_conversion._convert_peft_config_moe

    def convert_peft_config_moe(peft_config, model):
        if not _names_modules(peft_config, model):
            convert_config(peft_config, model)

    def get_param(self):
        # PEFT asks for shape, dtype and device.
        base = self.get_base_layer()
        return base.stand_in(self.parameter_name) if isinstance(base, PackedExperts) else stock["get_param"](self)

    @contextmanager
    def activate_lora(self, active_adapters):
        base = self.get_base_layer()
        if not isinstance(base, PackedExperts):
            with stock["_activate_lora"](self, active_adapters):
                yield
            return
        with base.low_rank(self.parameter_name, [self.get_delta_factors(name) for name in active_adapters if name in self.lora_A]):
            yield

    def merge(self, *args, **kwargs):
        if isinstance(self.get_base_layer(), PackedExperts):
            raise ValueError(
                "Adapters cannot be merged into experts in 4 bit. `python -m trl_fsdp_qlora.export` merges them into the 16-bit checkpoint."
            )
        return stock["merge"](self, *args, **kwargs)

    ParamWrapper.get_param, ParamWrapper._activate_lora, ParamWrapper.merge = get_param, activate_lora, merge
    ParamWrapper.knows_packed_experts = True
    transformers_weight_conversion._convert_peft_config_moe = convert_peft_config_moe


def _names_modules(config: LoraConfig, model: nn.Module) -> bool:
    """Whether the targets of `config` are modules of `model`, and none is a projection inside a stack of experts.

    In some families of models PEFT takes `gate_proj`, `up_proj` and `down_proj` for projections of the experts, wherever they are.
    It is for adapters from the time when each expert was a module, and drops the adapters of shared experts and dense layers.
    """
    names = {name for name, _ in model.named_modules()}
    if not isinstance(config.target_modules, str):
        return bool(config.target_modules) and set(config.target_modules) <= names
    inside = [f"{experts}.{leaf}" for experts in expert_stacks(model) for leaf in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")]
    matches = re.compile(config.target_modules).fullmatch
    return any(map(matches, names)) and not any(map(matches, inside))


@contextmanager
def patterns_of_parameters(config: PeftConfig | None) -> Iterator[None]:
    """PEFT honours patterns of ranks and alphas for `target_parameters`, and warns that it ignores them: it looks for modules alone."""
    parameters = getattr(config, "target_parameters", None) or []
    with warnings.catch_warnings():
        for patterns in (getattr(config, "rank_pattern", None), getattr(config, "alpha_pattern", None)):
            keys = sorted(set(patterns or {}) & set(parameters))
            if keys:
                said = "The following (rank|alpha)_pattern keys did not match any targeted module and were ignored: "
                warnings.filterwarnings("ignore", said + re.escape(str(keys)), RuntimeWarning)
        yield


def add_expert_targets(config: LoraConfig, model: nn.Module, rank: int) -> None:
    """Let `config` adapt every stack of experts of the language model with `rank`, at the scale of the other adapters.

    Raises:
        ValueError: if there are no experts, or the config asks for what PEFT cannot do to a parameter.
    """
    structure = find_structure(model)
    stacks = {name: leaves for name, leaves in expert_stacks(model).items() if structure.in_language_model(name)}
    if not stacks:
        raise ValueError(f"`lora_experts_r={rank}`, but {type(model).__name__} has no experts in stacks that adapters go on. Leave it out.")
    names = sorted({f"{name.rpartition('.')[2]}.{leaf}" for name, leaves in stacks.items() for leaf in leaves})
    config.target_parameters = sorted({*(config.target_parameters or []), *names})
    scale = config.lora_alpha / config.r
    config.rank_pattern = {**config.rank_pattern, **dict.fromkeys(names, rank)}
    config.alpha_pattern = {**config.alpha_pattern, **dict.fromkeys(names, scale * rank)}


def check_expert_targets(config: LoraConfig, model: nn.Module) -> None:
    """Raise `ValueError` for `target_parameters` that PEFT cannot adapt, or would leave out without a word."""
    names = getattr(config, "target_parameters", None)
    if not names:
        return
    refused = {"lora_dropout": config.lora_dropout, "use_dora": config.use_dora, "lora_bias": config.lora_bias}
    for field, value in refused.items():
        if value:
            raise ValueError(f"`{field}={value!r}` does not work for adapters on experts. Leave it out, or adapt only modules.")
    known = [name for name, _ in model.named_parameters()]
    missing = [name for name in names if not any(p == name or p.endswith(f".{name}") for p in known)]
    if missing:
        stacks = sorted({f"{name.rpartition('.')[2]}.{leaf}" for name, leaves in expert_stacks(model).items() for leaf in leaves})
        raise ValueError(
            f"`target_parameters` names {', '.join(map(repr, missing))}, and {type(model).__name__} has no such parameter. "
            f"Its stacks of experts are: {', '.join(stacks) or 'none'}."
        )
