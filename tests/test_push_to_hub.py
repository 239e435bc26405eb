"""`push_to_hub` as in TRL, against a local stand-in for the hub's HTTP interface."""

import base64
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers.utils.hub import PushInProgress

from trl_fsdp_qlora import QLoRASFTTrainer, checkpoint

SCRIPT = """
import sys
import torch
from tests.tiny import sft_config, token_rows
from trl_fsdp_qlora import QLoRASFTTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4

torch.set_num_threads(1)
out, strategy = sys.argv[1:]
layers = ["sliding_attention", "full_attention", "sliding_attention"]
base = tiny_gemma4(out + "-base", text_only=True, num_hidden_layers=3, num_kv_shared_layers=1, layer_types=layers)
args = sft_config(
    out, max_steps=2, save_strategy="steps", save_steps=1, push_to_hub=True, hub_model_id="someone/adapter", hub_token="hf_secret",
    hub_strategy=strategy, hub_always_push=True,
)
trainer = QLoRASFTTrainer(base, args, train_dataset=token_rows(8))
trainer.train()
trainer.push_to_hub(dataset_name="trl-lib/Capybara")
"""


class Hub(BaseHTTPRequestHandler):
    """Takes every upload and notes it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path.endswith("/repos/create"):
            answer = {"url": f"http://{self.headers['Host']}/someone/adapter", "name": "someone/adapter", "id": "1"}
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in files]}
        elif "/commit/" in path:
            lines = [json.loads(line) for line in body.decode().splitlines()]
            files = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}
            summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            self.server.commits.append((summary, files))
            answer = {"commitOid": "0" * 40, "commitUrl": f"http://{self.headers['Host']}/someone/adapter/commit/0", "success": True}
        elif path.endswith("/validate-yaml"):
            answer = {"errors": [], "warnings": []}
        else:
            answer = {}
        self.server.tokens.add(self.headers.get("authorization"))
        self.reply(answer)

    def do_GET(self):
        self.reply({"id": "someone/adapter", "sha": "0" * 40, "siblings": [], "name": "someone", "type": "user"})

    do_HEAD = do_GET

    def reply(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.commits, server.tokens = [], set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_failed_upload_is_said(monkeypatch):
    job = Future()
    job.set_exception(OSError("connection lost"))
    trainer = QLoRASFTTrainer.__new__(QLoRASFTTrainer)
    trainer.push_in_progress = PushInProgress([job])
    said = []
    monkeypatch.setattr(checkpoint.logger, "warning", lambda message, *values: said.append(message % values))
    trainer._finish_current_push()
    assert said == ["An upload to the hub failed: OSError: connection lost"] and trainer.push_in_progress is None


@pytest.mark.parametrize("strategy", ["end", "every_save", "all_checkpoints"])
def test_the_adapter_is_pushed_as_trl_pushes(hub, tmp_path, strategy):
    out = tmp_path / "run"
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "*", "CI": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", SCRIPT, str(out), strategy]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]

    summary, files = hub.commits[-1]
    assert summary == "End of training"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md", "qlora_state.json"} <= set(files)
    assert files["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "trl-lib/Capybara" in card and "trained with SFT" in card
    assert not any(name.startswith(("_", "checkpoint-")) for name in files)
    assert not any(b"hf_secret" in content for _, files in hub.commits for content in files.values())

    assert hub.tokens == {"Bearer hf_secret"}

    saves = [(summary, files) for summary, files in hub.commits if summary.startswith("Training in progress")]
    if strategy == "end":
        assert saves == []
    if strategy == "every_save":
        assert [summary for summary, _ in saves] == ["Training in progress, step 1", "Training in progress, step 2"]
        assert all("adapter_model.safetensors" in files for _, files in saves)
    if strategy == "all_checkpoints":
        whole = {name: files for summary, files in saves if summary.endswith(", checkpoint") for name in {next(iter(files)).split("/")[0]}}
        assert set(whole) == {"checkpoint-1", "checkpoint-2"}
        names = set(os.listdir(out / "checkpoint-2"))
        assert {name.partition("/")[2] for name in whole["checkpoint-2"]} == names and "optimizer.safetensors" in names
