"""What training saves, in a real vLLM engine on the CPU: the adapter's folder over the 16-bit base, and both merges."""

import random
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny import sft_config
from tests.vllm.support import ENGINE, ENV, engine_greedy, environment_for_towers, prompt_ids, transformers_greedy

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, which the set 'vllm' has")
ARCHITECTURES = ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"]
# Modes of the merge, and what each should be: the adapter over the 16-bit base, or over the 4-bit one it was trained beside.
UNMERGED = {"original": "adapter", "dequantized": "4 bit with adapter"}
# Differences of log-probabilities: the largest between two programs that compute one model in fp32, and the mean between a model and its
# merge, which is rounded to the bf16 of the base. The rounding of the base to 4 bit makes some 0.003, the adapter more than 1.
SAME = 1e-5
ROUNDED = 1e-3


def rows_of_a_cycle():
    """Rows that one rule makes, so that a few steps teach it: greedy tokens vary, and each is well ahead of its rivals."""
    from datasets import Dataset

    draw = random.Random(0)
    cycle = draw.sample(range(20, 480), 16)
    rows = []
    for _ in range(64):
        start = draw.randrange(16)
        rows.append(draw.sample(range(8, 480), 4) + [cycle[(start + i) % 16] for i in range(20)])
    return Dataset.from_dict({"input_ids": rows})


@pytest.fixture(scope="module", params=ARCHITECTURES)
def answers(request, model_cache, tmp_path_factory):
    """Of each form of one fine-tune, in fp32: greedy tokens of some prompts and their log-probabilities, by transformers and by vLLM."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from trl_fsdp_qlora import QLoRASFTTrainer, load_model
    from trl_fsdp_qlora.demo.models import tiny_gemma4
    from trl_fsdp_qlora.export import merge

    folder = tmp_path_factory.mktemp(request.param)
    base = tiny_gemma4(str(model_cache / f"saved_{request.param}"), text_only=request.param == "Gemma4ForCausalLM")
    args = sft_config(folder / "adapter", max_steps=10, learning_rate=2e-2, per_device_train_batch_size=8, bf16=False)
    trainer = QLoRASFTTrainer(base, args, train_dataset=rows_of_a_cycle())
    trainer.train()
    trainer.save_model()
    folders = {"adapter": str(folder / "adapter")}
    for mode in UNMERGED:
        folders[mode] = merge(folders["adapter"], str(folder / mode), mode=mode, compare=False).folder

    models = {"base": load_model(base, dtype=torch.float32), "4 bit with adapter": trainer.model.eval()}
    models["adapter"] = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), folders["adapter"]).eval()
    for mode in UNMERGED:
        models[mode] = AutoModelForCausalLM.from_pretrained(folders[mode], dtype=torch.float32)
        assert type(models[mode]).__name__ == request.param
    prompts = prompt_ids(trainer)
    (served,) = run_ranks(
        1, serve_all, base, folders, prompts, timeout=280,
        env=ENV if request.param == "Gemma4ForCausalLM" else environment_for_towers(tmp_path_factory.mktemp("paths")),
    )  # fmt: skip
    transformers = {}
    for form, model in models.items():
        tokens = transformers_greedy(model, prompts)
        transformers[form] = {"tokens": tokens, "logprobs": log_probabilities(model, prompts, tokens)}
    return {"transformers": transformers, "vllm": served}


def serve_all(base, folders, prompts):
    """One engine after another, in a process of its own."""
    from vllm.lora.request import LoRARequest

    from trl_fsdp_qlora.rollout_worker import adapter_report

    served = {}
    with engine(base, enable_lora=True, max_lora_rank=16) as llm:
        served["base"] = served_answers(llm, prompts)
        served["adapter"] = served_answers(llm, prompts, LoRARequest("saved", 1, folders["adapter"]))
        (served["report"],) = llm.collective_rpc(adapter_report, args=(1,))
    for mode in UNMERGED:
        with engine(folders[mode]) as llm:
            served[mode] = served_answers(llm, prompts)
    return served


@contextmanager
def engine(folder, **arguments):
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from trl_fsdp_qlora.rollout_engine import text_only_arguments

    llm = LLM(folder, dtype="float32", max_model_len=160, max_num_seqs=8, **ENGINE, **text_only_arguments(), **arguments)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def served_answers(llm, prompts, adapter=None):
    outputs = [output.outputs[0] for output in engine_greedy(llm, prompts, lora_request=adapter)]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [of_place[token].logprob for token, of_place in zip(output.token_ids, output.logprobs, strict=True)] for output in outputs
        ],
    }


@torch.no_grad()
def log_probabilities(model, prompts, answers):
    """Of each token of the answers, in one forward pass."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist())
    return found


def differences(one, other):
    return (torch.tensor(one["logprobs"]) - torch.tensor(other["logprobs"])).abs()


def assert_same(answers, form):
    """transformers and vLLM computed one model."""
    expected, found = answers["transformers"][form], answers["vllm"][form]
    assert found["tokens"] == expected["tokens"]
    assert differences(found, expected).max() < SAME


def test_an_adapter_folder_is_served_as_it_is(answers):
    assert_same(answers, "base")
    assert_same(answers, "adapter")
    assert answers["vllm"]["report"] == {"matched": 51, "unmatched": []}
    for tuned, base in zip(answers["vllm"]["adapter"]["tokens"], answers["vllm"]["base"]["tokens"], strict=True):
        assert tuned != base and len(set(tuned)) > 6  # nor is it one token again and again


@pytest.mark.parametrize("mode", UNMERGED)
def test_a_merge_is_the_unmerged_model(answers, mode):
    assert_same(answers, mode)
    forms = answers["transformers"]
    assert forms[mode]["tokens"] == forms["adapter"]["tokens"] == forms["4 bit with adapter"]["tokens"]
    # With these prompts the two bases say the same, and log-probabilities tell which of them a merge was made into.
    for name, unmerged in UNMERGED.items():
        mean = differences(forms[mode], forms[unmerged]).mean()
        assert mean < ROUNDED if name == mode else mean > 2 * ROUNDED, (unmerged, mean)
