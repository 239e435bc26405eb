"""How far merged weights are from the unmerged model, in log-probabilities of sample text.

One 4-bit model is loaded. For each merge its quantised layers are made to use the merged weights, read from the source
and merged when the layer is called, so that no more than one such weight is in memory and no merged file is needed.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch.nn import functional as F

SAMPLE_TEXTS = (
    "The boat left the harbour at dawn, and by noon the island was only a blue line behind it. Nobody on board spoke of going back.",
    "To merge two sorted lists, compare their first items, move the smaller one to the result, and repeat until one list is empty.",
    "Question: A shop sells pencils at three for two euros. How much do twelve pencils cost? Answer: Twelve pencils are four times "
    "three pencils, so they cost four times two euros, which is eight euros.",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": {"notes": 7, "letters": null}}',
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative length')\n    return width * height\n",
    "Am Abend wurde es kühl, und wir gingen ins Haus. Il restait un peu de soupe. Mañana será otro día.",
)


@dataclass(frozen=True)
class Drift:
    """Absolute differences of the log-probabilities of sample text, token by token."""

    max: float
    mean: float
    tokens: int


def measure_drift(
    model: PeftModel,
    tokenizer,
    modules: set[str],
    weights: dict[str, Callable[[str], torch.Tensor]],
    texts: tuple[str, ...] = SAMPLE_TEXTS,
    max_tokens: int = 256,
) -> dict[str, Drift]:
    """Compare `model`, an unmerged adapter on its base, with each merge in `weights`.

    Args:
        modules: names, in the base model, of the linear layers whose weights a merge replaces.
        weights: for each merge, what gives the merged weight of such a layer.
    """
    before = _log_probabilities(model, tokenizer, texts, max_tokens)
    drifts = {}
    for merge, weight_of in weights.items():
        with _using(model, modules, weight_of):
            after = _log_probabilities(model, tokenizer, texts, max_tokens)
        difference = (after - before).abs()
        drifts[merge] = Drift(difference.max().item(), difference.mean().item(), len(difference))
    return drifts


@torch.no_grad()
def _log_probabilities(model, tokenizer, texts, max_tokens: int) -> torch.Tensor:
    """Log-probability of every token of `texts` that has one before it, shape (tokens,), fp32."""
    device = next(p.device for n, p in model.named_parameters() if "lora_" in n)
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_tokens)["input_ids"].to(device)
        if ids.shape[1] > 1:
            logits = model(input_ids=ids).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu())
    if not found:
        raise ValueError("The sample text has no two tokens to compare.")
    return torch.cat(found)


@contextmanager
def _using(model: PeftModel, modules: set[str], weight_of: Callable[[str], torch.Tensor]):
    """Let the linear layers `modules` compute with the weights that `weight_of` gives, and without adapters."""
    patched = [(name, module) for name, module in model.get_base_model().named_modules() if name in modules]
    for name, module in patched:
        layer = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        module.forward = _linear(name, layer.bias, weight_of)
    try:
        yield
    finally:
        for _, module in patched:
            del module.forward


def _linear(name: str, bias: torch.Tensor | None, weight_of: Callable[[str], torch.Tensor]):
    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return F.linear(x, weight_of(name).to(x.device, x.dtype), bias)

    return forward
