"""The fields that the trainers add to TRL's, and their checks.

Every check here runs when the config is made, long before a weight is read.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Literal

import torch
from trl import SFTConfig

from .precision import DTYPES, STORAGE_DTYPES, choose_supported_precision, dtype_name

QUANT_TYPES = ("nf4", "fp4")
DEVICE_CHOICES = ("auto", "cpu", "accelerator")


@dataclass
class QLoRAArguments:
    """Fields both trainers add. Names are those of bitsandbytes, PEFT and TRL wherever they have one.

    Parameters:
        load_in_4bit: quantise the linear layers of the language model. `False` trains a plain LoRA the same way.
        bnb_4bit_quant_type: `"nf4"` or `"fp4"`.
        bnb_4bit_use_double_quant: quantise the quantisation constants too (0.37 bit less per parameter).
        bnb_4bit_compute_dtype: `None` follows the trainer's precision: bf16, fp16 or, with neither, fp32.
        bnb_4bit_quant_storage: container of the packed bytes; `None` follows the compute dtype, which FSDP can shard.
        lora_r, lora_alpha, lora_dropout: as in `peft.LoraConfig`.
        lora_target_modules: as `target_modules` of PEFT: `"all-linear"`, a list (suffix match) or a string
            (regular expression matched against the whole name).
        lora_exclude_modules: as `exclude_modules` of PEFT; an empty list or string excludes nothing.
        lora_experts_r: rank of adapters on each expert of a mixture-of-experts model, at the scale `lora_alpha / lora_r`; 0 leaves
            experts without adapters.
        language_model_only: keep adapters off the vision and audio towers, their connectors and the output head.
        adapter_dtype: dtype the adapters are held and optimised in.
        attn_implementation: attention of the language model; towers keep what they support.
        per_layer_embedding_device, tower_device: where the per-layer-embedding table and the towers live. `"auto"`
            keeps them in host memory whenever the model trains on an accelerator: only the rows of a batch travel,
            and a tower moves in when a batch has something for it.
        mlp_tile_size: rows longer than this many tokens go through the MLP of a layer in tiles of that size, which bounds
            its memory; 0 turns it off.
        fused: run fused operations, and CUDA graphs of decoder layers, where the model, its adapters and the accelerator
            allow it; the trainer says in one line what is active. On the CPU it only shortens the walks over the model that
            each step makes.
        force_resume: resume although the checkpoint records another base model, quantisation, adapter scale, number of rows
            a step or of training rows; each difference is then a warning instead of an error.
    """

    load_in_4bit: bool = field(
        default=True, metadata={"help": "Load the language model's linear layers in 4 bit; False trains a plain LoRA."}
    )
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"help": "4-bit number format: nf4 or fp4."})
    bnb_4bit_use_double_quant: bool = field(
        default=True, metadata={"help": "Quantise the quantisation constants as well."}
    )
    bnb_4bit_compute_dtype: str | None = field(
        default=None,
        metadata={"help": "bfloat16, float16 or float32. Unset: the trainer's own precision (bf16, fp16, else fp32)."},
    )
    bnb_4bit_quant_storage: str | None = field(
        default=None,
        metadata={"help": "Container of the packed bytes. Unset: the compute dtype, which FSDP can shard."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters (alpha / r)."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: list[str] | str = field(
        default_factory=lambda: "all-linear",  # the argument parser drops a plain default of a list field
        metadata={"help": "'all-linear', names (suffix match), or one regular expression (whole-name match)."},
    )
    lora_exclude_modules: list[str] | str = field(
        default_factory=list, metadata={"help": "Names or one regular expression of modules that get no adapter."}
    )
    lora_experts_r: int = field(
        default=0, metadata={"help": "Rank of the adapters on each expert of a mixture of experts; 0 for none."}
    )
    language_model_only: bool = field(
        default=True, metadata={"help": "No adapters on vision or audio towers, connectors and the output head."}
    )
    adapter_dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata={"help": "Dtype in which adapters are held and optimised."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of the language model, such as sdpa, eager or flash_attention_2."}
    )
    per_layer_embedding_device: Literal["auto", "cpu", "accelerator"] = field(
        default="auto", metadata={"help": "Where per-layer-embedding tables live."}
    )
    tower_device: Literal["auto", "cpu", "accelerator"] = field(
        default="auto", metadata={"help": "Where vision and audio towers live until a batch needs them."}
    )
    mlp_tile_size: int = field(
        default=4096, metadata={"help": "Tokens that go through a layer's MLP at once; 0 for all of a row."}
    )
    fused: bool = field(
        default=True, metadata={"help": "Fused operations and CUDA graphs of decoder layers, where they apply."}
    )
    force_resume: bool = field(
        default=False, metadata={"help": "Resume although base model, quantisation, adapter scale or batch differ."}
    )

    def __post_init__(self):
        _check_kinds(self, QLoRAArguments)
        self.lora_target_modules = _from_command_line(self.lora_target_modules)
        self.lora_exclude_modules = _from_command_line(self.lora_exclude_modules)
        _check_choice("bnb_4bit_quant_type", self.bnb_4bit_quant_type, QUANT_TYPES)
        _check_choice("adapter_dtype", self.adapter_dtype, ("float32", "bfloat16"))
        _check_choice("per_layer_embedding_device", self.per_layer_embedding_device, DEVICE_CHOICES)
        _check_choice("tower_device", self.tower_device, DEVICE_CHOICES)
        if self.bnb_4bit_compute_dtype is not None:
            self.bnb_4bit_compute_dtype = dtype_name(self.bnb_4bit_compute_dtype)
            _check_choice("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype, DTYPES)
        if self.bnb_4bit_quant_storage is not None:
            self.bnb_4bit_quant_storage = dtype_name(self.bnb_4bit_quant_storage)
            _check_choice("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage, STORAGE_DTYPES)
        if self.lora_r < 1:
            raise ValueError(f"`lora_r={self.lora_r}` gives no adapter: write a rank of at least 1, such as 16.")
        if not 0 < self.lora_alpha < float("inf"):
            raise ValueError(f"`lora_alpha={self.lora_alpha}` is no scale to train at: write a number above 0, such as 32.")
        if self.lora_experts_r < 0:
            raise ValueError(f"`lora_experts_r={self.lora_experts_r}` is no rank: write a number such as 4, or 0 for none.")
        if self.mlp_tile_size < 0:
            raise ValueError(f"`mlp_tile_size={self.mlp_tile_size}` is no size: write a number of tokens, or 0 for no tiles.")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(f"`lora_dropout={self.lora_dropout}` is no probability: write a number in [0, 1).")
        if not self.lora_target_modules:
            raise ValueError(
                "`lora_target_modules` is empty, so nothing would be trained: write 'all-linear' or module names."
            )

    def changed_fields(self, *names: str) -> list[str]:
        """Those of the fields `names` whose value is not the default, as `name=value`."""
        defaults = {}
        for f in dataclasses.fields(QLoRAArguments):
            defaults[f.name] = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        return [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != defaults[name]]


@dataclass
class QLoRASFTConfig(QLoRAArguments, SFTConfig):
    """`trl.SFTConfig` plus the fields of `QLoRAArguments`.

    Parameters:
        keep_activations: of a model with gradient checkpointing, keep the activations of as many decoder layers as there is
            memory for, instead of computing them again: less time, the same numbers, most of the card's memory. Needs CUDA
            graphs of layers (`fused`), and counts for the first shape of batch that comes twice: pack or pad the rows.
    """

    keep_activations: bool = field(
        default=False, metadata={"help": "Keep the activations of as many checkpointed layers as there is memory for."}
    )

    def __post_init__(self):
        _check_kinds(self, QLoRASFTConfig)
        choose_supported_precision(self)
        SFTConfig.__post_init__(self)
        QLoRAArguments.__post_init__(self)
        check_training_arguments(self)


# Fields of transformers and TRL that are taken as they are there, and fail later, or train nothing without a word.
SMALLEST = {
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1, "pad_to_multiple_of": 1,
    "max_length": 2,  # a row of one token has none to predict
    "num_train_epochs": 0, "learning_rate": 0, "weight_decay": 0, "max_grad_norm": 0, "label_smoothing_factor": 0,
    "neftune_noise_alpha": 0, "seed": 0,
}  # fmt: skip


def check_numbers(args) -> None:
    for name, smallest in SMALLEST.items():
        value = getattr(args, name, None)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or not smallest <= value < float("inf"):
            raise ValueError(f"`{name}={value!r}` cannot work: write a number of at least {smallest}.")


def check_training_arguments(args) -> None:
    """Refuse training arguments that cannot work, with 4-bit adapters or at all, whichever config class carries them."""
    check_numbers(args)
    kwargs = args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing and kwargs.get("use_reentrant"):
        # Layers that share keys and values recompute before the layer that made them, and read detached tensors:
        # https://github.com/unslothai/unsloth-zoo/pull/813
        raise ValueError(
            "`gradient_checkpointing_kwargs={'use_reentrant': True}` loses gradients in models whose layers share keys "
            "and values, such as Gemma 4. Leave it out, or write {'use_reentrant': False}."
        )
    if kwargs.get("offload") and getattr(args, "fused", True):  # of a plain TRL config too
        raise ValueError(
            "`gradient_checkpointing_kwargs={'offload': True}` reaches no layer that replays a CUDA graph (`fused=True`). Write "
            "`activation_offloading=True` instead, which SFT has and which copies while the accelerator computes, or `fused=False`."
        )
    if getattr(args, "activation_offloading", False) and (args.use_cpu or not torch.accelerator.is_available()):
        raise ValueError(
            "`activation_offloading=True` moves activations from an accelerator to host memory, and training on the CPU has "
            "them there. Leave it out, or train on an accelerator."
        )
    if getattr(args, "keep_activations", False):
        _check_kept_activations(args)
    if args.gradient_checkpointing:
        turn_on_checkpointing(args, kwargs)


def _check_kept_activations(args) -> None:
    reasons = {
        "`gradient_checkpointing=False` keeps all activations already": not args.gradient_checkpointing,
        "`fused=False` has no CUDA graphs, which keep them": not args.fused,
        "`activation_offloading=True` moves them to host memory": args.activation_offloading,
    }
    for reason, given in reasons.items():
        if given:
            raise ValueError(f"`keep_activations=True` and {reason}. Leave one of the two out.")


def turn_on_checkpointing(args, kwargs: dict) -> None:
    """Non-reentrant checkpointing, under the name of either tested transformers version (5.24 renames it)."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, True)
            setattr(args, f"{name}_kwargs", {**kwargs, "use_reentrant": False})


def _check_kinds(args: QLoRAArguments, declared_by: type) -> None:
    """Raise `ValueError` for a value of another type than the field's: it would fail late, or, as a string, count as true."""
    for f in dataclasses.fields(args):
        if f.name not in declared_by.__annotations__:
            continue
        value = getattr(args, f.name)
        if f.type is bool:
            fits, wanted = isinstance(value, bool), "True or False"
        elif f.type is int and f.name != "lora_alpha":
            fits, wanted = isinstance(value, int) and not isinstance(value, bool), f"a whole number, such as {f.default}"
        elif f.type in (int, float):  # a scale may be any number
            fits, wanted = isinstance(value, (int, float)) and not isinstance(value, bool), f"a number, such as {f.default}"
        elif f.name in ("lora_target_modules", "lora_exclude_modules"):
            names = [] if value is None else [value] if isinstance(value, str) else value
            fits = isinstance(names, (list, tuple, set)) and all(isinstance(name, str) for name in names)
            wanted = "module names as a list of strings, or one string"
        elif f.name == "attn_implementation":
            fits, wanted = value is None or isinstance(value, (str, dict)), "its name, such as 'sdpa'"
        else:
            continue  # one of a few choices
        if not fits:
            raise ValueError(f"`{f.name}={value!r}` is of the type {type(value).__name__}: write {wanted}.")


def _check_choice(name: str, value, choices) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is unknown: write one of {', '.join(map(repr, choices))}.")


def _from_command_line(modules: list[str] | str | None) -> list[str] | str:
    """Undo what a command line does to a string: one value arrives as a list of one.

    A list of one plain name stays a list (PEFT's suffix match); `all-linear` and regular expressions become strings.
    """
    if modules is None:
        return []
    if isinstance(modules, (list, tuple)):
        modules = [name for name in modules if name]
        if len(modules) == 1 and (modules[0] == "all-linear" or not re.fullmatch(r"[\w.]+", modules[0])):
            return modules[0]
    return modules
