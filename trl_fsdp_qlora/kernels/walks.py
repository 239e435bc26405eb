"""Questions that the training loop puts to a whole model in every step, answered without walking its thousands of modules."""

import functools
import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook


def shorten_walks(model: nn.Module, *, sharded: bool = False) -> None:
    """Remember the modules and parameters of `model`, and their count, until a module or parameter is registered in it.

    In every step `Trainer` sets the training mode, counts operations, and clips and clears gradients: five walks. Parameters
    of a `sharded` model (replicas shard their adapters, too) are not remembered: FSDP puts others in their place without registering them.
    """
    walks = _Walks(model)
    model.train = walks.train
    if not sharded:
        model.parameters = walks.parameters
    if hasattr(walks.base, "num_parameters"):
        walks.base.num_parameters = walks.num_parameters


@functools.cache
def _watched() -> weakref.WeakSet:
    """Those who are told of every module and parameter registered anywhere."""
    watched = weakref.WeakSet()

    def tell(module, *_) -> None:
        for walks in watched:
            walks.registered_in(module)

    register_module_module_registration_hook(tell)
    register_module_parameter_registration_hook(tell)
    return watched


class _Walks:
    """Its methods stand in for those of the model, and follow it when it is copied."""

    def __init__(self, model: nn.Module):
        self.__setstate__({"model": model})

    def __getstate__(self) -> dict:
        return {"model": self.model}

    def __setstate__(self, state: dict) -> None:
        self.model = state["model"]
        self._forget()
        _watched().add(self)

    @property
    def base(self) -> nn.Module:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def train(self, mode: bool = True) -> nn.Module:
        if mode and all(module.training for module in self._modules()):
            return self.model
        return type(self.model).train(self.model, mode)

    def parameters(self, recurse: bool = True):
        if not recurse:
            return type(self.model).parameters(self.model, recurse=False)
        return iter(self._remember("parameters", lambda: list(type(self.model).parameters(self.model))))

    def num_parameters(self, *args, **kwargs) -> int:
        base = self.base
        count = functools.partial(type(base).num_parameters, base, *args, **kwargs)
        return self._remember(("count", args, *sorted(kwargs.items())), count)

    def registered_in(self, module: nn.Module) -> None:
        # Not in a list of layers that a forward pass makes for itself.
        if id(module) in self._ids:
            self._forget()

    def _forget(self) -> None:
        self._known, self._ids = {}, frozenset()

    def _modules(self) -> list[nn.Module]:
        if "modules" not in self._known:
            self._known["modules"] = list(self.model.modules())
            self._ids = frozenset(map(id, self._known["modules"]))
        return self._known["modules"]

    def _remember(self, key, walk):
        self._modules()  # so that a registration in one of them is noticed
        if key not in self._known:
            self._known[key] = walk()
        return self._known[key]
