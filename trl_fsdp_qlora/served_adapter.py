"""The adapter as a vLLM engine reads it: whole tensors on every rank, in the engine's dtype, under PEFT's names."""

import os
import shutil
import tempfile

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

from . import sharding, staging
from .training_state import ADAPTER_FILE

# Reading a LoRA configuration, vLLM knows one rank and one scale for all modules. So the scale (alpha, rank-stabilised
# or not, patterns of both) is multiplied into B before B is rounded, and the engine is told `lora_alpha = r`: scale 1.


class ServedAdapter:
    """A copy of an adapter at one moment.

    Attributes:
        tensors: under the names in PEFT's files; views of one flat tensor, so that two copies compare in one operation.
        rank: the largest rank of a module.
        modules: number of adapted modules.
        bytes: what has to move.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], flat: torch.Tensor, rank: int):
        self.tensors = tensors
        self._flat = flat
        self.rank = rank
        self.modules = len(tensors) // 2
        self.bytes = flat.numel() * flat.element_size()

    def equals(self, other: "ServedAdapter | None") -> bool:
        return other is not None and self._flat.shape == other._flat.shape and torch.equal(self._flat, other._flat)

    def write(self, folder: str) -> None:
        """Write the files of a PEFT adapter to `folder`, which is there whole or not at all."""
        parent = os.path.dirname(os.path.abspath(folder))
        os.makedirs(parent, exist_ok=True)
        staged = tempfile.mkdtemp(prefix="._", dir=parent)
        try:
            flat, start, tensors = self._flat.cpu(), 0, {}
            for name, tensor in self.tensors.items():
                tensors[name] = flat[start : start + tensor.numel()].view(tensor.shape)
                start += tensor.numel()
            save_file(tensors, os.path.join(staged, ADAPTER_FILE))
            staging.write_json(os.path.join(staged, "adapter_config.json"), self.config())
            staging.flush(staged)
            os.chmod(staged, 0o755)  # the server may run as another user
            os.rename(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def config(self) -> dict:
        """What a PEFT adapter's configuration file says of it."""
        leaves = sorted({name.rsplit(".", 3)[1] for name in self.tensors})
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank, "target_modules": leaves, "bias": "none"}


@torch.no_grad()
def gather_served_adapter(model: PeftModel, dtype: torch.dtype) -> ServedAdapter:
    """The active adapter of `model` in `dtype`, on every rank. Only LoRA tensors are gathered. Call it on all ranks."""
    adapter = model.active_adapter
    layers, units = _walked(model, (adapter, *model.peft_config))
    for unit in units:
        unit.reshard()
    matrices = [module[adapter].weight.detach() for _, layer in layers for module in (layer.lora_A, layer.lora_B)]
    whole = sharding.full_tensors(matrices)
    lora_a, lora_b = whole[::2], whole[1::2]
    scales = [float(layer.scaling[adapter]) for _, layer in layers]
    if any(scale != 1 for scale in scales):
        lora_b = torch._foreach_mul(lora_b, scales)
    # A few launches for all modules rather than a few for each: there are hundreds.
    pieces = [piece for pair in zip(lora_a, lora_b, strict=True) for piece in pair]
    flat = torch.cat([piece.reshape(-1) for piece in pieces]).to(dtype)
    names = [f"base_model.model.{name}.lora_{matrix}.weight" for name, _ in layers for matrix in "AB"]
    views = flat.split([piece.numel() for piece in pieces])
    tensors = {name: view.view(piece.shape) for name, view, piece in zip(names, views, pieces, strict=True)}
    return ServedAdapter(tensors, flat, max((layer.r[adapter] for _, layer in layers), default=0))


def _walked(model: PeftModel, adapters: tuple[str, ...]) -> tuple[list[tuple[str, LoraLayer]], list[FSDPModule]]:
    """The layers that carry the first of `adapters`, and the units of FSDP; looked for again when there are other adapters."""
    known = model.__dict__.get("served_layers")
    if known is None or known[0] != adapters:
        base = model.get_base_model()
        layers = [(n, m) for n, m in base.named_modules() if isinstance(m, LoraLayer) and adapters[0] in m.lora_A]
        known = model.__dict__["served_layers"] = adapters, layers, sharding.fsdp_units(model)
    return known[1:]
