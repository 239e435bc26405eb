"""Tiles change nothing but the memory they need."""

import copy
from contextlib import nullcontext

import pytest
import torch

from tests.fused_on_cpu import fused_on_cpu
from tests.tiny import logged, sft_config, token_rows
from trl_fsdp_qlora import QLoRASFTTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4, tiny_gemma4_model
from trl_fsdp_qlora.tiled_mlp import tile_mlps


def test_outputs_and_gradients():
    plain, tiled = tiny_gemma4_model(), tiny_gemma4_model()
    assert tile_mlps(tiled, 8) == 6
    ids = torch.randint(8, 300, (2, 21))
    for model in (plain, tiled):
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, one), other in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids).logits, tiled(input_ids=ids).logits)


def test_a_copy_computes_with_its_own_weights():
    model = tiny_gemma4_model()
    tile_mlps(model, 8)
    copied, ids = copy.deepcopy(model), torch.randint(8, 300, (1, 21))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for layer in copied.model.language_model.layers:
            layer.mlp.down_proj.weight.zero_()
        assert torch.equal(model(input_ids=ids).logits, before) and not torch.equal(copied(input_ids=ids).logits, before)


def test_only_one_tile_at_a_time():
    model = tiny_gemma4_model()
    tile_mlps(model, 8)
    longest = []
    model.model.language_model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, o: longest.append(i[0].shape[1]))
    model(input_ids=torch.randint(8, 300, (1, 21)))
    assert longest == [8, 8, 5]


def test_training(model_cache, tmp_path):
    checkpoint = tiny_gemma4(str(model_cache / "gemma4"))
    steps = []
    for tile_size in (0, 8):
        config = sft_config(tmp_path, bf16=False, mlp_tile_size=tile_size)
        trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(6, (30,)))
        trainer.train()
        steps.append(logged(trainer))
    for (loss, norm), (other_loss, other_norm) in zip(*steps, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-6) and other_norm == pytest.approx(norm, rel=1e-4)


def test_a_negative_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mlp_tile_size=-1"):
        sft_config(tmp_path, mlp_tile_size=-1)


def test_dropout_in_tiles_is_the_same_in_both_passes(model_cache, tmp_path):
    """Gradients of fused operations are those of PyTorch's, which keep the state of random numbers for a tile."""
    checkpoint = tiny_gemma4(str(model_cache / "gemma4"))
    ids = torch.randint(8, 300, (1, 24), generator=torch.Generator().manual_seed(1))
    found = []
    for fused in (False, True):
        config = sft_config(tmp_path, bf16=False, fused=fused, mlp_tile_size=8, lora_dropout=0.3)
        with fused_on_cpu(replayed=False) if fused else nullcontext():
            trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(6, (24,)))
        model = trainer.model.train()
        torch.manual_seed(5)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for p in trained.values():
            torch.nn.init.normal_(p, std=0.05)
        torch.manual_seed(7)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in trained.items() if ".mlp." in name})
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, rtol=1e-3, atol=1e-5, msg=name)
