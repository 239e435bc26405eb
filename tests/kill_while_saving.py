"""Kill a training run at random moments while it saves, resume it, and look at what it left; the counts are printed.

    python tests/kill_while_saving.py --kills 40

Each life of the run is a process that resumes the newest checkpoint, trains a step, begins to save, and is killed (SIGKILL)
a random time later, between the beginning of the save and a little after its end. After each kill every folder under a
checkpoint's name must hold, byte for byte, what an undisturbed run holds at that step, and the newest step must not go back.
"""

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 12
FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "scheduler.pt", "rng_state.json")
PATIENCE = 60  # seconds


def in_a_process(target) -> int:
    """Run `target` in a fork of this process, which has everything imported and the model loaded already."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            target()
            code = 0
        finally:
            os._exit(code)
    return pid


def life(trainer, folder: str, signals: int, **fields):
    """Train and save in `folder`, sending a byte down the pipe `signals` when a save begins and when it ends."""
    random.seed(0)  # Python seeds anew after a fork
    for name, value in fields.items():
        setattr(trainer.args, name, value)
    trainer.args.output_dir = folder
    save = trainer._save_checkpoint

    def save_and_tell(*args):
        os.write(signals, b"(")
        save(*args)
        os.write(signals, b")")

    trainer._save_checkpoint = save_and_tell
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))


def check(folder: Path, reference: Path) -> int:
    """The newest step in `folder`, all of whose checkpoints must be those of the undisturbed run."""
    from transformers.trainer_utils import get_last_checkpoint

    from trl_fsdp_qlora import staging
    from trl_fsdp_qlora.provenance import read_record

    found = staging.checkpoints(str(folder))
    for path in found:
        read_record(path)  # raises if anything is missing or short
        for name in FILES:
            if (Path(path) / name).read_bytes() != (reference / os.path.basename(path) / name).read_bytes():
                raise AssertionError(f"{path}/{name} is not what the undisturbed run wrote")
    if found and get_last_checkpoint(str(folder)) != found[-1]:
        raise AssertionError(f"transformers would resume {get_last_checkpoint(str(folder))}, not {found[-1]}")
    return int(found[-1].rpartition("-")[2]) if found else 0


def run(kills: int, seed: int = 0) -> dict[str, int]:
    """Kill that many lives; how many kills fell into a save, and how many saves ended whole."""
    sys.path[:0] = [str(ROOT)]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch

    torch.set_num_threads(1)
    from tests.tiny import sft_config, token_rows
    from trl_fsdp_qlora import QLoRASFTTrainer
    from trl_fsdp_qlora.demo.models import tiny_gemma4

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kill_while_saving_") as root:
        reference, folder = Path(root, "reference"), Path(root, "run")
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        base = tiny_gemma4(f"{root}/base", text_only=True, num_hidden_layers=3, num_kv_shared_layers=1, layer_types=layers)
        args = sft_config(folder, max_steps=STEPS, save_strategy="steps", save_steps=1, bf16=False, logging_steps=100)
        trainer = QLoRASFTTrainer(base, args, train_dataset=token_rows(16, lengths=(9, 14, 7)))

        receive, send = os.pipe()
        begun = {}
        child = in_a_process(lambda: life(trainer, str(reference), send, save_total_limit=None))
        durations = []
        for _ in range(STEPS):
            for mark in "()":
                if _read(receive) != mark:
                    raise RuntimeError("the undisturbed run does not save")
                begun[mark] = time.monotonic()
            durations.append(begun[")"] - begun["("])
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("the undisturbed run failed")

        longest = 1.5 * max(durations)  # the first save of a process is the slowest, and every life is one
        counts = {"kills": 0, "inside a save": 0, "runs to the end": 0, "saves that ended whole": 0}
        newest = 0
        while counts["kills"] < kills:
            child = in_a_process(lambda: life(trainer, str(folder), send, save_total_limit=2))
            begun_saves = ended_saves = 0
            for _ in range(rng.randint(1, 2)):  # the first or the second save of this life
                if _read(receive) == "(":
                    begun_saves += 1
                    time.sleep(rng.uniform(0, longest))
                if begun_saves == 2 or not select.select([receive], [], [], 0)[0]:
                    break
                ended_saves += _read(receive) == ")"
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            while select.select([receive], [], [], 0)[0]:
                mark = os.read(receive, 1)
                begun_saves, ended_saves = begun_saves + (mark == b"("), ended_saves + (mark == b")")
            counts["kills"] += 1
            counts["inside a save"] += begun_saves > ended_saves
            counts["saves that ended whole"] += ended_saves
            step = check(folder, reference)
            if step < newest:
                raise AssertionError(f"the newest checkpoint went back from step {newest} to {step}")
            newest = step
            if newest >= STEPS - 2:
                counts["runs to the end"] += 1
                shutil.rmtree(folder)
                folder.mkdir()
                newest = 0
    return counts


def _read(pipe: int) -> str:
    if not select.select([pipe], [], [], PATIENCE)[0]:
        raise RuntimeError(f"a run said nothing for {PATIENCE} s")
    return os.read(pipe, 1).decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    print(", ".join(f"{name}: {count}" for name, count in run(options.kills, options.seed).items()), end="")
    print(f"; every checkpoint left was whole; {time.monotonic() - start:.0f} s")
