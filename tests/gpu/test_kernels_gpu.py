"""On a GPU: kernels agree with their references, and replayed layers train as eager ones do, step by step."""

import json
import os

import pytest
import torch
from peft import LoraConfig

from tests.tiny import logged, sft_config, token_rows
from trl_fsdp_qlora.demo.models import tiny_gemma4

pytestmark = pytest.mark.gpu

STEPS = 12
# bf16 rounds at 2**-8; sums over different orders of the same numbers differ by less than that.
AS_EAGER = 2e-3
AS_PLAIN = (5e-3, 5e-2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_gemma4(str(tmp_path_factory.mktemp("models") / "gemma4-8"), num_hidden_layers=8)


def train(checkpoint, tmp_path, fused: bool, replay: bool = True, change=None, **fields):
    from trl_fsdp_qlora import QLoRASFTTrainer

    torch.manual_seed(0)
    rows = token_rows(96, lengths=(32, 32, 48, 48))
    config = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **fields}
    config = sft_config(tmp_path / "out", use_cpu=False, bf16=True, fused=fused, **config)
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=rows, eval_dataset=rows.select(range(8)))
    found = [m.replay.replays for m in trainer.model.modules() if hasattr(m, "replay")]
    assert bool(found) == fused
    if fused:
        found[0].broken = not replay
    if change is not None:
        change(trainer)
    trainer.train()
    if fused and replay and change is None:
        assert not found[0].broken
        # Both lengths of batch, the longer one with padding and without.
        assert len(found[0].recordings) >= 2 and all(4 <= len(kinds) < 8 for kinds in found[0].recordings.values())
    if fused and not replay:
        assert not found[0].recordings
    return trainer


def agree(got, expected, loss: float, grad_norm: float) -> None:
    assert len(got) == len(expected)
    differences = [[abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)] for pair in zip(got, expected, strict=True)]
    worst_loss, worst_norm = map(max, zip(*differences, strict=True))
    print("RESULT", json.dumps({"test": os.environ["PYTEST_CURRENT_TEST"], "steps": len(got), "loss": worst_loss, "grad_norm": worst_norm}))
    for (a, a_norm), (b, b_norm) in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=loss)
        assert a_norm == pytest.approx(b_norm, rel=grad_norm)


@pytest.mark.parametrize("rows, columns, beside", [(96, 128, 16), (64, 1536, 32), (130, 320, 8)])
@pytest.mark.parametrize("double_quant", [True, False])
def test_numbers_are_those_of_bitsandbytes(rows, columns, beside, double_quant):
    """Bit for bit, also into a matrix with room for more columns and rows, which stay as they were."""
    import bitsandbytes as bnb

    from trl_fsdp_qlora.kernels.dequantize import dequantize, dequantize_reference

    options = {"compress_statistics": double_quant, "quant_type": "nf4", "quant_storage": torch.bfloat16}
    layer = bnb.nn.Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, **options).cuda()
    state = layer.weight.quant_state
    state.dtype = torch.bfloat16
    expected = dequantize_reference(layer.weight, state, torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda"))
    assert torch.equal(dequantize(layer.weight, state, torch.empty_like(expected)), expected)
    larger = torch.full((rows + 2, columns + beside), 7.0, dtype=torch.bfloat16, device="cuda")
    dequantize(layer.weight, state, larger[:rows, :columns])
    assert torch.equal(larger[:rows, :columns], expected)
    assert bool((larger[rows:] == 7).all()) and bool((larger[:, columns:] == 7).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gate_and_up_again_in_the_backward_pass(dtype):
    from trl_fsdp_qlora.kernels.gated_gelu import gated_gelu_backward, gated_gelu_forward, gated_gelu_reference

    torch.manual_seed(0)
    gate_up, dy = torch.randn(7, 3000, dtype=dtype, device="cuda"), torch.randn(7, 1500, dtype=dtype, device="cuda")
    exact = gate_up.double().requires_grad_()
    y = gated_gelu_reference(*exact.chunk(2, dim=-1))
    (expected,) = torch.autograd.grad(y, exact, dy.double())
    forward = gated_gelu_forward(gate_up)
    gradient, again = gated_gelu_backward(gate_up, dy)
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for got, of in ((forward, y), (again, y), (gradient, expected)):
        torch.testing.assert_close(got.double(), of, **near)
    torch.testing.assert_close(again, forward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_adds_the_gradient_of_the_residual(dtype):
    """Bit for bit what adding it afterwards gives, where results are rounded before."""
    from trl_fsdp_qlora.kernels.rms_norm import rms_norm, rms_norm_and_residual

    torch.manual_seed(0)
    x, weight, d_norm, d_residual = torch.randn(4, 64, 1536, dtype=dtype, device="cuda")
    x.requires_grad_()
    normed, residual = rms_norm_and_residual(x, weight[0], 1e-6)
    (together,) = torch.autograd.grad([normed, residual], x, [d_norm, d_residual])
    (alone,) = torch.autograd.grad(rms_norm(x, weight[0], 1e-6), x, d_norm)
    exact = {"rtol": 0, "atol": 0} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(together, alone + d_residual, **exact)


def test_replayed_layers_train_as_eager_and_as_plain_ones(checkpoint, tmp_path):
    replayed = train(checkpoint, tmp_path, True)
    eager = train(checkpoint, tmp_path, True, replay=False)
    plain = train(checkpoint, tmp_path, False)
    agree(logged(replayed), logged(eager), AS_EAGER, AS_EAGER)
    agree(logged(replayed), logged(plain), *AS_PLAIN)
    evaluated = [t.evaluate()["eval_loss"] for t in (replayed, eager, plain)]
    assert evaluated == pytest.approx([evaluated[2]] * 3, rel=AS_PLAIN[0])


def test_bf16_adapters(checkpoint, tmp_path):
    replayed = train(checkpoint, tmp_path, True, adapter_dtype="bfloat16")
    plain = train(checkpoint, tmp_path, False, adapter_dtype="bfloat16")
    agree(logged(replayed), logged(plain), *AS_PLAIN)


def test_without_checkpointing(checkpoint, tmp_path):
    """Each layer keeps the activations of the first shape in recordings of its own."""
    recorded = []

    def find(trainer):
        recorded.append(next(m.replay.replays for m in trainer.model.modules() if hasattr(m, "replay")))

    kept = train(checkpoint, tmp_path, True, change=find, gradient_checkpointing=False)
    plain = train(checkpoint, tmp_path, False, gradient_checkpointing=False)
    agree(logged(kept), logged(plain), *AS_PLAIN)
    assert not recorded[0].broken and any(r.keep for kinds in recorded[0].recordings.values() for r in kinds.values())


@pytest.mark.parametrize("layers", [3, 8])
def test_checkpointed_layers_keep_activations_while_there_is_memory(checkpoint, tmp_path, monkeypatch, layers):
    from trl_fsdp_qlora.kernels.graph_pool import Replays

    leaves_room = Replays.leaves_room
    monkeypatch.setattr(Replays, "leaves_room", lambda self, *a, **k: leaves_room(self, *a, **k) and sum(self.keepers.values()) <= layers)
    recorded = []

    def find(trainer):
        recorded.append(next(m.replay.replays for m in trainer.model.modules() if hasattr(m, "replay")))

    kept = train(checkpoint, tmp_path, True, change=find, keep_activations=True)
    plain = train(checkpoint, tmp_path, False)
    agree(logged(kept), logged(plain), *AS_PLAIN)
    assert not recorded[0].broken and sum(recorded[0].keepers.values()) == layers


def test_dropout_runs_without_recordings(checkpoint, tmp_path):
    trainer = train(checkpoint, tmp_path, True, change=lambda trainer: None, lora_dropout=0.1)
    assert not next(m.replay.replays for m in trainer.model.modules() if hasattr(m, "replay")).recordings


def test_generation_and_disabled_adapters_after_training(checkpoint, tmp_path):
    fused, plain = (train(checkpoint, tmp_path, fused, learning_rate=0.0, tower_device="accelerator") for fused in (True, False))
    ids = torch.tensor([[5, 9, 12, 30]], device="cuda")
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    texts = [t.model.eval().generate(**options) for t in (fused, plain)]
    assert torch.equal(*texts)
    rows = torch.randint(8, 300, (2, 32), device="cuda")
    logits = []
    for trainer in (fused, plain):
        with torch.no_grad(), trainer.model.disable_adapter(), torch.autocast("cuda", torch.bfloat16):
            logits += [trainer.model(input_ids=rows).logits.float() for _ in range(3)]
    for other in logits[1:]:
        assert (other - logits[0]).norm() / logits[0].norm() < 2e-2


@pytest.mark.parametrize("change", ["merge_and_unload", "unload", "add_adapter"])
def test_adapters_that_change_after_recording_count(checkpoint, tmp_path, change):
    ids, logits = torch.randint(8, 300, (2, 32), device="cuda"), []
    for fused in (True, False):
        model = train(checkpoint, tmp_path, fused, learning_rate=0.0, tower_device="accelerator").model.eval()
        torch.manual_seed(4)
        if change == "add_adapter":
            targets = r".*language_model\.layers\.\d+\.\w+\.(k_proj|down_proj)"
            model.add_adapter("other", LoraConfig(target_modules=targets, init_lora_weights=False))
            model.set_adapter("other")
        else:
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(parameter, std=0.1)
            model = getattr(model, change)()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits += [model(input_ids=ids).logits.float() for _ in range(3)]
    for other in logits[1:]:
        assert (other - logits[0]).norm() / logits[0].norm() < 2e-2


def test_kept_activations_survive_layers_out_of_order(checkpoint, tmp_path):
    """A backward pass after an earlier recording ran again: computed anew, bit for bit."""
    trainer = train(checkpoint, tmp_path, True, keep_activations=True, change=lambda trainer: None)
    replays = next(m.replay.replays for m in trainer.model.modules() if hasattr(m, "replay"))
    kept = sorted((r for kinds in replays.recordings.values() for r in kinds.values() if r.keep), key=lambda r: r.number)
    assert len(kept) >= 2
    for earlier, later in zip(kept, kept[1:], strict=False):
        gradients = []
        for disturb in (False, True):
            later.forward()
            of_forward = later.forwards
            if disturb:
                earlier.forward()
            d_inputs, flat = later.backward([torch.ones_like(t) for t in later.d_outputs], of_forward)
            gradients.append([*d_inputs.values(), flat])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
