"""`QLoRAGRPOTrainer` at one rank with plain generation, as people call it, and as they should not."""

import json
import os
import shutil
import sys
import warnings

import pandas
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, TrainingArguments
from trl import GRPOConfig

from tests.distributed.launch import run_ranks
from tests.tiny import VOCABULARY, grpo_config, token_reward
from trl_fsdp_qlora import QLoRAGRPOConfig, QLoRAGRPOTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4
from trl_fsdp_qlora.loading import load_model, quantization_from
from trl_fsdp_qlora.packed import packed_weights
from trl_fsdp_qlora.reasoning_tasks import answer_reward, reasoning_task, rows_with_answers
from trl_fsdp_qlora.targets import resolve_peft_config

PROMPTS = ["hello world", "what is one and two", "a short text", "123 words"]
ROWS = Dataset.from_dict({"prompt": PROMPTS * 4})


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    return tiny_gemma4(str(model_cache / "gemma4"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trainer_for(model, tmp_path, reward=token_reward, rows=ROWS, trainer_args=None, **fields):
    return QLoRAGRPOTrainer(model, reward, grpo_config(tmp_path, **fields), train_dataset=rows, **(trainer_args or {}))


def adapters(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def logged(trainer, *names):
    return [tuple(float(e[name]) for name in names) for e in trainer.state.log_history if "loss" in e]


def packed_bytes(model):
    return {name: module.weight.detach().view(torch.uint8).clone() for name, module in packed_weights(model).items()}


def trained_peft_model(checkpoint, r=4, dtype=torch.float32):
    """A 4-bit model with an adapter that does something."""
    compute = torch.bfloat16
    base = load_model(checkpoint, quantization_config=quantization_from("nf4", True, compute, compute), dtype=compute, device="cpu")
    model = get_peft_model(base, resolve_peft_config(base, LoraConfig(r=r, target_modules="all-linear")))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=generator)
    return model


def given_completions(lengths=(5, 1, 3, 6)):
    def rollout(prompts, trainer):
        generator = torch.Generator().manual_seed(trainer.state.global_step)
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [
                torch.randint(8, VOCABULARY, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(len(prompts))
            ],
            "logprobs": None,
        }

    return rollout


class TestTraining:
    def test_adapters_learn_and_the_base_stays(self, checkpoint, tmp_path):
        trainer = trainer_for(checkpoint, tmp_path, beta=0.05, log_completions=True)
        before, base = adapters(trainer), packed_bytes(trainer.model)
        assert len(before) == 102 and base and all(p.dtype == torch.float32 for p in before.values())
        trainer.train()
        after = adapters(trainer)
        assert before.keys() == after.keys()
        assert all(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
        now = packed_bytes(trainer.model)
        assert all(torch.equal(base[name], now[name]) for name in base)

        steps = logged(trainer, "reward", "completions/mean_length", "kl", "logprob_gap/mean", "logprob_gap/max", "memory/peak_gib")
        assert len(steps) == 3 and steps[0][2] == 0 < steps[2][2]
        assert all(0 <= mean <= largest < 0.05 and memory > 0 for _, _, _, mean, largest, memory in steps)
        with open(tmp_path / "grpo_curves.png", "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
        table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
        assert len(table) == 8 and {"prompt", "completion", "token_reward", "advantage"} <= set(table.columns)

    def test_log_probabilities_are_fp32(self, checkpoint, tmp_path):
        trainer = trainer_for(checkpoint, tmp_path, max_steps=1)
        assert trainer.args.bf16
        trainer.train()
        assert trainer._logps_BT.dtype == torch.float32
        assert not torch.equal(trainer._logps_BT, trainer._logps_BT.bfloat16().float())

    @pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}], ids=["plain", "warped"])
    def test_what_was_sampled_is_what_is_trained(self, checkpoint, tmp_path, sampling):
        trainer = trainer_for(checkpoint, tmp_path, bf16=False, max_completion_length=20, **sampling)
        trainer.train()
        assert all(mean < 1e-5 and largest < 1e-4 for mean, largest in logged(trainer, "logprob_gap/mean", "logprob_gap/max"))

    def test_whole_logits_are_never_made(self, checkpoint, tmp_path):
        config = grpo_config(tmp_path, beta=0.1, num_iterations=2, per_device_eval_batch_size=8)
        trainer = QLoRAGRPOTrainer(
            checkpoint, token_reward, config, train_dataset=ROWS, eval_dataset=ROWS.select(range(2)), rollout_func=given_completions()
        )

        def called(*args):
            raise AssertionError("the head made logits")

        trainer.model.get_output_embeddings().register_forward_hook(called)
        trainer.train()
        assert "eval_loss" in trainer.evaluate()

    def test_several_steps_from_one_generation(self, checkpoint, tmp_path):
        trainer = trainer_for(
            checkpoint, tmp_path, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=2
        )
        trainer.train()
        assert ["reward" in entry for entry in trainer.state.log_history if "loss" in entry] == [True, False, True, False]
        gaps = [mean for (mean,) in logged(trainer, "logprob_gap/mean")]
        assert gaps[1] > gaps[0] and gaps[3] > gaps[2]  # what the policy has learnt since it sampled

    def test_evaluation_before_and_during(self, checkpoint, tmp_path):
        config = grpo_config(tmp_path, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
        trainer = QLoRAGRPOTrainer(checkpoint, token_reward, config, train_dataset=ROWS, eval_dataset=ROWS.select(range(4)))
        before = trainer.evaluate()
        assert "eval_reward" in before and "eval_logprob_gap/mean" in before
        trainer.train()
        assert len(logged(trainer, "reward")) == 3

    def test_resume(self, checkpoint, tmp_path):
        straight = trainer_for(checkpoint, tmp_path / "a", max_steps=4)
        straight.train()
        trainer_for(checkpoint, tmp_path / "b", max_steps=2, save_strategy="steps", save_steps=2).train()
        resumed = trainer_for(checkpoint, tmp_path / "b", max_steps=4)
        resumed.train(resume_from_checkpoint=True)
        assert logged(resumed, "loss", "reward", "grad_norm")[-2:] == logged(straight, "loss", "reward", "grad_norm")[-2:]
        ours, theirs = adapters(resumed), adapters(straight)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class TestWhatIsGiven:
    def test_a_plain_config_of_trl(self, checkpoint, tmp_path):
        config = GRPOConfig(
            str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no", per_device_train_batch_size=4, num_generations=4,
            max_completion_length=4,
        )  # fmt: skip
        trainer = QLoRAGRPOTrainer(checkpoint, token_reward, config, train_dataset=ROWS)
        assert packed_weights(trainer.model)
        trainer.train()

    def test_training_arguments(self, checkpoint, tmp_path):
        config = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
        trainer = QLoRAGRPOTrainer(checkpoint, token_reward, config, train_dataset=ROWS)
        assert isinstance(trainer.args, QLoRAGRPOConfig) and trainer.args.max_steps == 1

    def test_an_instance(self, checkpoint, tmp_path):
        base = load_model(checkpoint, dtype=torch.float32, device="cpu")
        config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
        trainer = trainer_for(base, tmp_path, trainer_args={"peft_config": config}, bf16=False, max_steps=1)
        assert len(adapters(trainer)) == 20
        trainer.train()

    def test_a_peft_model(self, checkpoint, tmp_path):
        model = trained_peft_model(checkpoint)
        trainer = trainer_for(model, tmp_path, max_steps=1)
        assert trainer.model is model and len(adapters(trainer)) == 102 and list(model.peft_config) == ["default"]
        trainer.train()

    @pytest.mark.parametrize(
        "prompt",
        [
            [{"role": "user", "content": "hello"}],
            [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        ],
        ids=["string", "parts"],
    )
    def test_conversations(self, checkpoint, tmp_path, prompt):
        """Text rows of a model with towers: no processor, no token types."""
        seen = []

        def reward(prompts, completions, **kwargs):
            seen.append(completions[0][0]["role"])
            return [float(len(completion[0]["content"])) for completion in completions]

        trainer = trainer_for(checkpoint, tmp_path, reward, Dataset.from_list([{"prompt": prompt}] * 4), max_steps=1)
        assert trainer.processing_class.__class__.__name__ == "PreTrainedTokenizerFast" or "Tokenizer" in str(trainer.processing_class)
        ids, *_ = trainer._tokenize_prompts([prompt])
        assert trainer.processing_class.decode(ids[0]) == "<bos><|turn>user\nhello<turn|>\n<|turn>model\n"
        trainer.train()
        assert seen[0] == "assistant"

    def test_text_only_class(self, model_cache, tmp_path):
        trainer = trainer_for(tiny_gemma4(str(model_cache / "text"), text_only=True), tmp_path, max_steps=1)
        trainer.train()
        assert len(adapters(trainer)) == 102


class TestReference:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("bf16", [True, False])
    def test_continued_adapter_is_its_own_reference(self, checkpoint, tmp_path, dtype, bf16):
        model = trained_peft_model(checkpoint, dtype=dtype)
        start = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
        trainer = trainer_for(model, tmp_path, beta=0.1, bf16=bf16)
        trainer.train()
        kl = [value for (value,) in logged(trainer, "kl")]
        assert kl[0] == 0 and kl[1] > 0 and kl[2] > 0
        reference = {n: p for n, p in trainer.model.named_parameters() if ".ref." in n}
        assert len(reference) == len(start) and not any(p.requires_grad for p in reference.values())
        assert all(torch.equal(p, start[name.replace(".ref.", ".default.")]) for name, p in reference.items())
        assert len(adapters(trainer)) == len(start) and trainer.ref_model is None
        trainer.save_model()
        assert os.path.isfile(tmp_path / "adapter_model.safetensors")
        saved = PeftModel.from_pretrained(load_model(checkpoint, dtype=torch.float32, device="cpu"), str(tmp_path))
        current = next(p for n, p in trainer.model.named_parameters() if "lora_B.default" in n)
        assert torch.equal(next(p for n, p in saved.named_parameters() if "lora_B.default" in n), current.float())

    def test_fresh_adapter(self, checkpoint, tmp_path):
        trainer = trainer_for(checkpoint, tmp_path, beta=0.1)
        trainer.train()
        kl = [value for (value,) in logged(trainer, "kl")]
        assert kl[0] == 0 and kl[1] > 0 and trainer.ref_model is None

    @pytest.mark.parametrize(("prepare", "said"), [("other", "named 'default'.*'other'"), ("ref", "an adapter 'ref' already")])
    def test_names_that_collide(self, checkpoint, tmp_path, prepare, said):
        model = trained_peft_model(checkpoint)
        model.add_adapter(prepare, model.peft_config["default"])
        if prepare == "other":
            model.set_adapter("other")
        with pytest.raises(ValueError, match=said):
            trainer_for(model, tmp_path, beta=0.1)


class TestRewards:
    def test_all_equal_change_nothing(self, checkpoint, tmp_path):
        trainer = trainer_for(checkpoint, tmp_path, lambda completions, **kwargs: [1.0] * len(completions))
        before = adapters(trainer)
        trainer.train()
        assert all(torch.equal(before[name], p) for name, p in adapters(trainer).items())
        for loss, grad_norm, reward, spread, zero in logged(trainer, "loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std"):
            assert (loss, grad_norm, reward, spread, zero) == (0, 0, 1, 0, 1)

    def test_a_failing_function_says_so(self, checkpoint, tmp_path):
        def broken(completions, **kwargs):
            raise RuntimeError("the verifier is down")

        with pytest.raises(RuntimeError, match="the verifier is down"):
            trainer_for(checkpoint, tmp_path, broken).train()

    def test_too_few_rewards(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match="returned 1 rewards, but 8"):
            trainer_for(checkpoint, tmp_path, lambda completions, **kwargs: [1.0]).train()

    def test_none_is_no_reward(self, checkpoint, tmp_path):
        trainer = trainer_for(checkpoint, tmp_path, lambda completions, **kwargs: [None] * len(completions), max_steps=1)
        before = adapters(trainer)
        trainer.train()
        assert all(torch.equal(before[name], p) for name, p in adapters(trainer).items())

    def test_an_empty_completion(self, checkpoint, tmp_path):
        """Nothing but the end of the turn: one token, empty text, a reward like any other."""
        texts = []

        def reward(completions, completion_ids, **kwargs):
            texts.extend(zip(completions, map(len, completion_ids), strict=True))
            return [float(i) for i in range(len(completions))]

        trainer = trainer_for(checkpoint, tmp_path, reward, max_steps=2)
        trainer.eos_token_ids = trainer.generation_config.eos_token_id = list(range(VOCABULARY * 2))
        trainer.train()
        assert {length for _, length in texts} == {1}
        assert all(torch.isfinite(torch.tensor(numbers)).all() for numbers in logged(trainer, "loss", "grad_norm"))

    def test_a_rollout_function_without_tokens(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match="no token for completion 1"):
            trainer_for(checkpoint, tmp_path, trainer_args={"rollout_func": given_completions((4, 0, 2, 2))}).train()


class TestRefused:
    """Before a weight is read."""

    @pytest.fixture
    def weightless(self, checkpoint, tmp_path):
        folder = tmp_path / "weightless"
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        return str(folder)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"use_transformers_continuous_batching": True}, "casts the whole model"),
            ({"beta": 0.1, "sync_ref_model": True}, "copies weights into a second model"),
            ({"cast_lm_head_to_fp32": True}, "second copy of a head"),
            ({"use_vllm": True, "vllm_mode": "server", "lora_r": 1000}, "512 at most"),
            ({"use_vllm": True, "vllm_mode": "server", "language_model_only": False}, "a tower or connector"),
        ],
    )
    def test_options(self, weightless, tmp_path, fields, said):
        with pytest.raises(ValueError, match=said):
            trainer_for(weightless, tmp_path, **fields)

    @pytest.mark.parametrize("field", [{"use_dora": True}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head"]}])
    def test_adapters_that_vllm_cannot_serve(self, weightless, tmp_path, field):
        config = LoraConfig(target_modules=["q_proj"], **field)
        with pytest.raises(ValueError, match=next(iter(field))):
            trainer_for(weightless, tmp_path, trainer_args={"peft_config": config}, use_vllm=True, vllm_mode="server")

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"vllm_base_quantization": "awq"}, "write one of 'none', 'bitsandbytes'"),
            ({"vllm_base_quantization": "bitsandbytes"}, "needs `use_vllm=True`"),
            ({"use_vllm": True, "vllm_mode": "server", "vllm_base_quantization": "bitsandbytes"}, "its own command line"),
            ({"use_vllm": True, "vllm_engine_kwargs": {"max_model_len": 9}}, "is set by `vllm_max_model_length`"),
            ({"use_vllm": True, "vllm_engine_kwargs": {"enable_lora": False}}, "the trainer sets itself"),
            ({"use_vllm": True, "vllm_mode": "colocate", "vllm_adapter_dir": "x"}, "for a vLLM server"),
            ({"vllm_adapter_sync": "magic"}, "'auto', 'memory', 'file'"),
        ],
    )
    def test_config(self, tmp_path, fields, said):
        with pytest.raises(ValueError, match=said):
            grpo_config(tmp_path, **fields)

    def test_engine_arguments_from_a_command_line(self, tmp_path):
        config = grpo_config(tmp_path, use_vllm=True, vllm_mode="colocate", vllm_engine_kwargs='{"enforce_eager": true}')
        assert config.vllm_engine_kwargs == {"enforce_eager": True}

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            (Dataset.from_dict({"text": ["a"]}), "no 'prompt' to generate from"),
            (Dataset.from_dict({"prompt": []}), "has no rows"),
            (Dataset.from_dict({"prompt": ["a", ""]}), "Row 1 of `train_dataset` is malformed: 'prompt' is empty"),
            (Dataset.from_dict({"prompt": ["a", None]}), "Row 1"),
        ],
    )
    def test_rows(self, weightless, tmp_path, rows, said):
        with pytest.raises(ValueError, match=said):
            trainer_for(weightless, tmp_path, rows=rows)

    def test_no_vllm_here(self, weightless, tmp_path, monkeypatch):
        monkeypatch.setattr("trl_fsdp_qlora.grpo_checks.is_vllm_available", lambda: False)
        with pytest.raises(ImportError, match="vllm_mode='server'"):
            trainer_for(weightless, tmp_path, use_vllm=True, vllm_mode="colocate")

    def test_an_engine_needs_a_checkpoint(self, checkpoint, tmp_path):
        base = load_model(checkpoint, dtype=torch.float32, device="cpu")
        base.config._name_or_path = base.name_or_path = ""
        with pytest.raises(ValueError, match="engine reads the base from a checkpoint"):
            trainer_for(base, tmp_path, use_vllm=True, vllm_mode="server", bf16=False, trainer_args={
                "processing_class": AutoTokenizer.from_pretrained(checkpoint)})  # fmt: skip


def test_nothing_warns_of_ignored_options(checkpoint, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(checkpoint, tmp_path, model_init_kwargs={"attn_implementation": "eager"}, max_steps=1)
    assert not [w for w in caught if "ignored" in str(w.message)]


class TestRecipe:
    ROWS = [
        {"prompt": "what is one and two", "answer": "3"},
        {"prompt": "what is two and two", "answer": "4"},
        {"prompt": "a word for hello", "answer": "hi"},
        {"prompt": "a short text", "answer": "a"},
    ]
    SMALL = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "6"]
    SMALL += ["--use_cpu", "True", "--report_to", "none", "--logging_steps", "1"]

    @pytest.mark.parametrize(("ranks", "env"), [(1, {}), (2, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})])
    def test_without_hub_and_gpu(self, checkpoint, tmp_path, ranks, env):
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in self.ROWS))
        out = tmp_path / "out"
        printed = run_ranks(
            ranks, "recipes/grpo_gemma4.py", "--model_name_or_path", checkpoint, "--train_file", tmp_path / "rows.jsonl",
            "--output_dir", out, *self.SMALL, env=env,
        )  # fmt: skip
        assert "mean reward:" in printed[0] and str(out) in printed[0]
        assert {"adapter_model.safetensors", "grpo_curves.png", "completions"} <= set(os.listdir(out))

    def test_a_generated_task(self, checkpoint, tmp_path):
        pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (the extra 'reasoning')")
        printed = run_ranks(
            1, "recipes/grpo_gemma4.py", "--model_name_or_path", checkpoint, "--num_questions", "8", "--output_dir", tmp_path / "out",
            "--task_options", '{"min_terms": 2, "max_terms": 2}', *self.SMALL,
        )  # fmt: skip
        assert "mean reward:" in printed[0]


class TestReasoningTasks:
    def test_rows_of_your_own(self):
        rows = rows_with_answers(Dataset.from_list(TestRecipe.ROWS), "Briefly.")
        assert rows[0]["prompt"] == [{"role": "user", "content": "what is one and two\nBriefly."}]
        completions = [[{"role": "assistant", "content": text}] for text in (" 3\n", "it is 3", "four", "")]
        assert answer_reward(completions, answer=["3"] * 4) == [1.0, pytest.approx(1 / 7), 0.0, 0.0]
        with pytest.raises(ValueError, match="they have prompt"):
            rows_with_answers(Dataset.from_list([{"prompt": "a"}]))

    def test_tasks(self):
        pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (the extra 'reasoning')")
        rows, reward = reasoning_task("chain_sum", 4, seed=3, min_terms=2, max_terms=2)
        right = [[{"role": "assistant", "content": row["answer"]}] for row in rows]
        assert reward(right, index=rows["index"]) == [1.0] * 4
        assert reward([[{"role": "assistant", "content": "no idea"}]], index=[0]) == [0.0]
        again, _ = reasoning_task("chain_sum", 4, seed=3, min_terms=2, max_terms=2)
        assert again["prompt"] == rows["prompt"]
        for name, options, said in (("sums", {}, "no task 'sums'"), ("chain_sum", {"terms": 2}, "does not take the options")):
            with pytest.raises(ValueError, match=said):
                reasoning_task(name, 4, **options)

    def test_without_reasoning_gym(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(ImportError, match=r"trl-fsdp-qlora\[reasoning\]"):
            reasoning_task("chain_sum", 4)
