"""Which attention the language model gets, and which towers."""

from torch import nn

from .structure import find_structure

# The kernels of FlashAttention 2 and 3 stop here: https://github.com/Dao-AILab/flash-attention/issues/2427
MAX_FLASH_HEAD_DIM = 256


def attention_for(skeleton: nn.Module, attn_implementation: str | dict | None) -> str | dict | None:
    """`attn_implementation` for the language model alone, in the form `from_pretrained` takes.

    Asking a multimodal model for `sdpa` as a whole raises where a tower has no such attention (Gemma 4's audio tower).

    Raises:
        ValueError: for FlashAttention with head dimensions that it has no kernel for.
    """
    config = skeleton.config
    text_config = config.get_text_config()
    text_name = next((n for n in getattr(config, "sub_configs", {}) if getattr(config, n, None) is text_config), "")
    if isinstance(attn_implementation, dict):
        check_attention(skeleton, attn_implementation.get(text_name, attn_implementation.get("")))
        return attn_implementation
    check_attention(skeleton, attn_implementation)
    return {text_name: attn_implementation} if text_name and attn_implementation else attn_implementation


def check_attention(model: nn.Module, attn_implementation: str | None) -> None:
    """Raise `ValueError` if FlashAttention is asked for a language model with head dimensions above 256.

    The dimensions are read from the attention modules: a config's `head_dim` need not hold for every layer.
    """
    if not attn_implementation or "flash" not in attn_implementation:
        return
    language_model = model.get_submodule(find_structure(model).language_model)
    head_dim = max(getattr(m, "head_dim", 0) for m in language_model.modules() if isinstance(getattr(m, "head_dim", 0), int))
    if head_dim > MAX_FLASH_HEAD_DIM:
        raise ValueError(
            f"`attn_implementation={attn_implementation!r}` serves head dimensions up to {MAX_FLASH_HEAD_DIM}, but the "
            f"language model has layers with {head_dim}. Write 'sdpa' (the default), 'flex_attention' or 'eager'."
        )
