"""What the trainers share: make the model, lay it over ranks, and hand adapters out.

Overridden of `transformers.Trainer`, and why:

- `create_accelerator_and_postprocess`: accelerate must not wrap the model (no FSDP, no DDP): `sharding` does it.
- `create_optimizer`: an evaluation before training leaves units gathered; the optimizer must get the shards, and nothing else.
- `_move_model_to_device`: the parts of the model are already where they belong.
- `training_step`, `floating_point_ops`: a loss that is not finite is kept out of the log without waiting for the GPU.
- what `checkpoint.CheckpointMixin` lists.
"""

import sys
from contextlib import contextmanager
from dataclasses import dataclass

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import BitsAndBytesConfig, PreTrainedModel

from . import sharding
from .arguments import BNB_FIELDS, LOADING_FIELDS, LORA_FIELDS, as_dtype, one_of, one_quantization, qlora_arguments, resolved_adapter
from .attention import check_attention
from .checkpoint import CheckpointMixin
from .checks import (
    check_adapter,
    check_device_map,
    check_dtype,
    check_optimizer,
    check_output_dir,
    check_ranks,
    lives_on,
)
from .config import check_training_arguments
from .expert_adapters import patterns_of_parameters
from .kernels.fusing import apply_fused_layers, take_apart
from .kernels.walks import shorten_walks
from .loading import host_modules, inspect_checkpoint, keep_packed_bytes, load_model, modules_to_quantise, quantization_from
from .logging import get_logger
from .packed import quantised_modules
from .placement import move_in_trained_parts, placement_table
from .precision import DTYPES, check_storage_fits, compute_dtype, storage_dtype
from .ranks import Ranks
from .sharding_request import hidden_from_accelerate, read_sharding_request
from .streaming import ShardOf, loaded_in_shards
from .tiled_mlp import tile_mlps

logger = get_logger(__name__)


@dataclass
class Made:
    """What a trainer hands to TRL: a model instance, and the PEFT config to wrap it with."""

    model: PreTrainedModel | PeftModel
    peft_config: PeftConfig | None


class QLoRATrainerMixin(CheckpointMixin):
    """Comes before a TRL trainer in the bases; its `__init__` calls `make`, then TRL's, then `finish`."""

    def make(self, model, args, quantization_config, peft_config) -> Made:
        """Check everything that can be checked, then load or take the model.

        Raises:
            ValueError: for every combination that cannot work, before any weight is read.
        """
        check_training_arguments(args)
        check_output_dir(args.output_dir)
        qlora = qlora_arguments(args)
        self.sharding_request = read_sharding_request(args)
        check_ranks(args, self.sharding_request)
        check_optimizer(args)
        if self.sharding_request.activation_checkpointing:
            logger.warning(
                "`fsdp_activation_checkpointing` is taken as `gradient_checkpointing=True`: the model checkpoints its "
                "layers itself, non-reentrant, the same way at any number of ranks."
            )
            args.gradient_checkpointing = True
            check_training_arguments(args)
        if isinstance(model, str):
            return self._load(model, args, qlora, quantization_config, peft_config)
        return self._take(model, args, qlora, quantization_config, peft_config)

    def _load(self, name, args, qlora, quantization_config, peft_config) -> Made:
        kwargs = dict(args.model_init_kwargs or {})
        device = args.device
        check_device_map(kwargs.pop("device_map", None), device)
        quantization_config = one_quantization(qlora, quantization_config, kwargs.pop("quantization_config", None))
        compute = compute_dtype(args)
        dtype = as_dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", None)), compute)
        attention = one_of("attn_implementation", qlora.attn_implementation, kwargs.pop("attn_implementation", None))
        if quantization_config is None and qlora.load_in_4bit:
            quantization_config = quantization_from(
                qlora.bnb_4bit_quant_type, qlora.bnb_4bit_use_double_quant, compute, storage_dtype(args, compute)
            )
        if isinstance(quantization_config, BitsAndBytesConfig) and quantization_config.load_in_4bit:
            self._check_quantization(quantization_config)

        trust = kwargs.pop("trust_remote_code", getattr(args, "trust_remote_code", False))
        revision = kwargs.pop("revision", None)
        checkpoint = inspect_checkpoint(name, revision=revision, trust_remote_code=trust)
        resolved = resolved_adapter(checkpoint.skeleton, qlora, peft_config)
        check_dtype(dtype, args)
        placement = {"per_layer_embedding_device": qlora.per_layer_embedding_device, "tower_device": qlora.tower_device}
        on_host = host_modules(checkpoint, device, **placement)
        self._check_peft(checkpoint.skeleton, resolved, args, qlora, modules_to_quantise(checkpoint, quantization_config), on_host)
        model = load_model(
            checkpoint,
            quantization_config=quantization_config,
            dtype=dtype,
            attn_implementation=attention,
            device=device,
            **placement,
            revision=revision,
            trust_remote_code=trust,
            shard=self._shard_while_loading(args, resolved),
            **kwargs,
        )
        return Made(model, resolved)

    def _check_peft(self, model, peft_config, args, qlora, quantised: set[str], on_host: list[str]) -> None:
        check_adapter(
            model,
            peft_config,
            quantised=quantised,
            on_host=on_host,
            fsdp=self.sharding_request.fsdp and args.world_size > 1,
            language_model_only=qlora.language_model_only,
        )
        self._check_before_loading(model, peft_config)

    def _check_before_loading(self, model: torch.nn.Module, peft_config: PeftConfig) -> None:
        """A trainer's own demands on model and adapter, before a weight is read; `model` may be on the meta device."""

    def _shard_while_loading(self, args, peft_config: PeftConfig) -> ShardOf | None:
        """This rank's shard, unless something still has to see whole weights before they are laid over the ranks."""
        needs_whole_weights = (
            getattr(peft_config, "use_dora", False)
            or getattr(peft_config, "init_lora_weights", True) not in (True, False, "gaussian", "orthogonal")
            or getattr(peft_config, "modules_to_save", None)
            or getattr(peft_config, "trainable_token_indices", None)
            or not isinstance(peft_config, LoraConfig)
            or getattr(args, "chat_template_path", None)  # may resize embeddings
        )
        if args.world_size == 1 or not self.sharding_request.fsdp or needs_whole_weights:
            return None
        return ShardOf(args.process_index, args.world_size)

    def _check_quantization(self, quantization_config: BitsAndBytesConfig) -> None:
        storage = quantization_config.bnb_4bit_quant_storage
        check_storage_fits(storage, quantization_config.bnb_4bit_compute_dtype)
        if self.sharding_request.fsdp and not storage.is_floating_point:
            raise ValueError(
                f"`bnb_4bit_quant_storage` is {str(storage).removeprefix('torch.')}, which FSDP cannot shard: every "
                "rank would hold the whole base. Write 'bfloat16' (or leave it unset), or launch without FSDP."
            )

    def _take(self, model, args, qlora, quantization_config, peft_config) -> Made:
        """A model instance or `PeftModel` is used as it is; say what then has no effect."""
        unused = qlora.changed_fields("load_in_4bit", *BNB_FIELDS, *LOADING_FIELDS)
        unused += ["quantization_config"] if quantization_config is not None else []
        unused += ["model_init_kwargs"] if args.model_init_kwargs else []
        is_peft = isinstance(model, PeftModel)
        if is_peft:
            if peft_config is not None:
                raise ValueError(
                    "The model is a `PeftModel` and `peft_config` is given too: the adapter would be wrapped twice. "
                    "Pass the `PeftModel` alone to go on training it, or its base model with `peft_config`."
                )
            unused += qlora.changed_fields(*LORA_FIELDS)
            if not any(p.requires_grad for p in model.parameters()):
                raise ValueError(
                    "No parameter of the given `PeftModel` is trainable. Load it with `PeftModel.from_pretrained(..., is_trainable=True)`."
                )
        if unused:
            logger.warning("The model is given as an instance and taken as it is; no effect: %s.", ", ".join(unused))
        base = model.get_base_model() if is_peft else model
        check_attention(base, base.config.get_text_config()._attn_implementation)
        keep_packed_bytes(base)
        if is_peft:
            self._check_before_loading(model, model.peft_config[model.active_adapter])
            return Made(model, None)
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise ValueError(
                "The model already carries adapter layers, from a trainer or `get_peft_model` before. Pass the `PeftModel` "
                "to go on training them, or load the model again."
            )
        if getattr(model, "hf_device_map", None):
            check_device_map(model.hf_device_map, args.device)
        resolved = resolved_adapter(model, qlora, peft_config)
        on_host = [name for name, module in model.named_modules() if getattr(module, "lives_on_host", False)]
        self._check_peft(model, resolved, args, qlora, quantised_modules(model), on_host)
        if getattr(model, "quantization_method", None) is None and not lives_on(model, args.device):
            model.to(args.device)
        return Made(model, resolved)

    @contextmanager
    def _trl_init(self, made: Made, args):
        """Around TRL's `__init__`: what it would do to a model of ours, and must not.

        - `model_init_kwargs` were used already; TRL would warn that they are ignored.
        - TRL casts adapters on a quantised base to bf16, without fp32 masters (it reads `is_loaded_in_4bit`). PEFT must read it: a
          layer that does not know its weight as packed cannot merge an adapter into it. Of shards, which nobody can merge into, PEFT
          could not make such a layer.
        - accelerate and transformers must not see FSDP.
        """
        base = made.model.get_base_model() if isinstance(made.model, PeftModel) else made.model
        flags = {f: getattr(base, f) for f in ("is_loaded_in_4bit", "is_loaded_in_8bit") if getattr(base, f, False)}
        in_shards = any(loaded_in_shards(module) for module in base.modules())

        def get_peft_model(model, *options, **named_options):
            with attributes(base, **({} if in_shards else flags)):
                return peft.get_peft_model(model, *options, **named_options)

        trl_trainer = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("trl."))
        with (
            attributes(args, model_init_kwargs=None),
            attributes(base, **dict.fromkeys(flags, False)),
            attributes(sys.modules[trl_trainer.__module__], get_peft_model=get_peft_model),
            hidden_from_accelerate(args),
            patterns_of_parameters(made.peft_config),
        ):
            yield

    def finish(self, made: Made) -> None:
        """After TRL's `__init__`: adapter dtype, then the ranks, then say what is where."""
        qlora = qlora_arguments(self.args)
        self.ranks = Ranks(self.args.ddp_timeout)
        self._filtered = False
        if made.peft_config is not None:
            set_adapter_dtype(self.model, DTYPES[qlora.adapter_dtype])
        base = self.model.get_base_model()
        move_in_trained_parts(base, self.args.device)
        if self.args.gradient_checkpointing:
            leave_embeddings_without_gradients(base)
        if qlora.mlp_tile_size:
            tile_mlps(base, qlora.mlp_tile_size)
        take_apart(self.model)
        # Before the ranks: FSDP wraps the fused layers, hooks and all.
        logger.info(self._fuse() if qlora.fused else "fused operations: turned off")
        if self.args.world_size > 1:
            mesh = init_device_mesh(self.args.device.type, (self.args.world_size,))
            sharding.shard_model(self.model, mesh, self.sharding_request)
        if qlora.fused:
            shorten_walks(self.model, sharded=self.args.world_size > 1)
        how = f"{self.args.world_size} ranks, {'FSDP2' if self.sharding_request.fsdp else 'base replicated'}"
        logger.info("%s\n%s", "1 rank, nothing wrapped" if self.args.world_size == 1 else how, placement_table(self.model))

    def _fuse(self) -> str:
        # Without checkpointing, replays would keep on the accelerator what is to be moved to host memory.
        offloads = getattr(self.args, "activation_offloading", False) and not self.args.gradient_checkpointing
        keep = getattr(self.args, "keep_activations", False)
        fused, trains_recorded = apply_fused_layers(self.model, self.args.device, replay=not offloads, keep_activations=keep)
        if keep and not trains_recorded:
            logger.warning("`keep_activations=True` has no effect: CUDA graphs of layers keep activations, and there are none here.")
        return f"{fused}; no CUDA graphs: activations go to host memory" if offloads else fused

    # --- overrides of transformers.Trainer ---

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        prepare_model = self.accelerator.prepare_model

        def prepare_autocast_only(model, device_placement=None, evaluation_mode=False):
            return prepare_model(model, device_placement=False, evaluation_mode=True)

        self.accelerator.prepare_model = prepare_autocast_only

    def create_optimizer(self, *args, **kwargs):
        sharding.reshard(self.model)
        if self.args.world_size > 1:
            sharding.check_all_trained_are_laid_out(self.model)
        return super().create_optimizer(*args, **kwargs)

    def _move_model_to_device(self, model, device):
        pass

    def training_step(self, *args, **kwargs):
        """The loss; one that is not finite is replaced by the mean of those since the last log, as `logging_nan_inf_filter` asks.

        `Trainer` does that after this, and the host waits for the backward pass to learn whether it must. The GPU then waits in turn,
        for clipping and the optimizer step: some 10 ms.
        """
        loss = super().training_step(*args, **kwargs)
        if self.args.logging_nan_inf_filter and hasattr(self, "_tr_loss"):  # in `train`
            mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            loss = torch.where(torch.isfinite(loss), loss, mean)
            self._filtered, self.args.logging_nan_inf_filter = True, False
        return loss

    def floating_point_ops(self, inputs):
        """Comes right after `Trainer` has looked at the loss; evaluation asks for the filter again."""
        if self._filtered:
            self._filtered, self.args.logging_nan_inf_filter = False, True
        return super().floating_point_ops(inputs)


def leave_embeddings_without_gradients(model: nn.Module) -> None:
    """Also when `Trainer.train` asks for gradients of the embeddings once more.

    TRL and transformers ask for them with any checkpointing, and only the reentrant one needs them. Without them the backward pass ends
    at the first adapter, and nothing before it is kept: in Gemma 4, the input that each layer gets beside the stream.
    """
    if hasattr(model, "disable_input_require_grads"):
        model.disable_input_require_grads()
        model.enable_input_require_grads = _leave_inputs_alone
    # A model remembers only the last time that it was asked; PEFT's `prepare_model_for_kbit_training` asks too.
    hooks = model.get_input_embeddings()._forward_hooks
    for number in [n for n, hook in hooks.items() if getattr(hook, "__name__", "").startswith("make_inputs_require_grad")]:
        del hooks[number]


def _leave_inputs_alone() -> None:
    pass


@contextmanager
def attributes(owner, **values):
    """`owner` with other values of attributes that it has."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def set_adapter_dtype(model: PeftModel, dtype: torch.dtype) -> None:
    """Hold trainable parameters in `dtype`. DoRA magnitudes follow: a unit of FSDP reduces in one dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
