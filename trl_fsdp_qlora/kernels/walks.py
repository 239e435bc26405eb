"""Questions that the training loop puts to a whole model in every step, answered without walking its thousands of modules."""

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook


def shorten_walks(model: nn.Module, *, sharded: bool = False) -> None:
    """Remember the modules and parameters of `model`, and their count, until a module or parameter is registered anywhere.

    In every step `Trainer` sets the training mode, counts operations, and clips and clears gradients: five walks. Parameters
    of a `sharded` model are not remembered: FSDP puts others in their place without registering them.
    """
    walks = _Walks(model)
    model.train = walks.train
    if not sharded:
        model.parameters = walks.parameters
    if hasattr(walks.base, "num_parameters"):
        walks.base.num_parameters = walks.num_parameters


@functools.cache
def _registrations() -> list[int]:
    """The number of modules and parameters registered anywhere so far, kept up to date."""
    count = [0]

    def one_more(*_) -> None:
        count[0] += 1

    register_module_module_registration_hook(one_more)
    register_module_parameter_registration_hook(one_more)
    return count


class _Walks:
    """Its methods stand in for those of the model, and follow it when it is copied."""

    def __init__(self, model: nn.Module):
        self.model, self.base = model, model.get_base_model() if hasattr(model, "get_base_model") else model
        self._known, self._as_of = {}, None

    def train(self, mode: bool = True) -> nn.Module:
        modules = self._remember("modules", lambda: list(self.model.modules()))
        if mode and all(module.training for module in modules):
            return self.model
        return type(self.model).train(self.model, mode)

    def parameters(self, recurse: bool = True):
        if not recurse:
            return type(self.model).parameters(self.model, recurse=False)
        return iter(self._remember("parameters", lambda: list(type(self.model).parameters(self.model))))

    def num_parameters(self, *args, **kwargs) -> int:
        count = functools.partial(type(self.base).num_parameters, self.base, *args, **kwargs)
        return self._remember(("count", args, *sorted(kwargs.items())), count)

    def _remember(self, key, walk):
        if self._as_of != (latest := _registrations()[0]):
            self._known, self._as_of = {}, latest
        if key not in self._known:
            self._known[key] = walk()
        return self._known[key]
