"""A vLLM server that serves one adapter, replaced as a whole at every sync.

The server is vLLM's own, started by the command in `server_command`; adapters reach it as files.
"""

import atexit
import contextlib
import os
import shutil
import uuid
from urllib.parse import urlparse

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from .logging import get_logger
from .lora_checks import engine_rank
from .served_adapter import ServedAdapter

logger = get_logger(__name__)

REPORT = "trl_fsdp_qlora.rollout_worker.AdapterReport"
DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16, "torch.float32": torch.float32}
LOAD_TIMEOUT = 600  # seconds; a large adapter on a slow file system


def server_command(model: str, rank: int, port: int = 8000) -> str:
    """The command that starts a server for adapters of `rank` on `model`, reachable from this machine only."""
    return (
        f"VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {model} --host 127.0.0.1 --port {port} "
        f"--enable-lora --max-lora-rank {engine_rank(rank)} --max-loras 1 --logprobs-mode processed_logprobs "
        f"--worker-extension-cls {REPORT}"
    )


class AdapterClient(VLLMClient):
    """TRL's client, without its weight transfer and without vLLM in this process.

    Generates with the model named in `model`: the base at first, later an adapter.
    """

    def __init__(self, base_url: str, timeout: float):
        # Not `super().__init__`, which demands that vLLM is installed here.
        self.base_url = base_url.rstrip("/")
        self.host = urlparse(base_url).hostname
        self.session = requests.Session()
        self.communicator = None
        self.check_server(timeout)
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]

    def load_adapter(self, name: str, path: str) -> None:
        answer = self.session.post(
            f"{self.base_url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, timeout=LOAD_TIMEOUT
        )
        if answer.status_code != 200:
            raise ValueError(
                f"The vLLM server at {self.base_url} could not load the adapter in {path} ({answer.status_code}: {answer.text.strip()}). "
                "It must be able to read that folder under the same path (`vllm_adapter_dir`)."
            )

    def unload_adapter(self, name: str) -> None:
        self.session.post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=LOAD_TIMEOUT)

    def adapter_reports(self) -> list[dict]:
        """Of every worker, what it found of the adapter that was loaded last."""
        return self._post(f"{self.base_url}/collective_rpc", json={"method": "newest_adapter_report"})["results"]


class ServerEngine:
    """Puts adapters into a vLLM server. Lives on rank 0.

    Args:
        folder: for the adapters' files; the server must see it under the same path.
        rank: of the adapters to come.

    Raises:
        ConnectionError: if no server answers within `timeout` seconds.
        ValueError: if the server was started without what is needed here; with the command to write.
    """

    def __init__(self, base_url: str, timeout: float, folder: str, model: str, rank: int):
        self._command = server_command(model, rank, urlparse(base_url).port or 8000)
        try:
            self.client = AdapterClient(base_url, timeout)
        except requests.ConnectionError:
            raise ConnectionError(
                f"No vLLM server answered at {base_url} within {timeout:g} s (`vllm_server_timeout`). Start it with: {self._command}"
            ) from None
        self.folder = os.path.abspath(folder)
        # Names of this run alone: the server's prefix cache tells adapters apart by name, and it outlives the run.
        self._run = uuid.uuid4().hex[:8]
        self._name: str | None = None
        config = self._check(rank)
        self.max_length = int(config["model_config"]["max_model_len"])
        self.dtype = DTYPES.get(str(config["lora_config"]["lora_dtype"]), torch.float32)
        self.base = {"quantization": config["model_config"]["quantization"], "dtype": str(config["model_config"]["dtype"])}
        atexit.register(self.close)

    def _check(self, rank: int) -> dict:
        problems = [
            f"`{variable}=1` in its environment"
            for path, variable in (
                ("/server_info", "VLLM_SERVER_DEV_MODE"),
                ("/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
            )
            # A path that is there but wants POST answers 405.
            if self.client.session.get(f"{self.client.base_url}{path}").status_code == 404
        ]
        config = None
        if not any("DEV_MODE" in problem for problem in problems):
            config = self.client.get_server_info()
            lora = config.get("lora_config")
            if lora is None:
                problems.append("`--enable-lora`")
            elif int(lora["max_lora_rank"]) < rank:
                problems.append(f"`--max-lora-rank {engine_rank(rank)}` (it has {lora['max_lora_rank']})")
            parallel = config["parallel_config"]
            if parallel.get("worker_extension_cls") != REPORT:
                problems.append(f"`--worker-extension-cls {REPORT}`, from this package installed beside it")
            if int(parallel.get("data_parallel_size", 1)) > 1:
                problems.append("one data-parallel replica: an adapter would reach only one of them")
        if problems:
            raise ValueError(
                f"The vLLM server at {self.client.base_url} was started without {', '.join(problems)}. Start it with: {self._command}"
            )
        return config

    def serve(self, adapter: ServedAdapter, version: int) -> dict:
        """Serve `adapter` from now on, under a name never used before. Returns what the engine found of it."""
        old, name = self._name, f"adapter-{self._run}-{version}"
        path = os.path.join(self.folder, name)
        adapter.write(path)
        self._name = name
        self.client.load_adapter(name, path)
        reports = self.client.adapter_reports()
        self.client.model = name
        self._withdraw(old)
        return min(reports, key=lambda report: report["matched"])

    def _withdraw(self, name: str | None) -> None:
        if name is not None:
            self.client.unload_adapter(name)
            shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def close(self) -> None:
        """Take the adapter back. The server goes on, with its base."""
        with contextlib.suppress(requests.RequestException):
            self._withdraw(self._name)
        self._name = None
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)
