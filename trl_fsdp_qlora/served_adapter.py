"""The adapter as a vLLM engine reads it: whole tensors on every rank, in the engine's dtype, under PEFT's names."""

import os
import shutil
import tempfile

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

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
    sharding.reshard(model)
    adapter = model.active_adapter
    pieces: dict[str, torch.Tensor] = {}
    rank = 0
    for name, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in layer.lora_A:
            continue
        rank = max(rank, layer.r[adapter])
        scale = layer.scaling[adapter]
        lora_b = _whole(layer.lora_B[adapter].weight)
        pieces[f"base_model.model.{name}.lora_A.weight"] = _whole(layer.lora_A[adapter].weight)
        pieces[f"base_model.model.{name}.lora_B.weight"] = lora_b if scale == 1 else lora_b * scale
    flat = torch.cat([piece.flatten().to(dtype) for piece in pieces.values()])
    views = flat.split([piece.numel() for piece in pieces.values()])
    tensors = {name: view.view(piece.shape) for (name, piece), view in zip(pieces.items(), views, strict=True)}
    return ServedAdapter(tensors, flat, rank)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    if isinstance(tensor, DTensor) and tensor.device.type != tensor.device_mesh.device_type:
        tensor = tensor.to(tensor.device_mesh.device_type)  # an offloaded shard; the ranks talk between accelerators
    return sharding.full_tensor(tensor)
