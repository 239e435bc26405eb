"""Merge an adapter into a 16-bit checkpoint that any tool loads.

    python -m trl_fsdp_qlora.export outputs/sft merged
    python -m trl_fsdp_qlora.export outputs/sft merged --mode dequantized --base google/gemma-4-E2B-it

Files are read, merged and written tensor by tensor, without an accelerator. Two ways:

- `original` adds the adapter to the 16-bit weights as published. The adapter learned beside weights rounded to 4 bit, so
  what it learned of that rounding is then wrong.
- `dequantized` adds it to the weights after their rounding, which is what it was trained beside.

How far each is from the unmerged model is measured on sample text and printed, so that one can choose.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from huggingface_hub import ModelCard, snapshot_download
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl.trainer.utils import generate_model_card

from . import provenance, staging
from .adapter_files import read_adapter_config
from .differences import base_differences
from .drift import SAMPLE_TEXTS, Drift
from .loading import quantization_from
from .logging import get_logger
from .merging import MODES, MergedWeights
from .precision import DTYPES
from .raw_tensors import INDEX, weight_files

logger = get_logger(__name__)

# Files of the base that the merge makes anew or that hold weights in another form; all others are copied.
NOT_FROM_BASE = (".safetensors", INDEX, ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".md")
# Files of the adapter that go over the base's: how the run spelt its text.
FROM_ADAPTER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template", "processor_config", "preprocessor")


@dataclass(frozen=True)
class Merged:
    """What `merge` wrote.

    Attributes:
        folder: the merged checkpoint.
        mode: `"original"` or `"dequantized"`.
        adapted: names of the parameters that the adapter went into.
        drift: for each mode, how far it is from the unmerged model; empty if it was not measured.
    """

    folder: str
    mode: str
    adapted: list[str]
    drift: dict[str, Drift] = field(default_factory=dict)


def merge(
    adapter: str,
    output: str,
    *,
    base: str | None = None,
    mode: str = "original",
    compare: bool = True,
    texts: tuple[str, ...] = SAMPLE_TEXTS,
    dataset: str | None = None,
    force: bool = False,
) -> Merged:
    """Merge the LoRA adapter in folder `adapter` into its base and write a whole checkpoint to `output`.

    Args:
        base: folder or model id of the 16-bit base; by default the one that the adapter names.
        compare: load the 4-bit model and measure how far each merge is from it, on `texts`.
        dataset: named in the model card.
        force: go on although `base` is not what the adapter was trained on.

    Raises:
        ValueError: for an adapter or a base that cannot be merged, before anything is written.
        OSError: if the output cannot be written; nothing is left of it then.
    """
    if mode not in MODES:
        raise ValueError(f"`mode={mode!r}` is unknown: write one of {', '.join(map(repr, MODES))}.")
    if os.path.exists(output) and (not os.path.isdir(output) or os.listdir(output)):
        raise ValueError(f"{output} exists and is not empty. Choose another folder.")
    config = read_adapter_config(adapter)
    record = provenance.read_record(adapter)
    base = base or config.base_model_name_or_path
    if not base:
        raise ValueError(f"{adapter} does not name its base model. Write it as `base`.")
    folder = _base_folder(base, config.revision)
    _check_base(folder, base, adapter, record, force)
    quantization, dtype = _how_trained(record, folder)
    if mode == "dequantized" and quantization is None:
        raise ValueError(f"{adapter} was trained on a base that is not quantised to 4 bit. Write `mode='original'`.")
    weights = MergedWeights(folder, adapter, quantization, dtype)
    drifts = weights.measure(texts) if compare else {}
    _write(weights, output, mode, partial(_write_rest, folder, adapter, base, config, record, dataset, os.path.basename(output)))
    return Merged(output, mode, weights.adapter.parameters, drifts)


def _base_folder(base: str, revision: str | None) -> str:
    folder = provenance.checkpoint_folder(base, None if os.path.isdir(base) else revision)
    if folder is not None and os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    if os.path.isdir(base):
        raise ValueError(f"{base} has no config.json. Write the folder or model id of the 16-bit base as `base`.")
    try:
        return snapshot_download(base, revision=revision, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
    except Exception as error:
        raise ValueError(
            f"Base model {base!r} is neither a folder here nor could it be fetched: {str(error).splitlines()[0]} Write another place "
            "of the same model as `base`."
        ) from error


def _check_base(folder: str, base: str, adapter: str, record: dict | None, force: bool) -> None:
    if record is None:
        logger.warning("%s does not record what it was trained on: nothing tells whether %s is that.", adapter, base)
        return
    here = {"name": base, "commit": None, "fingerprint": provenance.fingerprint(folder)}
    differences = base_differences(record["base"], here)
    if not differences:
        return
    what = f"{adapter} was trained on another {differences[0]}."
    if not force:
        raise ValueError(f"{what} Write the right one as `base`, or `force=True` (`--force`) to merge regardless.")
    logger.warning("%s Going on, because `force=True`.", what)


def _how_trained(record: dict | None, folder: str) -> tuple[BitsAndBytesConfig | None, torch.dtype]:
    """How the base was quantised in training, and in which dtype it was loaded."""
    if record is None:
        logger.warning("Taking the base as trained in NF4 with double quantisation and bfloat16, which is nowhere recorded.")
        return quantization_from("nf4", True, torch.bfloat16, torch.bfloat16), torch.bfloat16
    dtype, saved = DTYPES[record["dtype"]], record["quantization"]
    if saved is None or not saved.get("load_in_4bit"):
        return None, dtype
    quantization = quantization_from(saved["bnb_4bit_quant_type"], saved["bnb_4bit_use_double_quant"], dtype, dtype)
    quantization.llm_int8_skip_modules = saved["skipped_modules"]
    return quantization, dtype


def _write(weights: MergedWeights, output: str, mode: str, write_rest: Callable[[str], None]) -> None:
    """Fill a folder beside `output` and rename it, so that `output` is there whole or not at all."""
    output = os.path.abspath(output)
    unfinished = f"{output}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        os.makedirs(unfinished)
        needed = sum(os.path.getsize(os.path.join(weights.folder, file)) for file in weight_files(weights.folder))
        free = shutil.disk_usage(unfinished).free
        if free < needed:
            raise OSError(
                f"{os.path.dirname(output)} has {free / 2**30:.1f} GiB free, and the merged weights take {needed / 2**30:.1f}. "
                "Choose another folder."
            )
        weights.write(unfinished, mode)
        write_rest(unfinished)
        staging.flush(unfinished)
        if os.path.isdir(output):
            os.rmdir(output)
        os.rename(unfinished, output)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_rest(
    folder: str, adapter: str, base: str, config: LoraConfig, record: dict | None, dataset: str | None, name: str, output: str
) -> None:
    """Configuration, tokenizer, chat template, the index, and a model card."""
    for file in sorted(os.listdir(folder)):
        if os.path.isfile(os.path.join(folder, file)) and not file.endswith(NOT_FROM_BASE) and not file.startswith("."):
            shutil.copyfile(os.path.join(folder, file), os.path.join(output, file))
    if os.path.isfile(os.path.join(folder, INDEX)):
        shutil.copyfile(os.path.join(folder, INDEX), os.path.join(output, INDEX))
    if provenance.has_tokenizer(adapter):
        for file in sorted(os.listdir(adapter)):
            if file.startswith(FROM_ADAPTER):
                shutil.copyfile(os.path.join(adapter, file), os.path.join(output, file))
    known = _adapter_card(adapter)
    method = (record or {}).get("method") or known.get("method")
    card = generate_model_card(
        base_model=None if os.path.isdir(base) else base,
        model_name=name,
        hub_model_id=name,
        dataset_name=dataset or known.get("dataset"),
        tags=["trl", "merged", *([method.lower()] if method else [])],
        wandb_url=None,
        trackio_url=None,
        trainer_name=method or "LoRA",
    )
    card.text = card.text.replace("[None](https://huggingface.co/None)", os.path.basename(os.path.abspath(base)))
    card.save(os.path.join(output, "README.md"))


def _adapter_card(adapter: str) -> dict[str, str]:
    """Method and data set as the adapter's model card names them."""
    path = os.path.join(adapter, "README.md")
    if not os.path.isfile(path):
        return {}
    data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    dataset = data.get("datasets")
    methods = [tag.upper() for tag in data.get("tags") or [] if tag in ("sft", "grpo", "dpo")]
    found = {"dataset": dataset[0] if isinstance(dataset, list) else dataset, "method": methods[0] if methods else None}
    return {key: value for key, value in found.items() if value}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trl_fsdp_qlora.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", help="folder of the adapter, such as a trainer's output_dir or a checkpoint in it")
    parser.add_argument("output", help="folder to write, which must not exist or be empty")
    parser.add_argument("--base", help="folder or model id of the 16-bit base; by default what the adapter names")
    parser.add_argument("--mode", choices=MODES, default="original", help="the weights to merge into (default: original)")
    parser.add_argument("--no-compare", action="store_true", help="do not load the 4-bit model to measure how far the merges are from it")
    parser.add_argument("--text", help="file with text to measure on, instead of the built-in samples")
    parser.add_argument("--dataset", help="name of the training data, for the model card")
    parser.add_argument("--force", action="store_true", help="go on although the base is not what the adapter was trained on")
    options = parser.parse_args(arguments)
    try:
        texts = SAMPLE_TEXTS
        if options.text:
            with open(options.text, encoding="utf-8") as file:
                texts = tuple(part for part in file.read().split("\n\n") if part.strip())
        merged = merge(
            options.adapter, options.output, base=options.base, mode=options.mode, compare=not options.no_compare, texts=texts,
            dataset=options.dataset, force=options.force,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{merged.folder}: adapter merged into {len(merged.adapted)} tensors of the {merged.mode} weights")
    for mode, found in merged.drift.items():
        print(
            f"  {mode:<12} against the unmerged model: the log-probability of {found.tokens} tokens differs by {found.mean:.4f} "
            f"(at most {found.max:.4f})"
        )


if __name__ == "__main__":
    main()
