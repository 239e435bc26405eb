"""Supervised fine-tuning in 4 bit."""

import gc
import os

import torch
from datasets import Dataset, IterableDataset
from trl import SFTConfig, SFTTrainer
from trl.data_utils import get_dataset_column_names
from trl.models import get_act_offloading_ctx_manager
from trl.trainer.utils import get_config_model_id

from .base_trainer import QLoRATrainerMixin
from .chat_masks import add_assistant_masks, needs_rendered_masks
from .config import QLoRASFTConfig
from .data_checks import check_chat_template, check_chat_template_path, check_present, check_rows, has_images
from .kernels.fusing import replays_of
from .processing import load_processing_class
from .token_checks import check_token_rows


class QLoRASFTTrainer(QLoRATrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` whose model is 4-bit, carries adapters on its language model only, and is laid over ranks.

    Takes what `trl.SFTTrainer` takes. Data preparation, the loss, metrics, logging, evaluation and callbacks are
    TRL's, unchanged. Different:

    - a model name is loaded in 4 bit as `QLoRASFTConfig` says (or as `quantization_config` says), each part on its
      device, and gets LoRA adapters on the language model (or those of `peft_config`);
    - a model instance or `PeftModel` is taken as it is;
    - several ranks are FSDP2 units, or replicas, as the accelerate configuration says; one rank wraps nothing;
    - adapters are held in fp32 (`adapter_dtype`), and only they are saved;
    - `assistant_only_loss=True` works for chat templates without generation markers, such as Gemma 4's.

    Overridden of `SFTTrainer`: `__init__`, `_prepare_dataset` for the last point, `training_step` and `prediction_step`, which make room.

    Raises:
        ValueError: for input that cannot work, before any weight is read.
    """

    def __init__(
        self,
        model,
        args=None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        compute_loss_func=None,
        compute_metrics=None,
        callbacks=None,
        optimizers=(None, None),
        optimizer_cls_and_kwargs=None,
        preprocess_logits_for_metrics=None,
        quantization_config=None,
        peft_config=None,
        formatting_func=None,
    ):
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = QLoRASFTConfig(f"{name.split('/')[-1]}-SFT")
        elif not isinstance(args, SFTConfig):
            args = QLoRASFTConfig(**{**args.to_dict(), "hub_token": args.hub_token})
        datasets = {"train_dataset": train_dataset, **_named(eval_dataset)}
        prepared_by_user = formatting_func is not None or (args.dataset_kwargs or {}).get("skip_prepare_dataset")
        for name, dataset in datasets.items():
            if prepared_by_user:
                check_present(dataset, name)
            else:
                masks = {"completion_only_loss": args.completion_only_loss, "assistant_only_loss": args.assistant_only_loss}
                check_rows(dataset, name, args.dataset_text_field, **masks)
        check_chat_template_path(args.chat_template_path)
        if processing_class is None:
            processing_class = load_processing_class(model, args, wants_images=has_images(train_dataset))
        if not prepared_by_user:
            for name, dataset in datasets.items():
                check_chat_template(dataset, name, processing_class, args.chat_template_path)
        brings_tokens = args.chat_template_path is not None and not os.path.isfile(args.chat_template_path)
        self._tokens_to_check = {} if prepared_by_user or brings_tokens else datasets
        self._masks_from_rendering = args.assistant_only_loss and needs_rendered_masks(processing_class)
        made = self.make(model, args, quantization_config, peft_config)
        with self._trl_init(made, args), _assistant_only_loss_done_here(args, self._masks_from_rendering):
            super().__init__(
                model=made.model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                peft_config=made.peft_config,
                formatting_func=formatting_func,
            )
        labelled = isinstance(self.train_dataset, Dataset) and "labels" in self.train_dataset.column_names
        if labelled and not self._skip_prepare_dataset and not _has_token_to_predict(self.train_dataset):
            raise ValueError(
                "No row of `train_dataset` has a token to train on: every label is masked, cut off by "
                f"`max_length={args.max_length}`, or the first of its row, which nothing predicts. Raise `max_length`, or check "
                "completions and `assistant_only_loss`."
            )
        # TRL's loss divides by the tokens of the whole step when it is told their number. transformers tells it only
        # for models whose own forward would, and Gemma 4's says no: steps with rows of unequal length would then
        # depend on how rows fall into micro-batches and ranks.
        self.model_accepts_loss_kwargs = True
        self.finish(made)
        if (replays := replays_of(self.model)) is not None:
            replays.steps_are_repeated = args.world_size == 1

    def training_step(self, *args, **kwargs):
        return self.within_memory(super().training_step, *args, **kwargs)

    def prediction_step(self, *args, **kwargs):
        return self.within_memory(super().prediction_step, *args, **kwargs)

    def within_memory(self, step, *args, **kwargs):
        """Take a step again, should it run out of memory while CUDA graphs hold some, or are recorded: without what they keep,
        then without them.

        Several ranks cannot repeat a step, because the others have gone on.
        """
        replays = replays_of(self.model)
        while True:
            may_repeat = replays is not None and replays.steps_are_repeated and replays.may_hold_memory
            attempt = _Attempt(self) if may_repeat else None
            given_back = replays.given_back if may_repeat else 0
            try:
                result = step(*args, **kwargs)
            except torch.OutOfMemoryError:
                if attempt is None or not (replays.hold_memory or replays.given_back > given_back):
                    raise
            else:
                if attempt is not None:
                    attempt.succeeded()
                return result
            self.forget_failed_step()
            attempt.failed()
            if replays.hold_memory:
                replays.make_way("a step ran out of memory.")

    def forget_failed_step(self) -> None:
        """Let go of what a step has left behind that ran out of memory."""
        if self.args.activation_offloading:  # interrupted, it holds on to its tensors
            self.maybe_activation_offload_context = get_act_offloading_ctx_manager(model=self.model)
        gc.collect()
        if self.args.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_before_loading(self, model, peft_config):
        """Tokens that the model does not know; TRL's data preparation would not notice."""
        vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
        for name, dataset in self._tokens_to_check.items():
            if "input_ids" in get_dataset_column_names(dataset):
                check_token_rows(dataset, name, vocabulary)
        self._tokens_to_check = {}

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        """TRL's preparation, with assistant masks found by rendering where the chat template marks none."""
        if self._masks_from_rendering and "input_ids" not in (dataset.column_names or []):
            dataset = add_assistant_masks(
                dataset,
                processing_class,
                completion_only=args.completion_only_loss is not False,
                num_proc=args.dataset_num_proc if isinstance(dataset, Dataset) else None,
                desc=f"Finding assistant tokens in {dataset_name} dataset",
            )
        return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)


def _has_token_to_predict(dataset: Dataset) -> bool:
    """Whether a label of a row is not masked. That of its first token does not count: nothing comes before to predict it from."""
    return any(label != -100 for row in dataset.select_columns(["labels"]).with_format(None) for label in row["labels"][1:])


def _named(eval_dataset) -> dict[str, Dataset | IterableDataset]:
    if eval_dataset is None:
        return {}
    if isinstance(eval_dataset, dict):
        return {f"eval_dataset[{key!r}]": dataset for key, dataset in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


class _Attempt:
    """A step that may have to be taken back: gradients of earlier micro-batches are set aside, and metrics noted."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.trained = [p for p in trainer.model.parameters() if p.requires_grad]
        self.gradients = [p.grad for p in self.trained]
        for parameter in self.trained:
            parameter.grad = None
        self.tokens = trainer._total_train_tokens
        self.metrics = {mode: {name: list(values) for name, values in found.items()} for mode, found in trainer._metrics.items()}

    def succeeded(self) -> None:
        """Gradients of the step come on top of those before it."""
        new = [p.grad for p in self.trained]
        both = [(g, before) for g, before in zip(new, self.gradients, strict=True) if g is not None and before is not None]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        for parameter, before in zip(self.trained, self.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = before

    def failed(self) -> None:
        for parameter, before in zip(self.trained, self.gradients, strict=True):
            parameter.grad = before
        self.trainer._total_train_tokens = self.tokens
        for mode, found in self.metrics.items():
            self.trainer._metrics[mode].clear()
            self.trainer._metrics[mode].update(found)


class _assistant_only_loss_done_here:
    """TRL refuses `assistant_only_loss` for a template without markers before it prepares the data."""

    def __init__(self, args, active: bool):
        self.args, self.active = args, active

    def __enter__(self):
        if self.active:
            self.args.assistant_only_loss = False

    def __exit__(self, *exc_info):
        if self.active:
            self.args.assistant_only_loss = True
