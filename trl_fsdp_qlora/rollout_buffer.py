"""GRPO's generated completions that are not used up when a checkpoint is written.

A trainer that makes several steps from one generation (`num_iterations`, or `steps_per_generation` beyond the accumulated
batches) holds the rest in a buffer. Without it a resumed run would generate anew in mid-cycle and train on other rows.
"""

import json
import os

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file

from .logging import get_logger
from .training_state import open_tensors

logger = get_logger(__name__)

BUFFER_FILE = "rollout_buffer.safetensors"


def gather_buffer(trainer) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    """The buffers of all ranks, or `None` for a trainer without one. Call it on all ranks."""
    if not hasattr(trainer, "_buffered_inputs"):
        return None
    args = trainer.args
    position = trainer._step % (args.steps_per_generation * trainer.num_iterations)
    buffer = (trainer._buffered_inputs or []) if position else []
    entries = {f"{i}/{key}": value for i, batch in enumerate(buffer) for key, value in batch.items()}
    tensors = {entry: value.detach().cpu().clone() for entry, value in entries.items() if isinstance(value, torch.Tensor)}
    others = {entry: value for entry, value in entries.items() if entry not in tensors}
    own = (tensors, others)
    gathered = gather_object([own]) if args.world_size > 1 else [own]
    described = {"step": trainer._step, "world_size": args.world_size, "batches": len(buffer)}
    try:
        described["others"] = [others for _, others in gathered]
        return {f"{rank}/{k}": t for rank, (ts, _) in enumerate(gathered) for k, t in ts.items()}, _as_metadata(described)
    except TypeError:  # such as images that wait for their processor
        logger.warning("The rollout buffer holds what no JSON can carry; a run resumed here generates its completions anew.")
        return {}, _as_metadata(described | {"batches": 0, "others": []})


def _as_metadata(described: dict) -> dict[str, str]:
    return {"rollout_buffer": json.dumps(described, sort_keys=True)}


def save_buffer(gathered: tuple[dict[str, torch.Tensor], dict[str, str]], folder: str) -> None:
    tensors, metadata = gathered
    save_file(tensors or {"empty": torch.zeros(0)}, os.path.join(folder, BUFFER_FILE), metadata=metadata)


def load_buffer(trainer, folder: str) -> None:
    """Put the trainer back in its generation cycle, where `folder` holds a buffer for its number of ranks."""
    path = os.path.join(folder, BUFFER_FILE)
    if not hasattr(trainer, "_buffered_inputs") or not os.path.isfile(path):
        return
    args = trainer.args
    with open_tensors(path) as file:
        described = json.loads(file.metadata()["rollout_buffer"])
        trainer._step, count, others = described["step"], described["batches"], described["others"]
        if count == 0:
            return
        if described["world_size"] != args.world_size or count != args.steps_per_generation:
            logger.warning(
                "The checkpoint holds completions for %s ranks and %d steps a generation, this run has %d and %d: they are "
                "generated anew for the rest of the cycle.",
                described["world_size"], count, args.world_size, args.steps_per_generation,
            )  # fmt: skip
            return
        buffer: list[dict] = [{} for _ in range(count)]
        mine = f"{args.process_index}/"
        for key in file.keys():
            if key.startswith(mine):
                index, _, name = key.removeprefix(mine).partition("/")
                buffer[int(index)][name] = file.get_tensor(key).to(args.device)
        for key, value in others[args.process_index].items():
            index, _, name = key.partition("/")
            buffer[int(index)][name] = value
    trainer._buffered_inputs = buffer
