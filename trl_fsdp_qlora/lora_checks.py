"""Which adapters a vLLM engine can serve, found out before anything is loaded.

vLLM drops what it does not know without a word, and then serves the bare base model under the adapter's name.
"""

from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from .structure import find_structure

# What vLLM builds its buffers for (`MaxLoRARanks` in vllm/config/lora.py).
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# These initialisations take something out of the base weights, which the engine's checkpoint still holds.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def engine_rank(rank: int) -> int:
    """The smallest rank vLLM builds buffers for that holds an adapter of rank `rank`.

    Raises:
        ValueError: if there is none.
    """
    for allowed in ENGINE_RANKS:
        if allowed >= rank:
            return allowed
    raise ValueError(f"vLLM serves adapters of rank {ENGINE_RANKS[-1]} at most, and this one has {rank}. Lower `lora_r`.")


def largest_rank(config: LoraConfig) -> int:
    return max([config.r, *(config.rank_pattern or {}).values()])


def check_servable(model: nn.Module, config: PeftConfig) -> None:
    """Check that vLLM can serve the adapter that `config` describes on `model`.

    Args:
        model: a base model, which may be on the meta device, or a `PeftModel` that carries the adapter.

    Raises:
        ValueError: naming what cannot be served, and what to write instead.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"vLLM serves LoRA adapters, not {type(config).__name__}. Pass a `LoraConfig`, or `use_vllm=False`.")
    problems = _unservable_fields(config) + _unservable_modules(model, config)
    if problems:
        raise ValueError(f"vLLM cannot serve this adapter: {'; '.join(problems)}. Or write `use_vllm=False`.")
    engine_rank(largest_rank(config))


def _unservable_fields(config: LoraConfig) -> list[str]:
    problems = []
    for name, instead in (
        ("use_dora", "Leave it out: the engine has no place for magnitudes"),
        ("lora_bias", "Leave it out: the engine has no place for biases"),
        ("modules_to_save", "Leave it out: the engine would keep serving the checkpoint's copy"),
        ("trainable_token_indices", "Leave it out: the engine would keep serving the checkpoint's embedding"),
        ("target_parameters", "Adapt linear layers instead: experts held as one parameter have another layout there"),
        ("layer_replication", "Leave it out: the engine has each layer once"),
        ("alora_invocation_tokens", "Leave it out: the engine would apply the adapter to every token"),
    ):
        value = getattr(config, name, None)
        if value:
            problems.append(f"`{name}={value!r}`. {instead}")
    if config.bias != "none":
        problems.append(f"`bias={config.bias!r}`. Write 'none': the engine would keep serving the checkpoint's biases")
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        problems.append(f"`init_lora_weights={init!r}` changes the base, and the engine reads the checkpoint. Write True")
    return problems


def _unservable_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    structure = find_structure(base)
    modules = dict(base.named_modules())
    if isinstance(model, PeftModel):
        adapted = [name for name, module in modules.items() if isinstance(module, BaseTunerLayer)]
    else:
        adapted = [name for name in modules if check_target_module_exists(config, name)]
    kinds: dict[str, list[str]] = {}
    for name in adapted:
        module = modules[name]
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if name == structure.output_head:
            kinds.setdefault("the output head", []).append(name)
        elif isinstance(module, nn.Embedding):
            kinds.setdefault("an embedding", []).append(name)
        elif structure.in_tower(name):
            kinds.setdefault("a tower or connector", []).append(name)
    return [
        f"{len(names)} adapters on {kind}, such as {names[0]!r}. Leave them out of `target_modules`, or write `language_model_only=True`"
        for kind, names in kinds.items()
    ]
