"""Rollouts by a vLLM engine that shares nothing with the trainer but the adapter.

TRL merges the adapter into its base and sends the engine every weight. On a 4-bit base that changes the base at each
sync, and fails where it is sharded. Here the engine has the base from the checkpoint, and only the adapter moves.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl.generation.vllm_generation import VLLMGeneration

from .logging import get_logger
from .served_adapter import ServedAdapter, gather_served_adapter

logger = get_logger(__name__)


@dataclass(frozen=True)
class RolloutSettings:
    """What TRL does not hand to its generation backend.

    Attributes:
        quantization: of a colocated engine's base, as vLLM calls it; `None` for 16 bit.
        rank: the largest rank of the adapter.
        max_rank: the rank the engine builds buffers for.
        revision: of the checkpoint.
        text_only: no row has an image or sound.
        engine_kwargs: further arguments of a colocated engine.
        way: see `ColocatedEngine`.
        folder: for adapters that go through files.
    """

    quantization: str | None
    rank: int
    max_rank: int
    revision: str | None
    text_only: bool
    engine_kwargs: dict
    way: str
    folder: str


@dataclass(frozen=True)
class Sync:
    """One adapter's way to the engine."""

    version: int
    seconds: float
    bytes: int


class AdapterRollout(VLLMGeneration):
    """`trl.generation.vllm_generation.VLLMGeneration` that moves the adapter alone.

    Overridden: `_init_vllm` (the engine is made for adapters), `sync_weights`, and `generate` (prompts are measured
    first). What a prompt becomes and how completions are spread over ranks is TRL's.

    Attributes:
        syncs: those since somebody last took them, newest last.
    """

    def __init__(self, *args, settings: RolloutSettings, **kwargs):
        self.settings = settings
        self.version = 0
        self.syncs: list[Sync] = []
        self._served: ServedAdapter | None = None
        super().__init__(*args, **kwargs)

    def _init_vllm(self):
        if self.mode == "server":
            self._connect()
        else:
            self._start_engine()

    def _start_engine(self) -> None:
        from .rollout_engine import ColocatedEngine, adapted_leaves_arguments, engine_with, text_only_arguments

        settings = self.settings
        dtype = self.model.dtype
        arguments = {
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": settings.quantization,
            "enable_lora": True,
            "max_lora_rank": settings.max_rank,
            "max_loras": 1,
            "revision": settings.revision,
            "tokenizer_revision": settings.revision,
            **adapted_leaves_arguments(self.model),
            **(text_only_arguments() if settings.text_only else {}),
            **settings.engine_kwargs,
        }
        with engine_with(**arguments):
            super()._init_vllm()
        self.engine = ColocatedEngine(self.llm, settings.way, settings.folder)
        self.max_length = self.engine.max_length
        self.adapter_dtype = self.llm.llm_engine.vllm_config.lora_config.lora_dtype
        self.base_dtype, self.base_quantization = self.llm.llm_engine.model_config.dtype, settings.quantization

    def _connect(self) -> None:
        from .rollout_server import ServerEngine

        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.engine, failure, found = None, None, None
        if self.accelerator.is_main_process:
            try:
                settings = self.settings
                self.engine = ServerEngine(url, self.server_timeout, settings.folder, self.model.name_or_path, settings.rank)
                self.vllm_client = self.engine.client
                found = (self.engine.max_length, self.engine.dtype, self.engine.base)
            except Exception as error:
                failure = error
        found = self._raise_together(failure, found)
        self.max_length, self.adapter_dtype, base = found
        self.base_dtype, self.base_quantization = base["dtype"], base["quantization"]

    def sync_weights(self):
        """Give the engine the adapter as it is now, unless it has it. Call it on all ranks.

        Raises:
            ValueError: if the engine's model lacks modules that the adapter has; it names them.
        """
        self._wake()
        start = time.perf_counter()
        adapter = gather_served_adapter(self.model, self.adapter_dtype)
        if adapter.equals(self._served):
            return
        self.version += 1
        if self.mode == "server":
            report, failure = None, None
            if self.engine is not None:
                try:
                    report = self.engine.serve(adapter, self.version)
                except Exception as error:
                    failure = error
            report = self._raise_together(failure, report)
        else:
            report = self.engine.serve(adapter, self.version)
        _check_report(report, adapter)
        self._served = adapter
        if adapter.tensors and next(iter(adapter.tensors.values())).is_cuda:
            torch.cuda.synchronize()
        self.syncs.append(Sync(self.version, time.perf_counter() - start, adapter.bytes))

    def generate(self, prompts, images, num_generations, profiler=None):
        """Completions of `prompts` by the policy that was synced last; see TRL's.

        Raises:
            ValueError: on every rank, if a prompt leaves the engine no room for a completion.
        """
        longest = max(gather_object([max(map(len, prompts), default=0)]))
        if longest >= self.max_length:
            raise ValueError(
                f"A prompt has {longest} tokens, and the engine takes {self.max_length} of prompt and completion together. "
                + (
                    "Start the server with a larger `--max-model-len`"
                    if self.mode == "server"
                    else "Write a larger `vllm_max_model_length`"
                )
                + ", or leave out such prompts."
            )
        if longest + self.max_completion_length > self.max_length and not getattr(self, "_told_of_room", False):
            self._told_of_room = True
            logger.warning(
                "A prompt of %d tokens and `max_completion_length=%d` exceed the engine's %d: its completions end early.",
                longest, self.max_completion_length, self.max_length,
            )  # fmt: skip
        return super().generate(prompts, images, num_generations, profiler or nullcontext())

    def _wake(self) -> None:
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def _raise_together(self, failure: Exception | None, value):
        """What rank 0 has as `value`, on every rank; or its failure, on every rank, so that none waits for it."""
        (told,) = broadcast_object_list([(None if failure is None else f"{type(failure).__name__}: {failure}", value)], from_process=0)
        if failure is not None:
            raise failure
        if told[0] is not None:
            raise RuntimeError(f"Rank 0 failed: {told[0]}")
        return told[1]


def _check_report(report: dict, adapter: ServedAdapter) -> None:
    """Raise `ValueError` unless the engine found every module of `adapter`."""
    if report["matched"] == adapter.modules and not report["unmatched"]:
        return
    names = ", ".join(report["unmatched"]) or "none that it names"
    raise ValueError(
        f"The engine found {report['matched']} of the adapter's {adapter.modules} modules and would serve the others without an "
        f"adapter. It has no: {names}. Leave them out of `target_modules`, or write `use_vllm=False`."
    )


@contextmanager
def adapter_rollouts(settings: RolloutSettings | None) -> Iterator[None]:
    """Around `GRPOTrainer.__init__`: the generation backend it makes is an `AdapterRollout`. `None` changes nothing.

    TRL makes the backend by its name and takes none from outside.

    Raises:
        ImportError: naming what this TRL lacks.
    """
    if settings is None:
        yield
        return
    from trl.trainer import grpo_trainer

    lacking = [name for name in ("_init_vllm", "sync_weights", "generate") if not hasattr(VLLMGeneration, name)]
    if getattr(grpo_trainer, "VLLMGeneration", None) is not VLLMGeneration:
        lacking.append("trl.trainer.grpo_trainer.VLLMGeneration")
    if lacking:
        raise ImportError(f"TRL lacks {', '.join(lacking)}: this version is outside the tested range, see setup.cfg.")
    os.makedirs(os.path.dirname(os.path.abspath(settings.folder)), exist_ok=True)
    grpo_trainer.VLLMGeneration = partial(AdapterRollout, settings=settings)
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = VLLMGeneration


def report_base_difference(rollout: AdapterRollout, training_base: str, corrected: bool) -> None:
    """Say once that rollouts and training run on different bases, if they do."""
    dtype = str(rollout.base_dtype).removeprefix("torch.")
    rollout_base = dtype if rollout.base_quantization is None else f"{rollout.base_quantization} (nf4, double quantisation)"
    if rollout_base == training_base:
        return
    how = (
        "The difference is corrected for by importance sampling (`vllm_importance_sampling_correction`)"
        if corrected
        else "Nothing corrects for the difference: `vllm_importance_sampling_correction` is off"
    )
    logger.warning(
        "Rollouts run on the base in %s, training on it in %s: two slightly different policies. %s; watch `logprob_gap/mean`.",
        rollout_base, training_base, how,
    )  # fmt: skip
