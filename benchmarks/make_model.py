"""Write a Gemma 4 checkpoint with random weights: the real shapes, none of the real numbers.

    python benchmarks/make_model.py e2b /tmp/e2b

`--smooth` scales norms down. Random weights behind norms of one are chaotic (scores with a standard deviation of 16,
every block adds a vector as long as the stream), so that two runs which round differently drift apart within steps.
"""

import argparse
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, PreTrainedTokenizerFast


def layers(sliding: int, repeats: int) -> list[str]:
    return (["sliding_attention"] * sliding + ["full_attention"]) * repeats


SIZES = {
    "e2b": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "sliding_window": 512, "layer_types": layers(4, 7),
    },
    "e4b": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_kv_shared_layers": 18, "use_double_wide_mlp": False, "sliding_window": 512, "layer_types": layers(5, 7),
    },
    "31b": {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "layer_types": layers(5, 10),
    },
    "26b_a4b": {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "layer_types": layers(5, 5), "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 32, "global_head_dim": 64, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "sliding_window": 16,
        "vocab_size": 512, "vocab_size_per_layer_input": 512, "layer_types": layers(1, 3),
    },
}  # fmt: skip
TINY_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY_AUDIO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 32}


def configuration(size: str) -> Gemma4Config:
    text = {"final_logit_softcapping": 30.0, **SIZES[size]}
    if size == "tiny":
        return Gemma4Config(text_config=text, vision_config={**TINY_VISION, "head_dim": 16}, audio_config=TINY_AUDIO)
    return Gemma4Config(text_config=text, vision_config={}, audio_config=None if size in ("31b", "26b_a4b") else {})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Any text becomes a few hundred distinct tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox 0123456789"] * 9, trainer)
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), special, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def scale_norms_down(model) -> None:
    for name, parameter in model.named_parameters():
        if "language_model" not in name:
            continue
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.fill_(0.25)
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "post_per_layer_input_norm.weight")):
            parameter.data.fill_(0.15)


def make_model(size: str, out: str, smooth: bool) -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Gemma4ForConditionalGeneration(configuration(size))
    model.to(torch.bfloat16)
    if smooth:
        scale_norms_down(model)
    model.save_pretrained(out, max_shard_size="5GB")  # host memory holds one file at a time
    make_tokenizer().save_pretrained(out)
    count = sum(p.numel() for p in model.parameters())
    print(f"{size}: {count / 1e9:.3f} billion parameters in {out}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("out")
    parser.add_argument("--smooth", action="store_true")
    arguments = parser.parse_args()
    make_model(arguments.size, arguments.out, arguments.smooth)
