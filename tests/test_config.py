"""What the fields mean, and what they refuse, before anything is loaded."""

import sys

import pytest
import torch
from transformers import BitsAndBytesConfig
from trl import SFTConfig, TrlParser

from trl_fsdp_qlora import QLoRASFTConfig
from trl_fsdp_qlora.arguments import one_quantization
from trl_fsdp_qlora.config import QLoRAArguments
from trl_fsdp_qlora.precision import choose_supported_precision, compute_dtype, storage_dtype


def make(tmp_path, **fields):
    return QLoRASFTConfig(str(tmp_path), use_cpu=True, report_to=[], **fields)


def test_a_drop_in_for_trls_config(tmp_path):
    config = make(tmp_path, max_length=77, packing=True, learning_rate=3e-4)
    assert isinstance(config, SFTConfig)
    assert (config.max_length, config.packing, config.learning_rate, config.bf16) == (77, True, 3e-4, True)
    assert config.gradient_checkpointing and config.gradient_checkpointing_kwargs["use_reentrant"] is False


def test_every_field_of_trl_keeps_its_default(tmp_path):
    ours, theirs = make(tmp_path).to_dict(), SFTConfig(str(tmp_path), use_cpu=True, report_to=[]).to_dict()
    changed = {name for name in theirs if ours[name] != theirs[name]} - {"logging_dir"}
    assert changed <= {"gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bnb_4bit_quant_type": "nf5"}, ["'nf5'", "'nf4'", "'fp4'"]),
        ({"bnb_4bit_compute_dtype": "int8"}, ["'int8'", "'bfloat16'"]),
        ({"bnb_4bit_quant_storage": "int4"}, ["'int4'", "'uint8'"]),
        ({"adapter_dtype": "float16"}, ["'float16'", "'float32'"]),
        ({"tower_device": "gpu"}, ["'gpu'", "'accelerator'"]),
        ({"lora_r": 0}, ["lora_r=0", "16"]),
        ({"lora_dropout": 1.5}, ["1.5"]),
        ({"lora_alpha": 0}, ["lora_alpha=0", "32"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha=nan"]),
        ({"mlp_tile_size": -1}, ["mlp_tile_size=-1"]),
        ({"lora_target_modules": []}, ["'all-linear'"]),
        ({"lora_target_modules": ""}, ["'all-linear'"]),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, ["use_reentrant", "share keys"]),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, ["'offload': True", "activation_offloading=True", "fused=False"]),
        ({"activation_offloading": True}, ["activation_offloading=True", "CPU", "Leave it out"]),
        ({"keep_activations": True, "gradient_checkpointing": False}, ["keep_activations=True", "gradient_checkpointing=False"]),
        ({"keep_activations": True, "fused": False}, ["keep_activations=True", "fused=False"]),
        ({"max_length": -5}, ["max_length=-5", "at least 2"]),
        ({"max_length": 1}, ["max_length=1", "at least 2"]),
        ({"max_length": "512"}, ["max_length='512'"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps=0", "at least 1"]),
        ({"gradient_accumulation_steps": -2}, ["gradient_accumulation_steps=-2", "at least 1"]),
        ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size=0"]),
        ({"num_train_epochs": -1}, ["num_train_epochs=-1"]),
        ({"learning_rate": float("nan")}, ["learning_rate=nan"]),
        ({"pad_to_multiple_of": 0}, ["pad_to_multiple_of=0"]),
        ({"keep_activations": "auto"}, ["keep_activations='auto'", "True or False"]),
    ],
)
def test_refused(tmp_path, fields, said):
    with pytest.raises(ValueError) as error:
        make(tmp_path, **fields)
    assert all(part in str(error.value) for part in said)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        *(("lora_r", value, "a whole number, such as 16") for value in ("8", None, 8.5, True)),
        *(("mlp_tile_size", value, "a whole number, such as 4096") for value in ("512", None, 1.5)),
        *(("lora_alpha", value, "a number, such as 32") for value in ("x", None, True)),
        *(("lora_dropout", value, "a number, such as 0.0") for value in ("0.1", None)),
        *((name, "no", "True or False") for name in ("load_in_4bit", "language_model_only", "fused", "force_resume")),
        ("bnb_4bit_use_double_quant", None, "True or False"),
        *(("lora_target_modules", value, "a list of strings") for value in (5, ["q_proj", 5], [["q_proj"]])),
        ("lora_exclude_modules", {"q_proj": 1}, "a list of strings"),
        ("attn_implementation", 5, "'sdpa'"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path, field, value, wanted):
    with pytest.raises(ValueError) as error:
        make(tmp_path, **{field: value})
    assert f"`{field}={value!r}` is of the type {type(value).__name__}" in str(error.value) and wanted in str(error.value)


def test_types_that_do(tmp_path):
    names = {"lora_target_modules": {"q_proj"}, "lora_exclude_modules": ("k_proj",)}
    config = make(tmp_path, lora_alpha=8.5, lora_dropout=0, mlp_tile_size=0, **names)
    assert (config.lora_alpha, config.lora_dropout, config.mlp_tile_size) == (8.5, 0, 0)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["all-linear"], "all-linear"),
        (["q_proj"], ["q_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        ([r".*\.q_proj"], r".*\.q_proj"),
        (r".*\.q_proj", r".*\.q_proj"),
        ("q_proj", "q_proj"),
    ],
)
def test_one_value_on_a_command_line_is_what_it_says(tmp_path, given, kept):
    assert make(tmp_path, lora_target_modules=given).lora_target_modules == kept


@pytest.mark.parametrize("given", [None, [], "", [""]])
def test_excluding_nothing(tmp_path, given):
    assert not make(tmp_path, lora_exclude_modules=given).lora_exclude_modules


def test_command_line_and_file(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text("lora_r: 4\nlora_target_modules: [q_proj, v_proj]\nload_in_4bit: false\n")
    monkeypatch.setattr(sys, "argv", ["x"])
    line = f"--config {file} --output_dir {tmp_path} --use_cpu --report_to none --lora_r 5"
    (config,) = TrlParser(QLoRASFTConfig).parse_args_and_config(line.split())
    assert (config.lora_r, config.lora_target_modules, config.load_in_4bit) == (5, ["q_proj", "v_proj"], False)
    line = f"--output_dir {tmp_path} --use_cpu --report_to none --lora_exclude_modules k_proj o_proj"
    (config,) = TrlParser(QLoRASFTConfig).parse_args_and_config(line.split())
    assert config.lora_target_modules == "all-linear" and config.lora_exclude_modules == ["k_proj", "o_proj"]


def test_dtypes_follow_the_precision(tmp_path):
    for fields, dtype in (({}, torch.bfloat16), ({"bf16": False, "fp16": False}, torch.float32)):
        config = make(tmp_path, **fields)
        assert compute_dtype(config) == dtype and storage_dtype(config, dtype) == dtype
    config = make(tmp_path, bf16=False, bnb_4bit_compute_dtype=torch.bfloat16)
    assert compute_dtype(config) == torch.bfloat16
    with pytest.raises(ValueError, match="contradicts `bf16=True`"):
        compute_dtype(make(tmp_path, bnb_4bit_compute_dtype="float16"))
    with pytest.raises(ValueError, match="Packed 4-bit storage is float16"):
        storage_dtype(make(tmp_path, bnb_4bit_quant_storage="float16"), torch.bfloat16)
    assert storage_dtype(make(tmp_path, bnb_4bit_quant_storage="uint8"), torch.bfloat16) == torch.uint8


class TestCardsWithoutBf16:
    """T4 and V100: `torch.cuda.is_bf16_supported()` says yes there, because it counts emulation."""

    @pytest.fixture(autouse=True)
    def old_card(self, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")

    def precision(self, **fields):
        class Args:
            use_cpu, bf16, fp16 = False, None, False

        args = Args()
        for name, value in fields.items():
            setattr(args, name, value)
        choose_supported_precision(args)
        return args.bf16, args.fp16

    def test_fp16_throughout(self):
        assert self.precision() == (False, True)

        class Args(QLoRAArguments):
            bf16, fp16 = False, True

        assert compute_dtype(Args()) == torch.float16 == storage_dtype(Args(), torch.float16)

    def test_bf16_is_refused(self):
        with pytest.raises(ValueError, match="Tesla T4 has no native bf16.*fp16=True"):
            self.precision(bf16=True)


def test_without_an_accelerator_the_cpu_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = QLoRASFTConfig(str(tmp_path), report_to=[])
    assert config.use_cpu and config.bf16


@pytest.mark.parametrize("given", ["nf4", {}, {"load_in_4bit": False}, BitsAndBytesConfig()])
def test_a_quantization_that_is_none_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match="`quantization_config.*load_in_4bit=True"):
        one_quantization(make(tmp_path), given, None)
