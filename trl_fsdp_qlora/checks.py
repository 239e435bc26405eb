"""What the trainers refuse before a weight is read: places, ranks, adapters and optimizers that cannot work together."""

import os
import tempfile

import torch
import torch.distributed as dist
from peft import PeftConfig
from torch import nn

from .logging import get_logger
from .sharding_request import ShardingRequest
from .structure import find_structure, is_inside
from .targets import is_target, saved_by

logger = get_logger(__name__)

# Kinds of adapters of PEFT that cannot be put on a row of packed bytes.
READ_WEIGHTS = ("LOHA", "LOKR", "HRA")


def check_output_dir(output_dir: str) -> None:
    """Raise `ValueError` now rather than after the first epoch if nothing can be written to `output_dir`."""
    try:
        os.makedirs(output_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise ValueError(f"`output_dir={output_dir!r}` cannot be written: {error.strerror}. Choose another.") from None


def check_ranks(args, request: ShardingRequest) -> None:
    if args.world_size == 1:
        if request.offload_params:
            raise ValueError(
                "`fsdp_offload_params` is set, but there is one rank and nothing to shard. Turn it off: the 4-bit base "
                "stays on the accelerator, per-layer embeddings and towers already live in host memory."
            )
        if request.fsdp:
            logger.info("One rank: the FSDP configuration is read, and nothing needs wrapping.")
    elif request.offload_params and args.device.type != "cpu":
        check_backend(dist.get_backend_config(), args.device.type)
    if getattr(args, "parallelism_config", None) is not None:
        raise ValueError(
            "`parallelism_config` asks for tensor, context or sequence parallelism, which these trainers do not lay "
            "over 4-bit weights. Leave it out; ranks are used for FSDP2 or data parallelism."
        )


def check_backend(backend: str, device_type: str) -> None:
    """Offloaded shards and their norms are reduced in host memory. `backend`: as "cpu:gloo,cuda:nccl"."""
    if "cpu:" not in backend:
        raise ValueError(
            f"Parameters are to be offloaded, and the process group ({backend}) connects {device_type} alone, not host memory. Ask for "
            "it where accelerate opens the group: `fsdp_offload_params: true` in the configuration of `accelerate launch`, instead of "
            "`fsdp` and `fsdp_config`."
        )


def check_device_map(device_map, device: torch.device) -> None:
    """A map may only say what is done anyway: everything on this rank's device."""
    if device_map is None:
        return
    places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
    if {same_device(place, device) for place in places} != {True}:
        raise ValueError(
            f"`device_map={device_map!r}` conflicts with this rank's device. Leave it out: each rank loads onto its own "
            f"device, which here is {{'': {str(device)!r}}}; host memory is chosen by `per_layer_embedding_device` and "
            "`tower_device`."
        )


def same_device(place, device: torch.device) -> bool:
    if place == "auto":
        return False
    try:
        place = torch.device(device.type, place) if isinstance(place, int) else torch.device(place)
    except RuntimeError:
        return False
    return place.type == device.type and (place.index or 0) == (device.index or 0)


def lives_on(model, device: torch.device) -> bool:
    return all(same_device(p.device, device) for p in model.parameters())


def check_dtype(dtype: torch.dtype, args) -> None:
    """Raise `ValueError` if unquantised parts would be of the 16-bit dtype that autocast does not compute in."""
    halves = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    precision = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    if dtype in halves and precision is not None and dtype != precision:
        raise ValueError(
            f"`dtype` is {str(dtype).removeprefix('torch.')}, but `{halves[precision]}=True`: the two 16-bit formats do not "
            f"mix. Leave the dtype out, or set `{halves[dtype]}=True`."
        )


def check_optimizer(args) -> None:
    """Raise `ValueError` for optimizers whose state cannot live on shards."""
    name = str(getattr(args.optim, "value", args.optim))
    if args.world_size > 1 and any(part in name for part in ("8bit", "4bit", "paged", "adafactor", "galore", "apollo", "lomo")):
        raise ValueError(
            f"`optim={name!r}` keeps state that cannot be laid over ranks. Write 'adamw_torch_fused' (on a GPU) or "
            "'adamw_torch': the state of adapters is small, and every rank holds its share of it."
        )


def check_adapter(
    model: nn.Module,
    config: PeftConfig,
    *,
    quantised: set[str],
    on_host: list[str],
    fsdp: bool,
    language_model_only: bool,
) -> None:
    """Refuse PEFT configurations that fail later or without a word.

    Args:
        model: the base model, possibly on the meta device.
        quantised: names of the modules whose weight is (or will be) quantised.
        on_host: names of the modules that live in host memory.
        fsdp: it will be sharded over several ranks.

    Raises:
        ValueError: saying what to write instead.
    """
    structure = find_structure(model)
    if getattr(config, "inference_mode", False):
        raise ValueError("`inference_mode=True` in the PEFT config makes nothing trainable. Leave it out.")
    if getattr(config, "is_prompt_learning", False) and (fsdp or structure.side_embeddings):
        why = "FSDP" if fsdp else "per-layer embeddings, which are looked up by token and not by embedding"
        raise ValueError(f"Prompt learning ({type(config).__name__}) does not work with {why}. Use LoRA.")
    init = getattr(config, "init_lora_weights", True)
    kind, on_quantised = config.peft_type.value, any(is_target(config, name) for name in quantised)
    if kind in READ_WEIGHTS and on_quantised:
        raise ValueError(f"{kind} reads the shape of a weight off the weight, and quantised ones have none. Use LoRA.")
    if on_quantised and isinstance(init, str) and init.split("_")[0] in ("pissa", "corda", "loftq"):
        raise ValueError(
            f"`init_lora_weights={init!r}` takes the base weights apart, which cannot be done to 4-bit ones. Write True, "
            "'gaussian' or 'olora', or set `load_in_4bit=False`."
        )
    if getattr(config, "bias", "none") == "all" and language_model_only:
        raise ValueError(
            "`bias='all'` trains the biases of towers too. Write 'lora_only' or 'none', or set `language_model_only=False`."
        )
    _check_whole_modules(model, config, structure, fsdp)
    _check_saved_modules(model, config, quantised)
    _check_side_embeddings(config, set(structure.side_embeddings) & set(on_host))


def _check_whole_modules(model: nn.Module, config: PeftConfig, structure, fsdp: bool) -> None:
    """`modules_to_save`, trainable tokens and adapters on embeddings, beside tied weights and shards."""
    names = [name for name, _ in model.named_modules()]
    saved = getattr(config, "modules_to_save", None) or []
    unknown = [given for given in saved if not saved_by(given, names)]
    if unknown:
        raise ValueError(f"`modules_to_save` names {', '.join(map(repr, unknown))}, which {type(model).__name__} does not contain.")
    head = model.get_submodule(structure.output_head) if structure.output_head else None
    embedding = model.get_submodule(structure.input_embedding)
    tied = model.config.get_text_config().tie_word_embeddings or getattr(head, "weight", None) is embedding.weight
    tokens = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None)
    if tokens and tied and not (isinstance(tokens, dict) and all(saved_by(name, structure.side_embeddings) for name in tokens)):
        raise ValueError(
            "`trainable_token_indices` does not work with a head that is tied to the embedding: the loss reads the head's "
            "weight as it is. Train without new tokens (a chat template that adds none), or on an untied model."
        )
    special = {structure.input_embedding.rpartition(".")[2], (structure.output_head or "").rpartition(".")[2]}
    targets = getattr(config, "target_modules", None) or ()
    targets = [targets] if isinstance(targets, str) else targets
    on_embeddings = [m for m in saved if m in special] or [t for t in targets if any(part and part in t for part in special)]
    if fsdp and (on_embeddings or tokens):
        raise ValueError(
            f"{', '.join(map(str, on_embeddings)) or 'trainable_token_indices'}: training the embedding or the head does not "
            "work with FSDP. Launch without it (every rank then holds the 4-bit base), or leave them out."
        )


def _check_saved_modules(model: nn.Module, config: PeftConfig, quantised: set[str]) -> None:
    """`modules_to_save` copies modules and trains the copies, which packed weights cannot be."""
    for given in getattr(config, "modules_to_save", None) or []:
        copied = saved_by(given, [name for name, _ in model.named_modules()])
        inside = sorted(name for name in quantised if any(is_inside(name, parent) for parent in copied))
        if inside:
            leaves = sorted({name.rpartition(".")[2] for name in inside})
            raise ValueError(
                f"`modules_to_save` names {given!r}, and {inside[0]!r} in it has quantised weights, which cannot be trained. Give it an "
                f"adapter instead (`target_modules`), or leave it in 16 bit: `llm_int8_skip_modules={leaves!r}` of a `BitsAndBytesConfig`."
            )


def _check_side_embeddings(config: PeftConfig, on_host: set[str]) -> None:
    tokens = getattr(config, "trainable_token_indices", None)
    trained = [*(getattr(config, "modules_to_save", None) or []), *(tokens if isinstance(tokens, dict) else [])]
    for name in sorted(on_host):
        if any(saved_by(given, [name]) for given in trained) or is_target(config, name):
            raise ValueError(
                f"{name!r} is to train, and lives in host memory, from where a batch gets the rows that it needs. Write "
                "`per_layer_embedding_device='accelerator'`, or leave it out."
            )
