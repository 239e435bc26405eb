"""Train Gemma 4 in 4 bit on questions whose answers a program checks (GRPO), rollouts by vLLM where there is a GPU.

One GPU, training and vLLM in one process (`pip install 'trl-fsdp-qlora[vllm,reasoning]'`):

    accelerate launch recipes/grpo_gemma4.py
    accelerate launch recipes/grpo_gemma4.py --vllm_base_quantization bitsandbytes   # the engine's base in 4 bit too

Several GPUs, the 4-bit base sharded over them, an engine on each:

    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/grpo_gemma4.py

A vLLM server on GPUs of its own, started as docs/grpo.md says:

    accelerate launch recipes/grpo_gemma4.py --vllm_mode server --vllm_server_base_url http://127.0.0.1:8000

Other tasks of reasoning-gym, your own rows (JSON lines with `prompt` and `answer`), and a smoke run of one step:

    accelerate launch recipes/grpo_gemma4.py --task letter_counting --task_options '{"min_words": 2, "max_words": 4}'
    accelerate launch recipes/grpo_gemma4.py --train_file rows.jsonl
    accelerate launch recipes/grpo_gemma4.py --max_steps 1 --per_device_train_batch_size 2 --num_generations 2 --max_completion_length 8
"""

import json
import os
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from trl import TrlParser
from trl.import_utils import is_vllm_available

from trl_fsdp_qlora import QLoRAGRPOConfig, QLoRAGRPOTrainer
from trl_fsdp_qlora.data_checks import read_json_rows
from trl_fsdp_qlora.reasoning_tasks import Reward, answer_reward, reasoning_task, rows_with_answers


@dataclass
class RecipeArguments:
    model_name_or_path: str = field(default="google/gemma-4-E2B-it", metadata={"help": "Model id or folder."})
    task: str = field(default="chain_sum", metadata={"help": "Task of reasoning-gym."})
    task_options: str = field(default="{}", metadata={"help": "Options of the task, as JSON."})
    num_questions: int = field(default=2000, metadata={"help": "Questions to generate."})
    instruction: str = field(default="Reply with the answer only.", metadata={"help": "Said after each question."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines with prompt and answer, instead of a task."})


@dataclass
class GRPOConfig(QLoRAGRPOConfig):
    output_dir: str | None = field(default="outputs/grpo_gemma4", metadata={"help": "Folder for adapter and checkpoints."})
    use_vllm: bool | None = field(default=None, metadata={"help": "Unset: where there is a GPU, and vLLM or a server."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Completions a device and step."})
    max_completion_length: int = field(default=256, metadata={"help": "Completions are cut to this many tokens."})
    vllm_max_model_length: int | None = field(default=2048, metadata={"help": "Tokens of prompt and completion."})
    log_completions: bool = field(default=True, metadata={"help": "Print samples and keep tables of completions."})
    num_completions_to_print: int | None = field(default=4, metadata={"help": "Samples to print."})

    def __post_init__(self):
        if self.use_vllm is None:
            self.use_vllm = self.vllm_mode == "server" or torch.cuda.is_available() and not self.use_cpu and is_vllm_available()
        super().__post_init__()


def load_questions(recipe: RecipeArguments, seed: int) -> tuple[Dataset, Reward]:
    """Prompts, and what scores their answers."""
    if recipe.train_file:
        return rows_with_answers(read_json_rows(recipe.train_file), recipe.instruction), answer_reward
    options = json.loads(recipe.task_options)
    return reasoning_task(recipe.task, recipe.num_questions, seed=seed, instruction=recipe.instruction, **options)


def main() -> None:
    recipe, args = TrlParser((RecipeArguments, GRPOConfig)).parse_args_and_config()
    questions, reward = load_questions(recipe, args.seed)
    trainer = QLoRAGRPOTrainer(recipe.model_name_or_path, reward, args, train_dataset=questions)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if args.process_index == 0:
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print(f"mean reward: {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last" if rewards else "no reward was logged")
        print("adapter, curves and completions in", os.path.abspath(args.output_dir))
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
