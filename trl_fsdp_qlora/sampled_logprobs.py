"""Log-probabilities of the tokens that transformers' `generate` samples, which it otherwise gives only with all logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

# Shapes: B rows, T new tokens, V tokens in the vocabulary.


class SampledLogProbs(LogitsProcessor):
    """Sees every step's logits on their way to the sampler, and keeps one number a row of them.

    Args:
        temperature: logits are divided by it, as for training. Top-k and top-p are not applied, as in training.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self._last_BV: torch.Tensor | None = None
        self._steps: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        if self._last_BV is not None:
            self._keep(input_ids[:, -1])
        self._last_BV = (scores.float() / self.temperature).log_softmax(-1)
        return scores

    def of(self, sequences: torch.Tensor) -> torch.Tensor:
        """The log-probabilities (B, T) of the new tokens in what `generate` returned."""
        if self._last_BV is not None:
            self._keep(sequences[:, -1])
            self._last_BV = None
        return torch.stack(self._steps, dim=1) if self._steps else sequences.new_zeros(len(sequences), 0, dtype=torch.float32)

    def _keep(self, sampled_B: torch.Tensor) -> None:
        self._steps.append(self._last_BV.gather(-1, sampled_B[:, None])[:, 0])


@contextmanager
def generating(model: PreTrainedModel, temperature: float, *, autocast, every_rank: bool) -> Iterator[list[torch.Tensor]]:
    """Within, `model.generate` runs under `autocast()` and adds to the yielded list what it sampled with, shape (B, T).

    Args:
        every_rank: each rank must take part in each forward pass, because weights are gathered in it. A rank whose rows
            are finished then goes on until all are: transformers knows that only of models that accelerate wrapped.
    """
    found: list[torch.Tensor] = []
    own = "generate" in vars(model)
    generate = model.generate

    def generate_and_record(*args, **kwargs):
        recorder = SampledLogProbs(temperature)
        with autocast():
            sequences = generate(*args, logits_processor=LogitsProcessorList([recorder]), synced_gpus=every_rank, **kwargs)
        found.append(recorder.of(sequences))
        return sequences

    model.generate = generate_and_record
    try:
        yield found
    finally:
        if own:
            model.generate = generate
        else:
            del model.generate
