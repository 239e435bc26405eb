"""`attention` under a name of its own in transformers' registries, masks included.

`attn_implementation="stretched"` then works for any model that goes through the registries.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .attention import attention, visible

NAME = "stretched"


def register() -> str:
    """Make the name known to transformers, and return it."""
    AttentionInterface.register(NAME, stretched_attention_forward)
    AttentionMaskInterface.register(NAME, first_visible_keys)
    return NAME


def first_visible_keys(batch_size, q_length, kv_length, allow_is_causal_skip=True, attention_mask=None, device=None, **kwargs):
    """Nothing where every earlier key is seen, (B, 1, S, 1) int32 where rows are padded, else SDPA's 4D bool mask.

    Windows are not in it: `attention` keeps to them itself.
    """
    plain = allow_is_causal_skip and q_length == kv_length
    if plain and (attention_mask is None or bool(attention_mask.all())):
        return None
    if not plain or _hides_between(attention_mask.bool()):
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, allow_is_causal_skip=allow_is_causal_skip,
            attention_mask=attention_mask, device=device, **kwargs,
        )  # fmt: skip
    # Padding on the right is seen by padding only. A query on the left padding sees itself.
    padding = attention_mask.to(torch.int32).argmax(-1, keepdim=True)
    first_key = torch.minimum(padding, torch.arange(q_length, device=padding.device))
    return first_key.to(torch.int32)[:, None, :, None]


def _hides_between(seen: torch.Tensor) -> bool:
    """Whether a row (B, S) hides tokens between others, not only before and after them."""
    comes_again = seen[:, 1:] & ~seen[:, :-1]
    return bool((comes_again & (seen.cumsum(-1)[:, :-1] > 0)).any())


def stretched_attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    queries, keys = query.shape[2], key.shape[2]
    first_key = attention_mask[:, 0, :, 0] if attention_mask is not None and attention_mask.dtype == torch.int32 else None
    plain = (attention_mask is None or first_key is not None) and getattr(module, "is_causal", True)
    if plain and not dropout and queries == keys:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale, sliding_window, first_key), None
    if plain:
        # The last queries only, or dropout.
        if first_key is not None:
            first_key = torch.nn.functional.pad(first_key, (keys - queries, 0))
        attention_mask = visible(keys - queries, queries, 0, keys, sliding_window, first_key, query.device)[:, :, :, 0]
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
