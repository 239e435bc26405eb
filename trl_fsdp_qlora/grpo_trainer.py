"""Group-relative policy optimisation in 4 bit."""

import os

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from . import sharding
from .base_trainer import QLoRATrainerMixin
from .data_checks import check_prompts, has_images
from .grpo_checks import check_arguments, check_reference, check_rollout_func
from .grpo_config import QLoRAGRPOConfig
from .grpo_report import draw_curves, peak_memory
from .lora_checks import check_servable, engine_rank, largest_rank
from .processing import load_processing_class
from .provenance import describe_quantization
from .rollout import RolloutSettings, adapter_rollouts, report_base_difference
from .sampled_logprobs import generating


class QLoRAGRPOTrainer(QLoRATrainerMixin, GRPOTrainer):
    """`trl.GRPOTrainer` whose model is 4-bit and laid over ranks, and whose vLLM engine gets the adapter alone.

    Takes what `trl.GRPOTrainer` takes. Rewards, advantages, losses, metrics, tools, evaluation and the table of
    completions are TRL's, unchanged, and so are log-probabilities in chunks, without logits of the whole vocabulary.
    Different:

    - the model is made, placed and laid over ranks as for `QLoRASFTTrainer`;
    - with `use_vllm=True` the engine loads the base from the checkpoint itself, and gets the adapter before the first
      rollout and after each step that changed it; the base of the trainer is never merged into, gathered or sent;
    - without vLLM, completions are generated on sharded weights at any number of ranks;
    - the gap between log-probabilities of rollout and training is logged at every step (`logprob_gap/mean`, `/max`);
    - curves are drawn into `output_dir` when training ends.

    Overridden of `GRPOTrainer`: `__init__`; `_generate_single_turn` (generation on sharded weights, figures of the
    sync); `_generate_and_score_completions` (what the reference pass leaves frozen); `_compute_loss` and
    `_get_per_token_logps_and_entropies` (the gap); `log` (memory); `train` (curves). Of `CheckpointMixin`:
    `_load_from_checkpoint` (the engine's adapter is then an old one).

    Raises:
        ValueError: for input that cannot work, before any weight is read.
    """

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = QLoRAGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        elif not isinstance(args, GRPOConfig):
            args = QLoRAGRPOConfig(**{**args.to_dict(), "hub_token": args.hub_token})
        check_arguments(args)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            check_prompts(dataset, name, owned_by_environment=environment_factory is not None)
        wants_images = has_images(train_dataset)
        if processing_class is None:
            processing_class = load_processing_class(model, args, wants_images=wants_images)
        if isinstance(model, PeftModel):
            check_reference(model, args.beta)
        self._adapter_is_served, self._rank = args.use_vllm, 0
        made = self.make(model, args, quantization_config, peft_config)
        settings = self._rollout_settings(args, text_only=not wants_images) if args.use_vllm else None
        with self._trl_init(made, args), adapter_rollouts(settings):
            super().__init__(
                model=made.model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=made.peft_config,
                tools=tools,
                rollout_func=rollout_func and check_rollout_func(rollout_func),
                environment_factory=environment_factory,
            )
        _give_reference_the_dtype_of_the_adapter(self.model)
        self.finish(made)
        self._trainable = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if args.use_vllm:
            report_base_difference(self.vllm_generation, _base_in_words(self.model), args.vllm_importance_sampling_correction)

    def _check_before_loading(self, model, peft_config: PeftConfig) -> None:
        if self._adapter_is_served:
            if isinstance(model, (PreTrainedModel, PeftModel)) and not _on_meta(model) and not model.name_or_path:
                raise ValueError(
                    "The engine reads the base from a checkpoint, and the given model has no `name_or_path`. Save it, load it from "
                    "there (or pass the folder's name), or write `use_vllm=False`."
                )
            check_servable(model, peft_config)
            self._rank = largest_rank(peft_config)

    def _rollout_settings(self, args, *, text_only: bool) -> RolloutSettings:
        quantized = getattr(args, "vllm_base_quantization", "none") == "bitsandbytes"
        return RolloutSettings(
            quantization="bitsandbytes" if quantized else None,
            rank=self._rank,
            max_rank=engine_rank(self._rank),
            revision=(args.model_init_kwargs or {}).get("revision"),
            text_only=text_only,
            engine_kwargs=getattr(args, "vllm_engine_kwargs", None) or {},
            way=getattr(args, "vllm_adapter_sync", "auto"),
            folder=getattr(args, "vllm_adapter_dir", None) or os.path.join(os.path.abspath(args.output_dir), ".rollout_adapters"),
        )

    # --- overrides of GRPOTrainer ---

    def _generate_single_turn(self, *args, **kwargs):
        metrics = self._metrics["train" if self.model.training else "eval"]
        if self.use_vllm:
            generated = super()._generate_single_turn(*args, **kwargs)
            for sync in self.vllm_generation.syncs:
                metrics["adapter_sync/ms"].append(1000 * sync.seconds)
                metrics["adapter_sync/megabytes"].append(sync.bytes / 1e6)
            self.vllm_generation.syncs.clear()
            return generated
        gathers = self.args.world_size > 1 and self.sharding_request.fsdp
        recording = generating(self.model, self.temperature, autocast=self.accelerator.autocast, every_rank=gathers)
        with recording as sampled:
            completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
        logprobs_BT = sampled[-1].tolist()
        return completion_ids, [row[: len(ids)] for row, ids in zip(logprobs_BT, completion_ids, strict=True)]

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        # The reference pass turns the adapter off and on, and PEFT marks its tensors as frozen and trainable on the way.
        # Of a unit that is gathered in between, the marks stay on tensors that are not the optimizer's.
        sharding.reshard(self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self._trainable)
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logps_BT = result[0].detach()
        return result

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if "sampling_per_token_logps" in inputs:
            self._record_gap(inputs, self._logps_BT)
        return loss

    def _record_gap(self, inputs, logps_BT: torch.Tensor) -> None:
        """How far the policy that is trained is from the one that sampled, over all ranks."""
        mask_BT = inputs["completion_mask"].bool() & inputs.get("tool_mask", inputs["completion_mask"]).bool()
        gap_BT = (logps_BT - inputs["sampling_per_token_logps"]).abs()
        gap_N = gap_BT[mask_BT & ~gap_BT.isnan()]
        own = torch.stack([gap_N.sum(), gap_N.new_tensor(float(gap_N.numel())), gap_N.max() if len(gap_N) else gap_N.new_zeros(())])
        total_R3 = self.accelerator.gather(own).view(-1, 3)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["logprob_gap/mean"].append((total_R3[:, 0].sum() / total_R3[:, 1].sum().clamp(min=1)).item())
        metrics["logprob_gap/max"].append(total_R3[:, 2].max().item())

    def log(self, logs, start_time=None):
        metrics = self._metrics["train" if self.model.training else "eval"]
        if metrics:
            metrics["memory/peak_gib"].append(peak_memory(self.args.device))
        super().log(logs, start_time)

    def train(self, *args, **kwargs):
        result = super().train(*args, **kwargs)
        if self.args.should_save:
            draw_curves(self.state.log_history, os.path.join(self.args.output_dir, "grpo_curves.png"))
        return result

    # --- overrides of CheckpointMixin ---

    def _load_from_checkpoint(self, *args, **kwargs):
        super()._load_from_checkpoint(*args, **kwargs)
        self._last_loaded_step = -1  # TRL syncs when the step has changed, and here the adapter has without it


def _give_reference_the_dtype_of_the_adapter(model: PeftModel) -> None:
    """TRL's frozen copy is fp32 whatever the adapter is; computed in another dtype, the KL would not start at 0."""
    for name, parameter in model.named_parameters():
        if ".ref." in name:
            parameter.data = parameter.data.to(model.get_parameter(name.replace(".ref.", ".default.")).dtype)


def _on_meta(model) -> bool:
    return next(model.parameters()).device.type == "meta"


def _base_in_words(model: PeftModel) -> str:
    quantization = describe_quantization(model)
    if quantization is None:
        return str(model.get_base_model().dtype).removeprefix("torch.")
    double = ", double quantisation" if quantization.get("bnb_4bit_use_double_quant") else ""
    return f"bitsandbytes ({quantization.get('bnb_4bit_quant_type', '8 bit')}{double})"
