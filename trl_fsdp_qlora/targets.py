"""Which modules get an adapter: any target specification of PEFT is turned into the exact modules before PEFT sees it.

Works on the meta device, where no weight exists.
"""

import copy
import difflib
import re
from collections.abc import Iterable

from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D

from .logging import get_logger
from .structure import LINEAR, find_structure, is_inside

logger = get_logger(__name__)

ADAPTABLE = (nn.Linear, Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def resolve_lora_targets(
    model: nn.Module,
    target_modules: list[str] | str,
    exclude_modules: list[str] | str | None = None,
    *,
    language_model_only: bool = True,
    config: PeftConfig | None = None,
) -> list[str]:
    """The exact names of the modules that will get an adapter, in model order.

    Matching is PEFT's own (`check_target_module_exists`), so `"all-linear"`, lists, regular expressions,
    `layers_to_transform` and `modules_to_save` mean what PEFT documents. Three things are added: towers, connectors and
    the head are left out unless `language_model_only=False`; `"all-linear"` leaves routers and indexers alone; the name of
    a wrapper around a linear layer (Gemma 4's clippable linear layers) stands for the linear layer inside, which is what
    PEFT can adapt.

    Args:
        config: the PEFT config whose other matching fields count; by default a plain LoRA config.

    Raises:
        ValueError: if nothing is left to adapt.
    """
    structure = find_structure(model)
    adaptable = {name: module for name, module in model.named_modules() if isinstance(module, ADAPTABLE)}
    linear = [
        name
        for name, module in adaptable.items()
        if isinstance(module, LINEAR)
        and name != structure.output_head
        and not any(is_inside(name, chooser) for chooser in (*structure.routers, *structure.indexers))
    ]
    everything = isinstance(target_modules, str) and target_modules.lower() == "all-linear"
    excludes = _as_peft_wants("exclude_modules", exclude_modules) or None
    targets = set(linear) if everything else _as_peft_wants("target_modules", target_modules)
    wanted_by = _matcher(config, target_modules=targets, exclude_modules=excludes)
    allowed_by = _matcher(config, target_modules=r".*", exclude_modules=excludes)

    # A wrapper's name stands for the linear layer it wraps, in targets and in exclusions.
    def excluded(name: str) -> bool:
        return not all(check_target_module_exists(allowed_by, alias) for alias in _aliases(model, name))

    def matches(name: str) -> bool:
        return any(check_target_module_exists(wanted_by, alias) for alias in _aliases(model, name))

    wanted = [name for name in (linear if everything else adaptable) if matches(name) and not excluded(name)]
    if exclude_modules and not any(excluded(name) for name in adaptable):
        logger.warning("`lora_exclude_modules=%r` matches no module, so it excludes nothing.", exclude_modules)
    if wanted and isinstance(target_modules, (list, tuple, set)):
        for target in sorted(target_modules):
            if not any(alias == target or alias.endswith(f".{target}") for name in adaptable for alias in _aliases(model, name)):
                logger.warning("%r of `lora_target_modules` matches no module, so it adapts nothing.", target)
    if not language_model_only:
        if not wanted:
            raise ValueError(_nothing_matched(target_modules, exclude_modules, linear))
        return wanted
    chosen = [name for name in wanted if structure.in_language_model(name)]
    if not chosen:
        raise ValueError(
            _nothing_matched(target_modules, exclude_modules, [n for n in linear if structure.in_language_model(n)])
            + (
                f" {len(wanted)} modules outside the language model match, such as {wanted[0]!r}: "
                "write `language_model_only=False` to adapt those."
                if wanted
                else ""
            )
        )

    # Layers of towers that go by a name of the language model too are left out as documented; a target with no other is said.
    def stands_for(target: str, names: list[str]) -> bool:
        return any(f".{alias}".endswith(f".{target}") for name in names for alias in _aliases(model, name))

    asked = [structure.output_head] if isinstance(target_modules, str) else target_modules
    left_out = [target for target in asked if target and stands_for(target, wanted) and not stands_for(target, chosen)]
    if left_out:
        logger.warning(
            "Left out of the targets: %s. `language_model_only=True` keeps adapters off towers, connectors and the output "
            "head (whose weight the loss reads as it is).",
            ", ".join(map(repr, left_out)),
        )
    return chosen


def _matcher(config: PeftConfig | None, **fields) -> PeftConfig:
    matcher = copy.copy(config) if config is not None else LoraConfig()
    for name, value in fields.items():
        setattr(matcher, name, value)
    return matcher


def _aliases(model: nn.Module, name: str) -> list[str]:
    """`name`, and the name of a module that does nothing but wrap it (one child, no parameters of its own)."""
    parent_name = name.rpartition(".")[0]
    if not parent_name:
        return [name]
    parent = model.get_submodule(parent_name)
    wraps_only_this = len(list(parent.children())) == 1 and not isinstance(parent, (nn.ModuleList, nn.Sequential))
    return [name, parent_name] if wraps_only_this else [name]


def _as_peft_wants(field: str, modules):
    if isinstance(modules, (list, tuple, set)):
        return set(modules)
    try:
        re.compile(modules or "")
    except re.error as error:
        raise ValueError(f"`{field}={modules!r}` is no regular expression ({error}). Write one that is, or a list of names.") from None
    return modules


def _nothing_matched(target_modules, exclude_modules, linear: list[str]) -> str:
    leaves = sorted({name.rpartition(".")[2] for name in linear})
    asked = [target_modules] if isinstance(target_modules, str) else sorted(target_modules)
    nearest = sorted({near for name in asked for near in difflib.get_close_matches(name, leaves, n=3, cutoff=0.4)})
    plain = isinstance(target_modules, str) and re.fullmatch(r"[\w.]+", target_modules) is not None
    hint = f" A string is a regular expression for whole names: write [{target_modules!r}] to match their ends." if plain else ""
    return (
        f"No module to adapt: `target_modules={target_modules!r}` with `exclude_modules={exclude_modules or None!r}` "
        f"matches none of the {len(linear)} linear layers of the language model. "
        f"Nearest names: {', '.join(nearest or leaves[:12]) or 'none'}. Write 'all-linear' for all of them.{hint}"
    )


def as_regex(chosen: list[str], all_names: Iterable[str]) -> str | list[str]:
    """A regular expression that matches exactly `chosen` among `all_names`, or `chosen` itself if none is short.

    A regular expression survives in `adapter_config.json` as one readable line. A list would be shortened by PEFT to
    suffixes, which may match more in another model class.
    """
    forms = sorted({re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(name)) for name in chosen})
    common = _common_prefix(forms)
    pattern = f"{common}(?:{'|'.join(form[len(common) :] for form in forms)})" if len(forms) > 1 else forms[0]
    if {name for name in all_names if re.fullmatch(pattern, name)} == set(chosen):
        return pattern
    return chosen


def _common_prefix(forms: list[str]) -> str:
    """The longest common prefix that ends at an (escaped) dot."""
    first, last = min(forms), max(forms)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[: first.rfind(r"\.", 0, length) + 2] if r"\." in first[:length] else ""


def resolve_peft_config(model: nn.Module, config: PeftConfig, *, language_model_only: bool = True) -> PeftConfig:
    """A copy of `config` whose targets are exact. Configs without `target_modules` (prompt tuning) are returned as is.

    Raises:
        ValueError: see `resolve_lora_targets`.
    """
    if not hasattr(config, "target_modules") or config.peft_type == PeftType.TRAINABLE_TOKENS:
        return config
    config = copy.deepcopy(config)
    if language_model_only and getattr(config, "modules_to_save", None):
        config.modules_to_save = _saved_outside_towers(model, config.modules_to_save)
    if not config.target_modules and getattr(config, "target_parameters", None):
        return config
    targets = config.target_modules if config.target_modules is not None else "all-linear"
    targets = sorted(targets) if isinstance(targets, set) else targets
    excludes = getattr(config, "exclude_modules", None)
    excludes = sorted(excludes) if isinstance(excludes, set) else excludes
    if not targets:
        raise ValueError("`target_modules` is empty, so nothing would be trained: write 'all-linear' or module names.")
    chosen = resolve_lora_targets(
        model, targets, excludes, language_model_only=language_model_only, config=config
    )
    config.target_modules = as_regex(chosen, [name for name, _ in model.named_modules()])
    config.exclude_modules = None
    if getattr(config, "layers_to_transform", None) is not None:
        config.layers_to_transform = config.layers_pattern = None
    logger.info("Adapters on %d modules: %s", len(chosen), config.target_modules)
    return config


def saved_by(given: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that an entry of `modules_to_save` means to PEFT."""
    return [name for name in names if name.endswith(given)]


def is_target(config: PeftConfig, name: str) -> bool:
    """Whether an adapter of `config` goes on the module `name`."""
    return bool(getattr(config, "target_modules", None)) and bool(check_target_module_exists(config, name))


def _saved_outside_towers(model: nn.Module, saved: list[str]) -> list[str]:
    """`modules_to_save`, where a name that towers have too stands for the modules that are not in them."""
    structure, kept = find_structure(model), []
    for given in saved:
        names = saved_by(given, [name for name, _ in model.named_modules()])
        outside = [name for name in names if not structure.in_tower(name)]
        if names and not outside:
            raise ValueError(
                f"`modules_to_save` names {given!r}, which is in towers and connectors alone, such as {names[0]!r}. Leave it out, or "
                "write `language_model_only=False`."
            )
        kept += [given] if outside == names else outside
    return list(dict.fromkeys(kept))
