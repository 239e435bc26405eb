"""A vLLM engine in the trainer's process that serves one adapter, replaced as a whole at every sync."""

import functools
import inspect
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.lora import LoraLayer
from torch import nn
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from . import rollout_worker
from .logging import get_logger
from .served_adapter import ServedAdapter

logger = get_logger(__name__)


class AdapterLLM(LLM):
    """`vllm.LLM` that uses the newest adapter for every request, and keeps its base through a sleep."""

    adapter_request: LoRARequest | None = None

    def generate(self, *args, **kwargs):
        return super().generate(*args, **{"lora_request": self.adapter_request, **kwargs})

    def sleep(self, level: int = 1, **kwargs):
        # Level 2, which TRL asks for, would drop the base, and nobody sends it again.
        return super().sleep(level=1, **kwargs)


@contextmanager
def engine_with(**arguments) -> Iterator[None]:
    """TRL's colocated engine becomes an `AdapterLLM` with these arguments beside TRL's own.

    Raises:
        ImportError: if TRL makes its engine some other way than it did when this was written.
    """
    from trl.generation import vllm_generation

    if getattr(vllm_generation, "LLM", None) is not LLM:
        raise ImportError("`trl.generation.vllm_generation.LLM` is not `vllm.LLM`: this TRL is outside the tested range, see setup.cfg.")

    @functools.wraps(LLM)
    def make(**trl_arguments):
        return AdapterLLM(**{**trl_arguments, **arguments})

    vllm_generation.LLM = make
    try:
        yield
    finally:
        vllm_generation.LLM = LLM


def check_bitsandbytes() -> None:
    """Raise `ValueError` if the installed vLLM has no bitsandbytes quantisation."""
    from vllm.model_executor.layers import quantization
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if "bitsandbytes" not in quantization.QUANTIZATION_METHODS:
        raise ValueError(
            "`vllm_base_quantization='bitsandbytes'`, but the installed vLLM cannot quantise with bitsandbytes (it can up to "
            "0.27). Install the package vllm-bnb-plugin beside it, or write 'none' for a 16-bit base."
        )


def text_only_arguments() -> dict:
    """What keeps towers out of an engine that gets no images or sound."""
    return {"language_model_only": True} if "language_model_only" in inspect.signature(EngineArgs).parameters else {}


def adapted_leaves_arguments(model: nn.Module) -> dict:
    """What keeps an engine from making room for adapters on layers that have none here, experts among them: memory, and
    kernels at every call."""
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {"lora_target_modules": sorted(leaves)} if "lora_target_modules" in inspect.signature(EngineArgs).parameters else {}


class ColocatedEngine:
    """Puts adapters into an `AdapterLLM`.

    Args:
        way: `"memory"`, `"file"`, or `"auto"` for memory where it works.
        folder: for the files of `"file"`.
    """

    def __init__(self, llm: AdapterLLM, way: str, folder: str):
        self.llm = llm
        self.way = way
        self.folder = folder
        self.max_length = llm.llm_engine.model_config.max_model_len

    def serve(self, adapter: ServedAdapter, version: int) -> dict:
        """Serve `adapter` from now on, under a name and a number never used before. Returns what the engine found of it.

        The name is new because the engine's prefix cache tells adapters apart by it, and the number because a request
        with a known number keeps the adapter that was loaded first.
        """
        name = f"adapter-{version}"
        # A request must name a path; with the adapter in the engine already, nobody reads it.
        request = LoRARequest(name, version, os.path.join(self.folder, name))
        if self.way in ("auto", "memory"):
            try:
                (report,) = self.llm.collective_rpc(rollout_worker.put_adapter, args=(version, adapter.tensors, adapter.config()))
            except (ImportError, AttributeError, TypeError) as error:
                if self.way == "memory":
                    raise
                logger.warning("This vLLM takes no adapter from memory (%s); it goes through files in %s.", error, self.folder)
                self.way = "file"
            else:
                self.way = "memory"
        if self.way == "file":
            report = self._serve_file(adapter, request)
        self.llm.adapter_request = request
        return report

    def _serve_file(self, adapter: ServedAdapter, request: LoRARequest) -> dict:
        adapter.write(request.lora_path)
        try:
            self.llm.llm_engine.add_lora(request)
            self.llm.collective_rpc(rollout_worker.drop_adapters, args=(request.lora_int_id,))
            (report,) = self.llm.collective_rpc(rollout_worker.adapter_report, args=(request.lora_int_id,))
        finally:
            shutil.rmtree(request.lora_path, ignore_errors=True)
        return report

    def close(self) -> None:
        pass
