"""How a checkpoint contradicts the run that wants to resume it, in words."""

import os
import re

from peft import PeftConfig, PeftModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .provenance import read_json
from .training_state import ADAPTER_FILE, adapter_folders

CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")
# Fields of a LoRA configuration that change what the adapter's numbers mean. Targets are compared by the tensors.
LORA_MEANING = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "bias")


def of_checkpoint(folder: str, record: dict | None, model: PeftModel, here: dict, *, position: bool) -> list[str]:
    """How checkpoint `folder` contradicts `model` and the record `here` that this run would write.

    Args:
        record: of the checkpoint, or `None` if other tools wrote it.
        position: whether the run would go on at the checkpoint's step.
    """
    found = []
    for adapter, own in adapter_folders(model, folder).items():
        found += adapter_differences(own, model.peft_config[adapter])
    for name in sorted(os.listdir(folder)):
        if CHECKPOINT.fullmatch(name):  # an output folder holds the run's checkpoints too
            continue
        # Such as the reference of GRPO's KL term, when the policy was given as a `PeftModel`.
        if name not in model.peft_config and os.path.isfile(os.path.join(folder, name, ADAPTER_FILE)):
            found.append(f"an adapter {name!r} beside the one that trains, which this run lacks")
    if record is not None:
        found += base_differences(record["base"], here["base"])
        found += quantization_differences(record["quantization"], here["quantization"])
    if record is not None and position:
        found += rows_differences(record["rows_per_step"], here["rows_per_step"])
        if record["train_rows"] != here["train_rows"]:
            found.append(f"{record['train_rows']} training rows, here {here['train_rows']}: the position in the data would not fit")
    return found


def base_differences(saved: dict, here: dict) -> list[str]:
    """How two results of `describe_base` contradict each other. A copy of the same files elsewhere does not."""
    if saved.get("fingerprint") and here.get("fingerprint"):
        if saved["fingerprint"] == here["fingerprint"]:
            return []
        marks = f" (fingerprints {saved['fingerprint'][:12]} and {here['fingerprint'][:12]})"
    elif saved.get("commit") and here.get("commit"):
        if saved["commit"] == here["commit"]:
            return []
        marks = f" (commits {saved['commit'][:12]} and {here['commit'][:12]})"
    elif not saved.get("name") or not here.get("name") or saved["name"] == here["name"]:
        return []
    else:
        marks = ""
    return [f"base model {saved['name']!r}, here {here['name']!r}{marks}"]


def base_of_adapter(folder: str, here: dict) -> list[str]:
    """How the model that PEFT noted with the adapter in `folder` differs from a result of `describe_base`, as far as names can tell."""
    return base_differences({"name": read_json(os.path.join(folder, "adapter_config.json")).get("base_model_name_or_path")}, here)


def quantization_differences(saved: dict | None, here: dict | None) -> list[str]:
    if saved is None or here is None:
        words = {True: "not quantised", False: "quantised"}
        return [] if saved == here else [f"a base that is {words[saved is None]}, here {words[here is None]}"]
    return [
        f"`{name}={saved.get(name)!r}`, here {here.get(name)!r}" for name in sorted({*saved, *here}) if saved.get(name) != here.get(name)
    ]


def adapter_differences(folder: str, here: PeftConfig) -> list[str]:
    """How the adapter configuration in `folder` differs from the live one in what the numbers mean."""
    path = os.path.join(folder, "adapter_config.json")
    saved, current = read_json(path), here.to_dict()
    differences = []
    for name in LORA_MEANING:
        value = getattr(current.get(name), "value", current.get(name))
        if name in saved and name in current and saved[name] != value:
            differences.append(f"`{name}={saved[name]!r}`, here {value!r}")
    return differences


def rows_differences(saved: dict, here: dict) -> list[str]:
    """A step of another number of rows: neither the schedule nor the position in the data would fit."""

    def rows(step: dict) -> int:
        return step["per_device_train_batch_size"] * step["world_size"] * step["gradient_accumulation_steps"]

    def spelt(step: dict) -> str:
        return (
            f"{rows(step)} rows a step ({step['per_device_train_batch_size']} a device x {step['world_size']} ranks x "
            f"{step['gradient_accumulation_steps']} accumulated)"
        )

    if rows(saved) == rows(here):
        return []
    steps, rest = divmod(rows(saved), here["per_device_train_batch_size"] * here["world_size"])
    advice = f"; `gradient_accumulation_steps={steps}` would make them equal" if steps and not rest else ""
    return [f"{spelt(saved)}, here {spelt(here)}{advice}"]
