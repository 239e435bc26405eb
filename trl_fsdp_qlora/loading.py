"""From a checkpoint name to a 4-bit model with each part on its device.

Built on `from_pretrained`: its key renames, its quantiser and its streaming (one tensor is read, quantised and
released before the next) are used as they are. Added here: what is quantised, where each part goes, which attention
each sub-model gets, and errors that name the file.
"""

import copy
import glob
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from .attention import attention_for
from .expert_adapters import teach_peft
from .expert_loading import packable_stacks, quantising_experts, warn_of_16_bit_experts
from .logging import get_logger
from .packed import quant_state_of
from .placement import attach_host_modules, choose_host_modules
from .streaming import ShardOf, keeping_own_shards
from .structure import LINEAR, ModelStructure, find_structure

logger = get_logger(__name__)

@dataclass(frozen=True)
class Checkpoint:
    """What can be known of a checkpoint without reading a weight.

    Attributes:
        name: folder or model id.
        config: its configuration.
        architecture: the transformers class that loads it.
        skeleton: the model on the meta device.
        structure: names of its parts.
    """

    name: str
    config: PretrainedConfig
    architecture: type[PreTrainedModel]
    skeleton: nn.Module
    structure: ModelStructure


def inspect_checkpoint(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """Read the configuration of `name` and lay the model out on the meta device.

    Raises:
        ValueError: if there is no such checkpoint, or it holds no causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if os.path.isfile(os.path.join(name, "adapter_config.json")):
            raise ValueError(
                f"{name!r} is an adapter, not a model. To go on training it, write its base model in its place, and pass the "
                "`PeftModel` of `PeftModel.from_pretrained(base, folder, is_trainable=True)`; to train upon it, merge it first "
                "(`export`)."
            ) from None
        what = "folder has no usable config.json" if os.path.isdir(name) else "is neither a folder nor a known model"
        raise ValueError(
            f"Model {name!r} {what}. Write the path of a folder with config.json and safetensors files, or a model id "
            f"of the Hugging Face hub. The loader said: {str(error).splitlines()[0]}"
        ) from None
    architecture = getattr(transformers, (config.architectures or [""])[0], None) or AutoModelForCausalLM
    with torch.device("meta"), _no_weight_init():
        if architecture is AutoModelForCausalLM:
            skeleton = architecture.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
        else:
            skeleton = architecture(copy.deepcopy(config))
    if skeleton.get_output_embeddings() is None:
        raise ValueError(
            f"Model {name!r} is a {type(skeleton).__name__}, which has no language-modelling head. "
            "Write a causal language model or a multimodal model that generates text."
        )
    return Checkpoint(name, config, type(skeleton), skeleton, find_structure(skeleton))


def load_model(
    checkpoint: Checkpoint | str,
    *,
    quantization_config: BitsAndBytesConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    attn_implementation: str | dict | None = None,
    device: torch.device | str | None = None,
    per_layer_embedding_device: str = "auto",
    tower_device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    shard: ShardOf | None = None,
    **from_pretrained_kwargs,
) -> PreTrainedModel:
    """Load a checkpoint, its language model in 4 bit if asked, each part on its device.

    Args:
        checkpoint: name, folder, or what `inspect_checkpoint` returned.
        quantization_config: `None` loads in `dtype`. Towers, connectors, embeddings, routers and the head are added to
            what it skips. Ignored, with a warning, if the checkpoint is already
            quantised.
        dtype: of everything that is not quantised.
        attn_implementation: for the language model; towers take their own default.
        device: where the model trains; by default the current accelerator, else the CPU.
        per_layer_embedding_device, tower_device: see `QLoRAArguments`.
        shard: of every large tensor keep this shard only. The model computes nothing until `sharding.shard_model`
            has laid it over the ranks.

    Raises:
        ValueError: for a missing checkpoint, a damaged file, or an attention that cannot serve the head dimension.
    """
    if isinstance(checkpoint, str):
        checkpoint = inspect_checkpoint(checkpoint, revision=revision, trust_remote_code=trust_remote_code)
    device = _default_device() if device is None else torch.device(device)
    structure = checkpoint.structure
    attention = attention_for(checkpoint.skeleton, attn_implementation)

    if is_quantised(checkpoint) and quantization_config is not None:
        logger.warning("%s is already quantised and is loaded as it is.", checkpoint.name)
        quantization_config = None
    on_host = host_modules(checkpoint, device, per_layer_embedding_device=per_layer_embedding_device, tower_device=tower_device)
    if quantization_config is not None:
        quantization_config = _with_skipped_modules(quantization_config, structure)
        # Lets host parts into the device map beside an accelerator.
        quantization_config.llm_int8_enable_fp32_cpu_offload = device.type != "cpu"
        warn_of_16_bit_experts(checkpoint.skeleton, structure, quantization_config.llm_int8_skip_modules)
    teach_peft()
    # A rank's CPU has a number; bitsandbytes would take it for an accelerator beside a CPU.
    place = device.type if device.type == "cpu" or device.index is None else f"{device.type}:{device.index}"
    device_map = {"": place, **dict.fromkeys(on_host, "cpu")}

    shards = keeping_own_shards(shard, structure, on_host)
    config = copy.deepcopy(checkpoint.config)
    for part in (config, config.get_text_config()):
        for name in [name for name in from_pretrained_kwargs if hasattr(part, name)]:
            setattr(part, name, from_pretrained_kwargs.pop(name))  # as `from_pretrained` does without a config
    with _placed_by_us(), _errors_name_the_file(checkpoint.name), quantising_experts(), shards:
        model, report = checkpoint.architecture.from_pretrained(
            checkpoint.name,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            dtype=dtype,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
            **({"quantization_config": quantization_config} if quantization_config is not None else {}),
            **({"attn_implementation": attention} if attention is not None else {}),
            **from_pretrained_kwargs,
        )
    _check_complete(checkpoint, report, model)
    if quantization_config is not None:
        model.config.quantization_config.llm_int8_enable_fp32_cpu_offload = False
    attach_host_modules(model, on_host, device)
    keep_packed_bytes(model)
    return model


def is_quantised(checkpoint: Checkpoint) -> bool:
    return getattr(checkpoint.config, "quantization_config", None) is not None


def host_modules(checkpoint: Checkpoint, device: torch.device, *, per_layer_embedding_device: str, tower_device: str) -> list[str]:
    """Names of the modules that `load_model` keeps in host memory."""
    return choose_host_modules(
        checkpoint.skeleton,
        checkpoint.structure,
        device,
        per_layer_embedding_device=per_layer_embedding_device,
        # A quantised tower cannot be left out of the quantiser's device map.
        tower_device="accelerator" if is_quantised(checkpoint) else tower_device,
    )


def modules_to_quantise(checkpoint: Checkpoint, quantization_config: BitsAndBytesConfig | None) -> set[str]:
    """Names of the modules that own a weight in 4 or 8 bit once `load_model` is done."""
    if is_quantised(checkpoint):
        given = checkpoint.config.quantization_config
        values = given if isinstance(given, dict) else given.to_dict()
    elif quantization_config is None:
        return set()
    else:
        values = _with_skipped_modules(quantization_config, checkpoint.structure).to_dict()
    skipped = values.get("llm_int8_skip_modules") or values.get("modules_to_not_convert") or []
    linear = {name for name, m in checkpoint.skeleton.named_modules() if isinstance(m, LINEAR) and should_convert_module(name, skipped)}
    stacks = packable_stacks(checkpoint.skeleton, skipped) if values.get("load_in_4bit") else set()
    return linear | {stack.rpartition(".")[0] for stack in stacks}


def _check_complete(checkpoint: Checkpoint, report: dict, model: nn.Module) -> None:
    """Raise `ValueError` for weights that are missing or of another shape: they would be random, and train all the same."""
    mismatched = [f"{name}: {tuple(found)} in the file, {tuple(wanted)} in the model" for name, found, wanted in report["mismatched_keys"]]
    for name, module in model.named_modules():  # packed weights are a row of bytes, whose length says little
        state = quant_state_of(module) if isinstance(module, nn.Linear) else None
        if state is not None and tuple(state.shape) != (module.out_features, module.in_features):
            wanted = f"{(module.out_features, module.in_features)} in the model"
            mismatched.append(f"{name}.weight: {tuple(state.shape)} in the file, {wanted}")
    missing = [name for name in report["missing_keys"] if checkpoint.structure.in_language_model(name)]
    problems = [*mismatched, *(f"{name}: missing" for name in sorted(missing))]
    if problems:
        raise ValueError(
            f"The weights of {checkpoint.name!r} are not those its config.json describes: {len(problems)} do not fit, such as "
            f"{problems[0]}. Take both from the same place."
        )


def keep_packed_bytes(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in place for AVX-512 inference on the CPU.

    The repacked bytes are another format: shards, checksums and other ranks would no longer agree with them.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization_from(
    quant_type: str, double_quant: bool, compute: torch.dtype, storage: torch.dtype
) -> BitsAndBytesConfig:
    """The bitsandbytes configuration of the four choices the trainers offer."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
    )


def _with_skipped_modules(quantization_config: BitsAndBytesConfig, structure: ModelStructure) -> BitsAndBytesConfig:
    quantization_config = copy.deepcopy(quantization_config)
    # Given names add to these: without them, the head itself would be packed, and the loss reads its weight as it is.
    skip = [structure.input_embedding, *structure.side_embeddings, *structure.towers, *structure.routers]
    skip += [structure.output_head] if structure.output_head else []
    skip += getattr(quantization_config, "llm_int8_skip_modules", None) or []
    quantization_config.llm_int8_skip_modules = skip
    return quantization_config


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, torch.accelerator.current_device_index())


@contextmanager
def _no_weight_init():
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


@contextmanager
def _placed_by_us():
    """`from_pretrained` without its dispatch hooks, and blind to an accelerate FSDP configuration.

    The hooks would move whole modules at every call; `placement` does better. With `ACCELERATE_USE_FSDP` set, loading
    on ranks above 0 leaves missing weights uninitialised (transformers/modeling_utils.py, `is_fsdp_enabled`).
    """
    from transformers import modeling_utils

    if not hasattr(modeling_utils, "accelerate_dispatch"):
        raise ImportError(
            f"transformers {transformers.__version__} has no `modeling_utils.accelerate_dispatch`: this version is "
            "outside the tested range, see setup.cfg."
        )
    dispatch = modeling_utils.accelerate_dispatch
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP", None)
    modeling_utils.accelerate_dispatch = lambda *args, **kwargs: None
    try:
        yield
    finally:
        modeling_utils.accelerate_dispatch = dispatch
        if fsdp is not None:
            os.environ["ACCELERATE_USE_FSDP"] = fsdp


@contextmanager
def _errors_name_the_file(name: str):
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{_damaged_file(name)} is damaged or cut short ({error}). Fetch it again.") from error
    except OSError as error:
        if not os.path.isdir(name):
            raise
        raise ValueError(
            f"Folder {name!r} holds no complete checkpoint: {str(error).splitlines()[0]} "
            "Expected model.safetensors, or model.safetensors.index.json with every file it lists."
        ) from error


def _damaged_file(name: str) -> str:
    for file in sorted(glob.glob(str(Path(name) / "*.safetensors"))):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file
    return f"A safetensors file of {name}"
