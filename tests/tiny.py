"""Rows and configs that several test files use."""

import torch
from datasets import Dataset

VOCABULARY = 300


def token_rows(count: int, lengths=(24,), seed: int = 0) -> Dataset:
    """`count` rows of random token ids; row i has `lengths[i % len(lengths)]` of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(8, VOCABULARY, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]
    return Dataset.from_dict({"input_ids": rows})


QUIET = dict(
    use_cpu=True,
    max_steps=3,
    logging_steps=1,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    shuffle_dataset=False,
    dataloader_pin_memory=False,
)


def sft_config(output_dir, **fields):
    """A quiet configuration of `QLoRASFTTrainer` for tiny models on the CPU, every step logged."""
    from trl_fsdp_qlora import QLoRASFTConfig

    return QLoRASFTConfig(str(output_dir), **{**QUIET, "per_device_train_batch_size": 2, **fields})


def grpo_config(output_dir, **fields):
    """The same of `QLoRAGRPOTrainer`: two prompts, four completions of each."""
    from trl_fsdp_qlora import QLoRAGRPOConfig

    defaults = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    return QLoRAGRPOConfig(str(output_dir), **{**QUIET, **defaults, **fields})


def token_reward(completion_ids, **kwargs):
    """Something that differs between completions and needs no text."""
    return [sum(i % 7 for i in ids) / 7 - len(ids) / 2 for ids in completion_ids]


def logged(trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    return [(float(e["loss"]), float(e["grad_norm"])) for e in trainer.state.log_history if "loss" in e]


def tiny_glm(folder, **fields) -> str:
    """A tiny random GLM-5 (`glm_moe_dsa`) in `folder`: low-rank attention behind an indexer, a dense layer, then experts."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from trl_fsdp_qlora.demo.models import tiny_tokenizer

    sizes = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32, "index_topk": 16, "index_head_dim": 32, "index_n_heads": 2,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "max_position_embeddings": 256, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**sizes, **fields})).to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer(512).save_pretrained(folder)
    return str(folder)
