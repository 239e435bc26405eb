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

from .experts import plain_experts

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
    parameters: set[str],
    weights: dict[str, Callable[[str], torch.Tensor]],
    texts: tuple[str, ...] = SAMPLE_TEXTS,
    max_tokens: int = 256,
) -> dict[str, Drift]:
    """Compare `model`, an unmerged adapter on its base, with each merge in `weights`.

    Args:
        parameters: names, in the base model, of what a merge replaces: weights of linear layers, and stacks of experts.
        weights: for each merge, what gives the merged value of such a parameter.
    """
    before = _log_probabilities(model, tokenizer, texts, max_tokens)
    drifts = {}
    for merge, weight_of in weights.items():
        with _using(model, parameters, weight_of):
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
def _using(model: PeftModel, parameters: set[str], weight_of: Callable[[str], torch.Tensor]):
    """Let the modules that own `parameters` compute with the values that `weight_of` gives, and without adapters."""
    base = model.get_base_model()
    patched = {}
    for parameter in parameters:
        name, _, leaf = parameter.rpartition(".")
        patched.setdefault(name, []).append(leaf)
    for name, leaves in patched.items():
        module = base.get_submodule(name)
        layer = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        if leaves == ["weight"]:
            module.forward = _linear(f"{name}.weight", layer.bias, weight_of)
        else:
            module.forward = _experts(name, layer, leaves, weight_of)
    try:
        yield
    finally:
        for name in patched:
            del base.get_submodule(name).forward


def _linear(name: str, bias: torch.Tensor | None, weight_of: Callable[[str], torch.Tensor]):
    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return F.linear(x, weight_of(name).to(x.device, x.dtype), bias)

    return forward


def _experts(name: str, layer: torch.nn.Module, leaves: list[str], weight_of: Callable[[str], torch.Tensor]):
    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        plain = plain_experts(layer)
        for leaf in leaves:
            plain._parameters[leaf] = torch.nn.Parameter(weight_of(f"{name}.{leaf}").to(x.device, x.dtype), requires_grad=False)
        return plain(x, *args, **kwargs)

    return forward
