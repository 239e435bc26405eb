"""What an adapter looks like on its way to an engine, and which adapters never get there. No engine needed."""

import json
import os

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from trl_fsdp_qlora.demo.models import tiny_gemma4, tiny_gemma4_model
from trl_fsdp_qlora.loading import inspect_checkpoint
from trl_fsdp_qlora.lora_checks import check_servable, engine_rank, largest_rank
from trl_fsdp_qlora.rollout import AdapterRollout, RolloutSettings, adapter_rollouts
from trl_fsdp_qlora.rollout_server import server_command
from trl_fsdp_qlora.served_adapter import gather_served_adapter
from trl_fsdp_qlora.targets import resolve_peft_config


@pytest.fixture(scope="module")
def skeleton(model_cache):
    return inspect_checkpoint(tiny_gemma4(str(model_cache / "gemma4"))).skeleton


def adapted(config: LoraConfig) -> PeftModel:
    model = tiny_gemma4_model(num_hidden_layers=3)
    model = get_peft_model(model, resolve_peft_config(model, config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


class TestServedAdapter:
    def test_names_are_those_of_a_peft_file(self, tmp_path):
        model = adapted(LoraConfig(r=4, lora_alpha=4, target_modules="all-linear"))
        served = gather_served_adapter(model, torch.float32)
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "adapter_model.safetensors")
        assert set(served.tensors) == set(saved) and served.modules == len(saved) // 2
        assert all(torch.equal(served.tensors[name], saved[name]) for name in saved)
        assert served.bytes == sum(tensor.numel() * 4 for tensor in saved.values())

    @pytest.mark.parametrize(
        "fields",
        [
            {"lora_alpha": 12},
            {"lora_alpha": 12, "use_rslora": True},
            {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"o_proj": 1}},
        ],
        ids=["alpha", "rank-stabilised", "patterns"],
    )
    def test_one_scale_for_all_modules(self, tmp_path, fields):
        """The engine knows one rank and one scale. Whatever PEFT's are, the file makes the same update."""
        model = adapted(LoraConfig(r=4, target_modules="all-linear", **fields)).eval()
        served = gather_served_adapter(model, torch.float32)
        served.write(str(tmp_path / "adapter"))
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["lora_alpha"] == config["r"] == served.rank == largest_rank(model.peft_config["default"])
        tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        for name, module in model.get_base_model().named_modules():
            if hasattr(module, "get_delta_weight"):
                a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
                torch.testing.assert_close(b @ a, module.get_delta_weight("default"))

    def test_dtype_and_equality(self):
        model = adapted(LoraConfig(r=4, target_modules=["q_proj"]))
        first, again = (gather_served_adapter(model, torch.bfloat16) for _ in range(2))
        assert first.equals(again) and not first.equals(None)
        assert {tensor.dtype for tensor in first.tensors.values()} == {torch.bfloat16}
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "lora_B" in n)[0, 0] += 1
        assert not first.equals(gather_served_adapter(model, torch.bfloat16))
        assert first.equals(again)  # a copy, not a view of what is trained

    def test_only_the_active_adapter(self):
        model = adapted(LoraConfig(r=4, target_modules=["q_proj"]))
        model.add_adapter("ref", model.peft_config["default"])
        served = gather_served_adapter(model, torch.float32)
        default = next(p for n, p in model.named_parameters() if n.endswith("q_proj.lora_B.default.weight"))
        assert torch.equal(next(t for n, t in served.tensors.items() if "lora_B" in n), default * 2)

    def test_a_folder_is_whole_or_absent(self, tmp_path, monkeypatch):
        served = gather_served_adapter(adapted(LoraConfig(r=2, target_modules=["q_proj"])), torch.float32)

        def full_disk(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("trl_fsdp_qlora.served_adapter.save_file", full_disk)
        with pytest.raises(OSError, match="No space"):
            served.write(str(tmp_path / "adapters" / "adapter"))
        assert os.listdir(tmp_path / "adapters") == []


class TestChecks:
    """Refused on the meta device, before a weight is read."""

    def check(self, skeleton, config, language_model_only=True):
        check_servable(skeleton, resolve_peft_config(skeleton, config, language_model_only=language_model_only))

    @pytest.mark.parametrize(
        "fields",
        [{}, {"r": 24}, {"r": 1}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 128}}, {"init_lora_weights": "gaussian"}],
    )
    def test_accepted(self, skeleton, fields):
        self.check(skeleton, LoraConfig(target_modules="all-linear", **fields))

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"use_dora": True}, "`use_dora=True`. Leave it out"),
            ({"bias": "all"}, "`bias='all'`. Write 'none'"),
            ({"lora_bias": True}, "lora_bias"),
            ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
            ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
            ({"r": 513}, "512 at most.*513"),
            ({"rank_pattern": {"q_proj": 600}}, "512 at most.*600"),
            ({"init_lora_weights": "pissa"}, "changes the base"),
            ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
            ({"target_parameters": ["q_proj.weight"]}, "target_parameters"),
        ],
    )
    def test_refused(self, skeleton, fields, said):
        with pytest.raises(ValueError, match=said):
            self.check(skeleton, LoraConfig(**{"target_modules": ["q_proj"], **fields}))

    def test_refused_places(self, skeleton):
        for targets, said in (
            ("all-linear", "tower or connector, such as 'model.vision_tower"),
            (["lm_head", "q_proj"], "the output head, such as 'lm_head'"),
            (["embed_tokens", "language_model.layers.0.self_attn.q_proj"], "an embedding, such as"),
        ):
            with pytest.raises(ValueError, match=said):
                self.check(skeleton, LoraConfig(target_modules=targets), language_model_only=False)

    def test_an_adapted_model(self):
        model = adapted(LoraConfig(r=4, target_modules=["q_proj"]))
        check_servable(model, model.peft_config["default"])
        base = tiny_gemma4_model(num_hidden_layers=3)
        model = get_peft_model(base, LoraConfig(target_modules=r".*vision_tower.*q_proj\.linear"))
        with pytest.raises(ValueError, match="2 adapters on a tower or connector"):
            check_servable(model, model.peft_config["default"])

    def test_another_kind_of_adapter(self, skeleton):
        from peft import PromptTuningConfig

        with pytest.raises(ValueError, match="not PromptTuningConfig"):
            check_servable(skeleton, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))

    def test_ranks_are_rounded_up(self):
        assert [engine_rank(rank) for rank in (1, 2, 8, 9, 16, 24, 200, 300, 512)] == [1, 8, 8, 16, 16, 32, 256, 320, 512]


def test_engine_ranks_are_those_of_vllm():
    lora = pytest.importorskip("vllm.config.lora", reason="needs vLLM, which the set 'vllm' has")
    from typing import get_args

    from trl_fsdp_qlora.lora_checks import ENGINE_RANKS

    assert get_args(lora.MaxLoRARanks) == ENGINE_RANKS


class TestSeam:
    """The one place where TRL's backend is exchanged."""

    SETTINGS = RolloutSettings(
        quantization=None, rank=16, max_rank=16, revision=None, text_only=True, engine_kwargs={}, way="auto", folder="x/adapters"
    )

    def test_only_within(self, tmp_path, monkeypatch):
        from trl.generation.vllm_generation import VLLMGeneration
        from trl.trainer import grpo_trainer

        monkeypatch.chdir(tmp_path)
        with adapter_rollouts(self.SETTINGS):
            assert grpo_trainer.VLLMGeneration.func is AdapterRollout
        assert grpo_trainer.VLLMGeneration is VLLMGeneration
        with adapter_rollouts(None):
            assert grpo_trainer.VLLMGeneration is VLLMGeneration

    def test_another_trl_is_named(self, monkeypatch):
        from trl.trainer import grpo_trainer

        monkeypatch.delattr(grpo_trainer, "VLLMGeneration")
        with pytest.raises(ImportError, match="trl.trainer.grpo_trainer.VLLMGeneration.*setup.cfg"):
            with adapter_rollouts(self.SETTINGS):
                pass


def test_the_server_command():
    command = server_command("some/model", rank=24, port=8001)
    assert "vllm serve some/model --host 127.0.0.1 --port 8001" in command and "--max-lora-rank 32" in command
    for part in ("VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--logprobs-mode processed_logprobs"):
        assert part in command
