"""Questions that the training loop puts to a whole model in every step, answered without walking its thousands of modules."""

import functools
import types

from torch import nn


def shorten_walks(model: nn.Module) -> None:
    """Count the parameters of `model` once (`Trainer` asks every step, to count operations), and make `train()` quick
    where every module is in training mode already.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(base, "num_parameters"):
        base.num_parameters = functools.cache(base.num_parameters)
    model.train = types.MethodType(_train, model)


def _train(model: nn.Module, mode: bool = True) -> nn.Module:
    modules = model.__dict__.get("walked_modules")
    if mode and modules is not None and all(module.training for module in modules):
        # A module that came later is in training mode unless someone changed that, too.
        return model
    model.walked_modules = list(model.modules())
    return type(model).train(model, mode)
