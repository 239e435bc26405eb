"""Put the fused operations into a PEFT model, in place."""

from collections import Counter

from torch import nn

from ..logging import get_logger

logger = get_logger(__name__)


def apply_fused_layers(model: nn.Module, *, attention: bool = True) -> str:
    """Fuse every decoder layer that can be, and return one line that says what is active and what is not."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

    from . import attention_interface, gemma4

    fused, kept = 0, Counter()
    for module in list(model.modules()):
        if type(module) is Gemma4TextDecoderLayer:
            reason = gemma4.why_not(module)
            if reason is None:
                gemma4.fuse(module)
                fused += 1
            else:
                kept[reason] += 1
    if fused and attention:
        config = next(m for m in model.modules() if isinstance(m, Gemma4TextDecoderLayer)).config
        config._attn_implementation = attention_interface.register()
    return f"{fused} decoder layers fused" + "".join(f", {n} not ({reason})" for reason, n in kept.items())
