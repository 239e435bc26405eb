"""On one GPU: `python -m pytest tests/gpu`. Skipped where there is none."""

import json
import os

import pytest
import torch

from tests.tiny import logged, sft_config, token_rows
from trl_fsdp_qlora import QLoRASFTTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    return tiny_gemma4(str(model_cache / "gemma4"))


def train(checkpoint, out, **fields):
    config = sft_config(out, **{"use_cpu": False, "max_steps": 4, "bf16": False, **fields})
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(16, (24, 9, 17, 30)))
    trainer.train()
    return trainer


def test_host_placement_changes_no_step(checkpoint, tmp_path):
    """Table and towers in host memory, or all on the card: the same losses, bit for bit."""
    host = train(checkpoint, tmp_path, per_layer_embedding_device="cpu", tower_device="cpu")
    card = train(checkpoint, tmp_path, per_layer_embedding_device="accelerator", tower_device="accelerator")
    base = host.model.get_base_model().model
    assert base.language_model.embed_tokens_per_layer.weight.device.type == "cpu"
    assert {p.device.type for p in base.vision_tower.parameters()} == {"cpu"}
    assert logged(host) == logged(card)


def test_gpu_and_cpu_train_alike(checkpoint, tmp_path):
    gpu = train(checkpoint, tmp_path)
    cpu = train(checkpoint, tmp_path, use_cpu=True)
    for (loss, norm), (other_loss, other_norm) in zip(logged(gpu), logged(cpu), strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-4) and norm == pytest.approx(other_norm, rel=1e-2)


def test_bf16_numbers_are_rewritten_by_the_copy_that_a_gather_uses():
    """Why a unit of one 16-bit dtype is guarded. Should this ever pass unchanged, the guard can go."""
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16).cuda()
    target = [torch.empty(65536, dtype=torch.bfloat16, device="cuda")]
    torch._foreach_copy_(target, [words.view(torch.bfloat16)])
    assert int((target[0].view(torch.int16) != words).sum()) > 0
    exact = [torch.empty(131072, dtype=torch.uint8, device="cuda")]
    torch._foreach_copy_(exact, [words.view(torch.uint8)])
    assert torch.equal(exact[0], words.view(torch.uint8))


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"])
def test_optimizers(checkpoint, tmp_path, optim):
    trainer = train(checkpoint, tmp_path, optim=optim, bf16=True)
    assert all(norm < 1e4 for _, norm in logged(trainer))


@pytest.mark.parametrize("offload", [True, False])
def test_activation_offloading(checkpoint, tmp_path, offload):
    trainer = train(checkpoint, tmp_path, activation_offloading=offload)
    reference = train(checkpoint, tmp_path)
    for (loss, norm), (other_loss, other_norm) in zip(logged(trainer), logged(reference), strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6) and norm == pytest.approx(other_norm, rel=1e-4)


def test_resuming_with_adapters_on_towers_in_host_memory(checkpoint, tmp_path):
    fields = {"language_model_only": False, "tower_device": "cpu", "save_strategy": "steps", "save_steps": 2}
    whole = train(checkpoint, tmp_path / "whole", **fields)
    config = sft_config(tmp_path / "resumed", use_cpu=False, bf16=False, max_steps=4, **fields)
    resumed = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(16, (24, 9, 17, 30)))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    tower = resumed.model.get_base_model().model.vision_tower
    assert {(p.requires_grad, p.device.type) for p in tower.parameters()} == {(True, "cuda"), (False, "cpu")}
    state = resumed._bare_optimizer().state
    assert {s["exp_avg"].device.type for s in state.values()} == {"cuda"}
    for step, other in zip(logged(resumed)[-2:], logged(whole)[-2:], strict=True):
        assert step == pytest.approx(other, rel=1e-4)


def test_image_batch_moves_the_tower_in(checkpoint, tmp_path):
    trainer = train(checkpoint, tmp_path, tower_device="cpu", max_steps=1)
    model = trainer.model
    size, patches = model.config.vision_config.patch_size, 18
    positions = torch.stack([torch.arange(patches) % 6, torch.arange(patches) // 6], dim=-1)[None]
    image = model.config.image_token_id
    ids = torch.tensor([[2, 40, image, image, 41, 42, 43]])
    inputs = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == image, -100),
        "pixel_values": torch.rand(1, patches, 3 * size * size),
        "image_position_ids": positions,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == image).long(),
    }
    loss = model(**{name: tensor.cuda() for name, tensor in inputs.items()}).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert {p.device.type for p in model.get_base_model().model.vision_tower.parameters()} == {"cuda"}


def test_loss_falls_at_the_real_shape(tmp_path):
    """E2B's shape with random weights, if `E2B_CHECKPOINT` names a folder of benchmarks/make_model.py --smooth."""
    folder = os.environ.get("E2B_CHECKPOINT")
    if not folder:
        pytest.skip("E2B_CHECKPOINT is not set")
    rows = token_rows(1, (1024,))
    config = sft_config(tmp_path, use_cpu=False, max_steps=10, per_device_train_batch_size=1, learning_rate=1e-4)
    trainer = QLoRASFTTrainer(folder, config, train_dataset=rows)
    trainer.train()
    steps = logged(trainer)
    losses = [loss for loss, _ in steps]
    print("RESULT", json.dumps({"test": "loss_falls_at_the_real_shape", "steps": steps}))
    assert all(torch.isfinite(torch.tensor(norm)) for _, norm in steps)
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False)), losses


def test_saved_adapter_at_the_real_shape(tmp_path):
    """Saved by the trainer, loaded by PEFT over the same base: the same logits, one for each of 262,144 tokens."""
    folder = os.environ.get("E2B_CHECKPOINT")
    if not folder:
        pytest.skip("E2B_CHECKPOINT is not set")
    check_saved_adapter(folder, tmp_path, use_cpu=False)


def check_saved_adapter(folder, tmp_path, **fields):
    from peft import PeftModel

    from trl_fsdp_qlora.loading import load_model, quantization_from

    # Bit for bit, so PEFT's own operations on both sides.
    config = sft_config(tmp_path / "run", max_steps=1, per_device_train_batch_size=1, lora_r=8, fused=False, **fields)
    trainer = QLoRASFTTrainer(folder, config, train_dataset=token_rows(1, (64,)))
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    ids = torch.tensor([[2, 40, 41, 42]], device=trainer.args.device)
    # As in training: adapters are fp32, and computed in bf16 beside the layers.
    with torch.no_grad(), torch.autocast(ids.device.type, dtype=torch.bfloat16):
        mine = trainer.model.eval()(input_ids=ids).logits
        del trainer
        nf4 = quantization_from("nf4", True, torch.bfloat16, torch.bfloat16)
        base = load_model(folder, quantization_config=nf4, device=ids.device)
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
    size = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    print("RESULT", json.dumps({"test": "saved_adapter_at_the_real_shape", "shape": list(mine.shape), "bytes": size}))
    assert mine.shape == (1, 4, 262144) and mine.isfinite().all()
    assert torch.equal(mine, theirs)
