"""What the tests of a real vLLM engine share: how it is started on the CPU, and a trainer that checks it at every step."""

import os
import textwrap
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.distributed.launch import ROOT

# An engine in this process, in fp32 beside HF: no compilation, and blocks so short that a prompt of some words fills several.
BLOCK = 32
ENGINE = {"enforce_eager": True, "block_size": BLOCK, "max_num_batched_tokens": 256}
ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # fewer processes, each of which would import vLLM for ten seconds
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_OFFLINE": "1",
}
LONG_PROMPT = "one two three and what is the word for hello in a short text " * 4
# What stands for an image or a sound is replaced inside the model, in the engine otherwise than in transformers.
SPECIAL = [*range(8), *range(497, 512)]
PROMPTS = ["hello world", "what is one and two", LONG_PROMPT]
TOKENS = 12  # of an answer


def environment_for_towers(folder: Path) -> dict[str, str]:
    """`ENV` for an engine of a model with towers. Where torchvision is missing, something to import is put in its place.

    vLLM's Gemma 4 with towers imports the image processor, and that imports torchvision, which has no build that goes
    with the torch that vLLM's CPU build needs. Nothing here ever looks at an image.
    """
    if find_spec("torchvision") is not None:
        return ENV
    _write_torchvision(folder)
    return {**ENV, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def _write_torchvision(folder: Path) -> None:
    absent = '''
        import enum


        class ImageReadMode(enum.Enum):
            RGB = 3


        def __getattr__(name):
            if name.startswith("__"):
                raise AttributeError(name)

            def absent(*args, **kwargs):
                raise NotImplementedError(f"torchvision is not installed, so there is no {name}")

            return absent
        '''
    files = {
        "torchvision/__init__.py": '__version__ = "0.28.0"\nfrom . import io, transforms\n',
        "torchvision/io/__init__.py": absent,
        "torchvision/transforms/__init__.py": '''
            import enum

            InterpolationMode = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")

            from . import functional, v2
            ''',
        "torchvision/transforms/functional.py": absent,
        "torchvision/transforms/v2/__init__.py": "from . import functional\n",
        "torchvision/transforms/v2/functional.py": absent,
        "torchvision-0.28.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip())


def prompt_ids(trainer) -> list[list[int]]:
    return [trainer.processing_class(prompt)["input_ids"] for prompt in PROMPTS]


def engine_greedy(llm, prompts: list[list[int]], tokens: int = TOKENS, **arguments) -> list:
    """vLLM's own outputs, with the log-probability of each token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, logit_bias=dict.fromkeys(SPECIAL, -100.0))
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling_params=params, use_tqdm=False, **arguments)


def transformers_greedy(model, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    found = []
    for ids in prompts:
        inputs = torch.tensor([ids])
        sequences = model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False,
            eos_token_id=-1, suppress_tokens=SPECIAL,
        )  # fmt: skip
        found.append(sequences[0, len(ids) :].tolist())
    return found


class Witness:
    """Compares the engine with the unquantised base plus the adapter that the trainer saves, computed by transformers."""

    def __init__(self, trainer, checkpoint: str):
        from trl_fsdp_qlora import load_model

        self.trainer = trainer
        self.base = load_model(checkpoint, dtype=torch.float32, device="cpu")
        self.seen = 0

    def with_adapter(self) -> list[list[int]]:
        """Greedy tokens of the base with the adapter as it is now."""
        from peft import PeftModel

        self.seen += 1
        folder = os.path.join(self.trainer.args.output_dir, f"adapter{self.seen}")
        self.trainer.save_model(folder)
        model = PeftModel.from_pretrained(self.base, folder)
        found = self.greedy(model)
        self.base = model.unload()
        return found

    def greedy(self, model) -> list[list[int]]:
        return transformers_greedy(model, prompt_ids(self.trainer))


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
