"""What a checkpoint was trained on and with, written beside it and compared when it is resumed."""

import glob
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version

from peft import PeftModel
from torch import nn
from transformers.utils import cached_file

from . import __version__
from .staging import RECORD, write_json

# Raised whenever an older version of this package could misread what is written.
FORMAT_VERSION = 1
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
QUANTIZATION = ("quant_method", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def describe_base(model: PeftModel, revision: str | None = None) -> dict:
    """Name, revision, commit and fingerprint of the base checkpoint; `None` for what cannot be known."""
    base = model.get_base_model()
    name = getattr(base, "name_or_path", "") or getattr(base.config, "_name_or_path", "") or None
    commit = getattr(base.config, "_commit_hash", None)
    return {
        "name": name,
        "revision": revision,
        "commit": commit,
        "fingerprint": fingerprint(checkpoint_folder(name, commit or revision)) if name else None,
    }


def checkpoint_folder(name: str, revision: str | None = None) -> str | None:
    """The local folder of a model: itself, or its place in the hub's cache; nothing is downloaded."""
    if os.path.isdir(name):
        return name
    try:
        config = cached_file(name, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return os.path.dirname(config) if config else None


def fingerprint(folder: str | None) -> str | None:
    """A hash of the configuration and of the size, the head and samples of each weights file.

    Tells fine-tunes of one model apart, whose shapes and configurations are equal, and reads some 64 KiB a file.
    """
    if folder is None or not os.path.isfile(os.path.join(folder, "config.json")):
        return None
    digest = hashlib.sha256()
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        try:
            config = json.load(file)
        except json.JSONDecodeError:
            return None
    # Written anew by whoever loads and saves the same model.
    config = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(path for pattern in _WEIGHTS for path in glob.glob(os.path.join(glob.escape(folder), pattern))):
        size = os.path.getsize(path)
        digest.update(f"{os.path.basename(path)} {size}".encode())
        with open(path, "rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def describe_quantization(model: PeftModel) -> dict | None:
    """The settings that decide the numbers of the quantised base; `None` if it is not quantised."""
    config = getattr(model.get_base_model().config, "quantization_config", None)
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    described = {name: _text(values[name]) for name in QUANTIZATION if values.get(name) is not None}
    described["skipped_modules"] = sorted(values.get("llm_int8_skip_modules") or _plain_linears(model))
    return described


def _plain_linears(model: PeftModel) -> list[str]:
    names = [name for name, module in model.get_base_model().named_modules() if type(module) is nn.Linear]
    return [name.removesuffix(".base_layer") for name in names if ".lora_" not in name]


def _text(value):
    return value if isinstance(value, (bool, int, str)) else str(getattr(value, "value", value))


def write_record(folder: str, content: dict) -> None:
    """Write the record of `folder`, last of its files: it lists what must be there, and how long each file is."""
    files = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            # Not the tokenizer and the README: a resumed run does not read them, and people edit them.
            if name.endswith((".safetensors", ".pt")) or name in ("adapter_config.json", "trainer_state.json", "rng_state.json"):
                files[os.path.relpath(path, folder)] = os.path.getsize(path)
    versions = {"trl-fsdp-qlora": __version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    write_json(os.path.join(folder, RECORD), {"format_version": FORMAT_VERSION, "versions": versions, "files": files} | content)


def read_record(folder: str) -> dict | None:
    """The record of `folder`, or `None` if other tools wrote it.

    Raises:
        ValueError: if the record is damaged or from a newer version, or a file is missing or cut short.
    """
    path = os.path.join(folder, RECORD)
    if not os.path.isfile(path):
        return None
    record = read_json(path)
    written = record.get("format_version")
    if not isinstance(written, int) or written > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {written}, and this package reads up to {FORMAT_VERSION}. Install the version that "
            f"wrote it (trl-fsdp-qlora {record.get('versions', {}).get('trl-fsdp-qlora')}) or a newer one."
        )
    for name, size in record["files"].items():
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            raise ValueError(f"{file} is missing, so the checkpoint is not whole. Resume from another one.")
        if os.path.getsize(file) != size:
            raise ValueError(
                f"{file} is cut short or changed: it has {os.path.getsize(file)} bytes, and {size} were written. Resume from "
                "another checkpoint."
            )
    return record


def is_complete(folder: str) -> bool:
    """Whether `folder` is a checkpoint of ours with every file whole."""
    try:
        return read_record(folder) is not None
    except ValueError:
        return False


def read_json(path: str) -> dict:
    """A JSON object from a file; `ValueError` naming the file if it is missing or something else."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return value


def rows_per_step(args) -> dict[str, int]:
    return {
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "world_size": args.world_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }


def has_tokenizer(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "tokenizer_config.json"))
