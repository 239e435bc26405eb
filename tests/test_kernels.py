"""Fused operations on the CPU: gradients in fp64, layers against PEFT and transformers, replay with stand-ins for graphs."""

import copy
from contextlib import nullcontext

import bitsandbytes as bnb
import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from tests.fused_on_cpu import OnCpu, fused_on_cpu
from tests.tiny import logged, sft_config, token_rows
from trl_fsdp_qlora import QLoRASFTTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4, tiny_tokenizer
from trl_fsdp_qlora.kernels import attention, fusing, graph_pool, joined_layers, qlora_linear, recording, replay, walks
from trl_fsdp_qlora.kernels.fusing import replays_of
from trl_fsdp_qlora.kernels.gated_gelu import gated_gelu_reference
from trl_fsdp_qlora.kernels.qlora_linear import LinearGroup, QLoRAGatedLinear, QLoRALinear, Slot, qlora_linear_reference
from trl_fsdp_qlora.logging import warn_once

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    # Enough layers that two share a recording.
    return tiny_gemma4(str(model_cache / "gemma4-8"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def llama(model_cache):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = model_cache / "llama"
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.1)).save_pretrained(folder)
    tiny_tokenizer(512).save_pretrained(folder)
    return str(folder)


# --- one QLoRA linear ---


def random(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("outputs, ranks", [([5], [3]), ([8, 4, 4], [2, 2, 2]), ([6, 6], [4, 0]), ([5], [3, 2])])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_joined_linear(rows, outputs, ranks, bias):
    torch.manual_seed(0)
    layers = [nn.Linear(9, out, bias=bias, dtype=torch.float64).requires_grad_(False) for out in outputs]
    group = LinearGroup(layers)
    slots, adapters, start = [], [], 0
    for i, rank in enumerate(ranks):
        columns = group.columns[min(i, len(outputs) - 1)]
        if rank:
            slots.append(Slot(columns, slice(start, start + rank), 0.5 + i))
            adapters += [random(rank, 9), random(columns.stop - columns.start, rank)]
            start += rank
    x = random(rows, 9)
    exact = qlora_linear_reference(x, group, slots, adapters)
    y = QLoRALinear.apply(x, None, group, slots, *adapters)
    dy = torch.randn_like(exact)
    wanted = [x, *adapters]
    for got, expected in zip([y, *torch.autograd.grad(y, wanted, dy)], [exact, *torch.autograd.grad(exact, wanted, dy)], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("ranks, grad", [([], True), ([3], True), ([2, 4], True), ([3], False)])
def test_gradients_of_a_linear_after_gate_and_up(rows, ranks, grad):
    torch.manual_seed(0)
    group = LinearGroup([nn.Linear(9, 5, dtype=torch.float64).requires_grad_(False)])
    slots, adapters, start = [], [], 0
    for rank in ranks:
        slots.append(Slot(group.columns[0], slice(start, start + rank), 0.5 + rank))
        adapters += [random(rank, 9), random(5, rank)]
        start += rank
    gate_up = random(rows, 18, grad=grad)
    exact = qlora_linear_reference(gated_gelu_reference(*gate_up.chunk(2, dim=-1)), group, slots, adapters)
    y = QLoRAGatedLinear.apply(gate_up, group, slots, *adapters)
    dy = torch.randn_like(exact)
    wanted = [gate_up, *adapters] if grad else adapters
    for got, expected in zip([y, *torch.autograd.grad(y, wanted, dy)], [exact, *torch.autograd.grad(exact, wanted, dy)], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def lora_layer(quantised=True, dtype=torch.float32, adapters=("default",), bias=False, inputs=64, outputs=32, **config):
    """A PEFT layer with trained-looking adapters."""
    from peft import inject_adapter_in_model

    torch.manual_seed(1)
    base = nn.Linear(inputs, outputs, bias=bias)
    if quantised:
        quant = bnb.nn.Linear4bit(inputs, outputs, bias=bias, compute_dtype=dtype, quant_type="nf4", quant_storage=dtype)
        quant.load_state_dict(base.state_dict())
        base = quant.to("cpu")
    model = nn.ModuleDict({"proj": base.to(dtype)})
    for name in adapters:
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=["proj"], **config), model, name)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    model["proj"].set_adapter(list(adapters))
    return model["proj"]


@pytest.mark.parametrize("options", [{}, {"quantised": False}, {"adapters": ("default", "second")}, {"bias": True}])
def test_a_joined_layer_is_pefts(options):
    layer = lora_layer(**options)
    assert joined_layers.unknown_kind(layer) is None
    x = torch.randn(2, 5, 64, requires_grad=True)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    dy = torch.randn(2, 5, 32)
    expected, got = layer(x), joined_layers.JoinedLayers([layer])(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(got, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs, outputs", [(64, [128, 64]), (64, [192]), (128, [32, 32]), (256, [64])])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("adapters", [("default",), ("default", "second")])
def test_low_rank_paths_inside_the_products_of_wide_layers(monkeypatch, inputs, outputs, rows, one_by_one, adapters):
    if one_by_one:
        monkeypatch.setattr(qlora_linear, "MAX_JOINT", 0)
    layers = [lora_layer(inputs=inputs, outputs=width, adapters=adapters, bias=True) for width in outputs]
    joined, x = joined_layers.JoinedLayers(layers), torch.randn(rows, inputs, requires_grad=True)
    wanted = [x, *(p for layer in layers for p in layer.parameters() if p.requires_grad)]
    dy = torch.randn(rows, sum(outputs))
    expected, got = torch.cat([layer(x) for layer in layers], dim=-1), joined(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(got, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adapters", [("default",), ("default", "second")])
def test_dropout_is_drawn_as_peft_draws_it(adapters):
    layer = lora_layer(adapters=adapters, lora_dropout=0.5)
    x = torch.randn(3, 64)
    results = []
    for function in (layer, joined_layers.JoinedLayers([layer])):
        torch.manual_seed(3)
        results.append(function(x))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_dropout_of_two_adapters_in_a_layer_fused_by_itself():
    layer, x = lora_layer(adapters=("default", "second"), lora_dropout=0.5), torch.randn(3, 64)
    torch.manual_seed(3)
    expected = layer(x)
    assert fusing._fuse_linears(nn.ModuleDict({"proj": layer})) == (1, {})
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_weights_that_are_read_in_another_way_stay_as_they_are():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3

    eight_bits = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    for layer in (eight_bits, Scaled(64, 32)):
        assert joined_layers.unknown_kind(layer.requires_grad_(False)) == f"a {type(layer).__name__} inside"


def test_disabled_adapters_count_at_the_call():
    layer = lora_layer()
    joined, x = joined_layers.JoinedLayers([layer]), torch.randn(3, 64)
    layer.enable_adapters(False)
    torch.testing.assert_close(joined(x), layer.get_base_layer()(x))


@pytest.mark.parametrize("options, reason", [({"use_dora": True}, "Dora"), ({"lora_bias": True, "bias": True}, "with a bias")])
def test_unknown_kinds_say_why(options, reason):
    assert reason in joined_layers.unknown_kind(lora_layer(quantised=False, **options))


def test_generic_models_keep_pefts_forward_for_what_is_not_known():
    layer = lora_layer()
    model = nn.ModuleDict({"proj": layer})
    assert fusing._fuse_linears(model) == (1, {})
    x = torch.randn(2, 64)
    expected = type(layer).forward(layer, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    seen = []
    layer.lora_A["default"].register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert seen


# --- attention ---


@pytest.mark.parametrize("length", [1, 5, 130])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_attention_is_sdpa(monkeypatch, length, window, padded, long):
    torch.manual_seed(0)
    q, k, v = random(2, length, 4, 8), random(2, length, 2, 8), random(2, length, 2, 8)
    if long:  # stretch by stretch, without a kernel, in fp32
        monkeypatch.setattr(attention, "MAX_KEYS", 0)
        monkeypatch.setattr(attention, "STRETCH", 48)
        q, k, v = (t.detach().float().requires_grad_() for t in (q, k, v))
    first = torch.tensor([[0] * length, list(range(min(2, length)))[-1:] * length], dtype=torch.int32) if padded else None
    if padded:
        first = torch.minimum(first, torch.arange(length, dtype=torch.int32))
    got = attention.attention(q, k, v, 0.3, window, first)
    mask = attention.visible(0, length, 0, length, window, first, CPU)[:, :, :, 0]
    heads = [t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    expected = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(got, expected)
    dy = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy), strict=True):
        torch.testing.assert_close(a, b)


# --- whole models ---


def train(checkpoint, out, how: str, change=None, lengths=(24,), **fields):
    """`how`: "plain", "fused", "replayed", or "kept" (replayed, keeping activations where there is room)."""
    torch.manual_seed(0)
    config = sft_config(out, bf16=False, fused=how != "plain", keep_activations=how == "kept", **fields)
    with nullcontext() if how == "plain" else fused_on_cpu(replayed=how != "fused"):
        trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(128, lengths))
    replays = replays_of(trainer.model)
    assert (replays is not None) == (how in ("replayed", "kept"))
    if change is not None:
        change(trainer)
    trainer.train()
    return trainer, replays


def agree(got, expected, rtol=1e-4):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=rtol)


def test_fifty_steps_fused_replayed_and_plain(checkpoint, tmp_path):
    runs = {how: train(checkpoint, tmp_path, how, max_steps=50) for how in ("plain", "fused", "replayed")}
    losses = {how: logged(trainer) for how, (trainer, _) in runs.items()}
    agree(losses["fused"], losses["plain"], 1e-3)
    agree(losses["replayed"], losses["plain"], 1e-3)
    agree(losses["replayed"][:8], losses["plain"][:8], 2e-6)
    replays = runs["replayed"][1]
    assert not replays.broken and replays.worst_error < 1e-5
    # Eight layers, six kinds, and the first layer: nothing wants the gradient of its input.
    assert [len(kinds) for kinds in replays.recordings.values()] == [7]


@pytest.mark.parametrize("how", ["plain", "fused", "replayed"])
def test_nothing_before_the_first_adapter_has_gradients(checkpoint, tmp_path, how):
    """`Trainer.train` asks for gradients of the embeddings a second time: those of all layers would be kept for the backward pass."""
    fields = {"max_steps": 3, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
    asked = {}

    def watch(trainer):
        text = trainer.model.get_base_model().model.language_model
        for name in ("embed_tokens", "per_layer_projection_norm"):
            getattr(text, name).register_forward_hook(lambda module, args, output, name=name: asked.update({name: output.requires_grad}))
        text.layers[0].register_forward_hook(lambda module, args, output: asked.update(layer=output.requires_grad))

    trainer, _ = train(checkpoint, tmp_path, how, watch, **fields)
    assert asked == {"embed_tokens": False, "per_layer_projection_norm": False, "layer": True}
    stock, _ = train(checkpoint, tmp_path, how, lambda trainer: _ask_for_gradients_of_embeddings(trainer.model), **fields)
    agree(logged(trainer), logged(stock), 1e-6)


def _ask_for_gradients_of_embeddings(model):
    base = model.get_base_model()
    del base.enable_input_require_grads  # back to that of the class
    base.enable_input_require_grads()


def test_replay_with_accumulation_padding_and_other_shapes(checkpoint, tmp_path):
    fields = {"max_steps": 8, "gradient_accumulation_steps": 2, "lengths": (24, 24, 17, 30, 17, 30)}
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, **fields) for how in ("plain", "replayed"))
    agree(logged(replayed), logged(plain))
    assert len(replays.recordings) >= 2


def test_replay_stops_recording_when_shapes_are_many(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_pool, "MAX_SHAPES", 1)
    fields = {"max_steps": 8, "lengths": (24, 24, 16, 16)}
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, **fields) for how in ("plain", "replayed"))
    agree(logged(replayed), logged(plain))
    assert len(replays.recordings) == 1


@pytest.mark.parametrize("how", ["replayed", "kept"])
def test_large_batches_are_not_recorded_unless_that_saves_computing_again(checkpoint, tmp_path, monkeypatch, how):
    monkeypatch.setattr(graph_pool, "MAX_TOKENS", 30)  # a batch has two rows
    fields = {"max_steps": 8, "lengths": (24, 24, 12, 12)}
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, **fields) for how in ("plain", how))
    agree(logged(replayed), logged(plain))
    assert sorted(shape[0][1] for shape in replays.recordings) == ([12, 24] if how == "kept" else [12])


def test_replay_of_bf16_adapters(checkpoint, tmp_path):
    fields = {"max_steps": 6, "adapter_dtype": "bfloat16"}
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, **fields) for how in ("plain", "replayed"))
    assert replays.recordings
    # The fused linear rounds each product of a bf16 adapter once, PEFT several times.
    agree(logged(replayed), logged(plain), 2e-2)


def test_without_checkpointing_each_layer_keeps_its_activations(checkpoint, tmp_path):
    fields = {"max_steps": 10, "gradient_checkpointing": False, "gradient_accumulation_steps": 2, "lengths": (24, 24, 16, 16)}
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, **fields) for how in ("plain", "replayed"))
    agree(logged(replayed), logged(plain))
    assert not replays.broken and replays.worst_error < 1e-5
    kept, *others = replays.recordings.values()
    # One shape keeps, layer by layer; others share recordings that compute again.
    assert len(kept) == 8 and all(recording.keep and recording.kept is not None for recording in kept.values())
    assert others and all(len(kinds) < 8 and not any(recording.keep for recording in kinds.values()) for kinds in others)


def keeps_some(replays) -> bool:
    return any(replays.keepers.values())


def kept_and_shared(replays, shape: int = 0):
    kinds = list(replays.recordings.values())[shape].values()
    return sum(recording.keep for recording in kinds), sum(not recording.keep for recording in kinds)


def test_checkpointed_layers_keep_activations_while_there_is_room(checkpoint, tmp_path, monkeypatch):
    def room_for_three(self, shape_key, grad, more=0, times=1.0, keeping=False):
        return not keeping or sum(self.keepers.values()) + (more > 0) <= 3

    monkeypatch.setattr(OnCpu, "leaves_room", room_for_three)
    fields = {"max_steps": 10, "gradient_accumulation_steps": 2, "lengths": (24, 24, 16, 16)}
    (plain, _), (kept, replays) = (train(checkpoint, tmp_path, how, **fields) for how in ("plain", "kept"))
    agree(logged(kept), logged(plain))
    assert not replays.broken and replays.worst_error < 1e-5
    assert list(replays.keepers.values()) == [True] * 3 + [False] * 5
    assert kept_and_shared(replays)[0] == 3 and kept_and_shared(replays)[1] > 0
    assert kept_and_shared(replays, 1)[0] == 0


def test_kept_activations_give_way(checkpoint, tmp_path, monkeypatch):
    """A layer that was thought to have room and has none computes again; if even that has none, none keeps anything."""

    def none_for_recordings(self, shape_key, grad, more=0, times=1.0, keeping=False):
        return more > 0 or len(self.keepers) < 2 if keeping else not keeps_some(self)

    monkeypatch.setattr(OnCpu, "leaves_room", none_for_recordings)
    (plain, _), (kept, replays) = (train(checkpoint, tmp_path, how, max_steps=8) for how in ("plain", "kept"))
    agree(logged(kept), logged(plain))
    assert not replays.broken and not keeps_some(replays) and replays.kept_shape == ()
    assert kept_and_shared(replays) == (0, 7)


@pytest.mark.parametrize("how", ["kept", "replayed"])
def test_a_step_that_runs_out_of_memory_runs_again_with_less_in_the_way(checkpoint, tmp_path, how):
    """First without kept activations, then without recordings; gradients and metrics count once."""
    # With the retry, the tenth and the nineteenth micro-batch: second ones of their steps, on top of gradients.
    calls, states, failing = [], [], (10, 19) if how == "kept" else (10,)

    def change(trainer):
        backward, replays = trainer.accelerator.backward, replays_of(trainer.model)

        def run_out(loss, **kwargs):
            backward(loss, **kwargs)
            calls.append(1)
            if len(calls) in failing:
                states.append((keeps_some(replays), replays.broken))
                raise torch.OutOfMemoryError("CUDA out of memory.")

        trainer.accelerator.backward = run_out

    fields = {"max_steps": 12, "gradient_accumulation_steps": 2, "logging_steps": 2}
    plain, _ = train(checkpoint, tmp_path, "plain", **fields)
    tried, replays = train(checkpoint, tmp_path, how, change=change, **fields)
    agree(logged(tried), logged(plain))
    assert states == ([(True, False), (False, False)] if how == "kept" else [(False, False)])
    assert replays.broken and not replays.hold_memory
    for name in ("num_tokens", "mean_token_accuracy", "entropy"):
        got, expected = ([entry[name] for entry in t.state.log_history if name in entry] for t in (tried, plain))
        assert got == pytest.approx(expected, rel=1e-4)


def test_a_step_that_runs_out_of_memory_while_recording_runs_again(checkpoint, tmp_path):
    """Nothing was recorded when it began, and nothing is when it fails: recordings have made way."""
    calls = []

    def change(trainer):
        compute_loss, replays = trainer.compute_loss, replays_of(trainer.model)

        def run_out(*args, **kwargs):
            calls.append(1)
            loss = compute_loss(*args, **kwargs)
            if len(calls) == 2:
                assert replays.recordings
                replays.make_way("no memory.")
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        trainer.compute_loss = run_out

    plain, _ = train(checkpoint, tmp_path, "plain", max_steps=4)
    tried, replays = train(checkpoint, tmp_path, "replayed", change=change, max_steps=4)
    agree(logged(tried), logged(plain))
    assert len(calls) == 5 and replays.broken


def test_evaluation_that_runs_out_of_memory_runs_again(checkpoint, tmp_path):
    plain, _ = train(checkpoint, tmp_path, "plain", max_steps=4)
    kept, replays = train(checkpoint, tmp_path, "kept", max_steps=4)
    compute_loss, rows, calls = kept.compute_loss, token_rows(8, lengths=(24, 40)), []

    def run_out_first(*args, **kwargs):
        calls.append(1)
        if keeps_some(replays):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute_loss(*args, **kwargs)

    kept.compute_loss = run_out_first
    assert keeps_some(replays)
    expected = plain.evaluate(rows.map(lambda row: {**row, "labels": row["input_ids"]}))
    got = kept.evaluate(rows.map(lambda row: {**row, "labels": row["input_ids"]}))
    assert len(calls) > 1 and not keeps_some(replays) and not replays.broken
    assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)


def test_a_larger_batch_gets_the_memory_where_steps_are_not_repeated(checkpoint, tmp_path, monkeypatch):
    # As on several ranks.
    monkeypatch.setattr(OnCpu, "steps_are_repeated", property(lambda self: False, lambda self, value: None), raising=False)
    room = 1.5
    monkeypatch.setattr(OnCpu, "leaves_room", lambda self, *args, times=1.0, **kwargs: times < room)
    fields = {"max_steps": 10, "lengths": (16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 30, 30)}
    plain, _ = train(checkpoint, tmp_path, "plain", **fields)
    kept, replays = train(checkpoint, tmp_path, "kept", **fields)
    agree(logged(kept), logged(plain))
    assert replays.kept_shape == () and not replays.keepers and not replays.broken
    room = 2.0
    kept, replays = train(checkpoint, tmp_path, "kept", **fields)
    agree(logged(kept), logged(plain))
    assert keeps_some(replays)


def test_a_step_that_runs_out_of_memory_by_itself_is_an_error(checkpoint, tmp_path):
    def change(trainer):
        def run_out(*args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        trainer.accelerator.backward = run_out

    with pytest.raises(torch.OutOfMemoryError):
        train(checkpoint, tmp_path, "replayed", change=change)


def test_hooks_around_a_step_do_not_reach_into_recordings(checkpoint, tmp_path):
    """Activation offloading hooks into every saved tensor; in a recording it would copy to host memory in every replay."""
    packed, by_step = [], []

    def change(trainer):
        step = trainer.training_step

        def hooked_step(*args, **kwargs):
            packed.clear()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
                loss = step(*args, **kwargs)
            by_step.append(len(packed))
            return loss

        trainer.training_step = hooked_step

    plain, _ = train(checkpoint, tmp_path, "plain", max_steps=6)
    replayed, replays = train(checkpoint, tmp_path, "replayed", change=change, max_steps=6)
    agree(logged(replayed), logged(plain))
    assert replays.recordings and not replays.broken
    # Recording and checking add nothing to what replays save.
    assert by_step[1] == by_step[2] == by_step[-1]


def gradients_of_two_passes(checkpoint, tmp_path, between=None, **fields):
    """Two forward passes, then one backward pass through both; gradients with and without replays."""
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, max_steps=4, **fields) for how in ("plain", "replayed"))
    rows = torch.randint(8, 300, (2, 2, 24))
    found = []
    with torch.no_grad():
        for mine, other in zip(replayed.model.parameters(), plain.model.parameters(), strict=True):
            if mine.requires_grad:
                mine.copy_(other)
    for trainer in (plain, replayed):
        losses = [trainer.model.train()(input_ids=ids, labels=ids).loss for ids in rows]
        if between is not None and trainer is replayed:
            between(replays)
        (losses[0] + 2 * losses[1]).backward()
        found.append([p.grad for p in trainer.model.parameters() if p.requires_grad])
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    return replays


@pytest.mark.parametrize("checkpointing", [True, False])
def test_two_forward_passes_before_a_backward_one(checkpoint, tmp_path, checkpointing):
    replays = gradients_of_two_passes(checkpoint, tmp_path, gradient_checkpointing=checkpointing)
    assert replays.recordings and not replays.broken


@pytest.mark.parametrize("checkpointing", [True, False])
def test_replays_end_between_forward_and_backward(checkpoint, tmp_path, checkpointing):
    replays = gradients_of_two_passes(
        checkpoint, tmp_path, lambda replays: replays.give_up("a test says so"), gradient_checkpointing=checkpointing
    )
    assert replays.broken and not replays.recordings


@pytest.mark.parametrize("checkpointing", [True, False])
def test_out_of_memory_while_recording(checkpoint, tmp_path, monkeypatch, checkpointing):
    """What keeps activations gives way to what computes them again, and that to no replays; training goes on."""
    made = []

    def full(self, function, kept=False):
        made.append(self.kept_shape)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(OnCpu, "record", full)
    fields = {"max_steps": 5, "gradient_checkpointing": checkpointing}
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, **fields) for how in ("plain", "replayed"))
    agree(logged(replayed), logged(plain))
    assert replays.broken and not replays.recordings
    assert len(made) == (1 if checkpointing else 2)


def test_no_room_beside_a_step(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(OnCpu, "leaves_room", lambda self, *args, **kwargs: False)
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, max_steps=5) for how in ("plain", "replayed"))
    agree(logged(replayed), logged(plain))
    assert replays.broken and not replays.recordings


def test_a_replay_that_differs_is_noticed(checkpoint, tmp_path, monkeypatch):
    """Recordings that go on using the weights of the layer they were made of: layers that share one must not be trained on it."""

    def without_packed(self):
        return [recording.as_integers(owner[key].detach().as_subclass(torch.Tensor)) for owner, key in first.kind.packed]

    def change(trainer):
        nonlocal first
        first = next(m.replay for m in trainer.model.modules() if hasattr(m, "replay") and m.layer_idx == 1)
        other = next(m.replay for m in trainer.model.modules() if hasattr(m, "replay") and m.layer_idx == 3)
        monkeypatch.setattr(other, "packed", without_packed.__get__(other))

    first = None
    plain, _ = train(checkpoint, tmp_path, "plain", max_steps=4)
    replayed, replays = train(checkpoint, tmp_path, "replayed", change=change, max_steps=4)
    assert replays.broken and replays.worst_error > replay.MAX_ERROR
    agree(logged(replayed), logged(plain))


def test_mlps_in_tiles(checkpoint, tmp_path):
    (plain, _), (replayed, replays) = (train(checkpoint, tmp_path, how, max_steps=4, mlp_tile_size=10) for how in ("plain", "replayed"))
    assert replays.recordings and not replays.broken
    agree(logged(replayed), logged(plain))


def test_hooks_dropout_and_merged_layers_run_eagerly(checkpoint, tmp_path):
    def hook(trainer):
        layer = next(m for m in trainer.model.modules() if hasattr(m, "replay"))
        layer.self_attn.q_proj.register_forward_hook(lambda *_: seen.append(1))

    seen: list[int] = []
    plain, _ = train(checkpoint, tmp_path, "plain", max_steps=4)
    hooked, _ = train(checkpoint, tmp_path, "replayed", change=hook, max_steps=4)
    assert seen
    agree(logged(hooked), logged(plain))
    _, replays = train(checkpoint, tmp_path, "replayed", max_steps=4, lora_dropout=0.2)
    assert not replays.recordings


def test_dora_layers_stay_as_they_are(checkpoint, tmp_path):
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM")
    trainer = QLoRASFTTrainer(checkpoint, sft_config(tmp_path, bf16=False), train_dataset=token_rows(8), peft_config=config)
    layers, kept = fusing._decoder_layers(trainer.model)
    assert not layers and any("Dora" in reason for reason in kept)


@pytest.mark.parametrize(("attention", "rtol"), [("eager", 1e-6), ("sdpa", 1e-2)])  # the own attention rounds elsewhere
def test_a_stream_that_is_wider_than_autocast_takes_its_own_operations(checkpoint, tmp_path, caplog, attention, rtol):
    warn_once.cache_clear()
    found = []
    for fused in (False, True):
        args = sft_config(tmp_path, bf16=True, max_steps=3, model_init_kwargs={"dtype": "float32", "attn_implementation": attention})
        with fused_on_cpu() if fused else nullcontext():
            trainer = QLoRASFTTrainer(checkpoint, args, train_dataset=token_rows(8))
        trainer.train()
        found.append(logged(trainer))
    agree(*found, rtol=rtol)
    assert any("get float32 under bfloat16 autocast" in message for message in caplog.messages)


def test_tokens_hidden_between_others_stay_hidden(checkpoint, tmp_path):
    ids = torch.randint(8, 300, (2, 24))
    other = ids.clone()
    other[:, 6:9] = (other[:, 6:9] + 5) % 200 + 8
    mask = torch.ones_like(ids)
    mask[:, 6:9] = 0
    with fused_on_cpu(replayed=False):
        model = QLoRASFTTrainer(checkpoint, sft_config(tmp_path, bf16=False), train_dataset=token_rows(8)).model.eval()
    with torch.no_grad():
        one, two = (model(input_ids=some, attention_mask=mask).logits[:, 9:] for some in (ids, other))
    torch.testing.assert_close(one, two)


def test_evaluation_generation_and_disabled_adapters(checkpoint, tmp_path):
    plain, _ = train(checkpoint, tmp_path, "plain", max_steps=4)
    replayed, replays = train(checkpoint, tmp_path, "replayed", max_steps=4)
    ids = torch.randint(8, 300, (2, 24))
    for model in (plain.model, replayed.model):
        model.eval()
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(replayed.model(input_ids=ids).logits, plain.model(input_ids=ids).logits, rtol=1e-3, atol=1e-3)
            with replayed.model.disable_adapter(), plain.model.disable_adapter():
                torch.testing.assert_close(replayed.model(input_ids=ids).logits, plain.model(input_ids=ids).logits, rtol=1e-3, atol=1e-3)
    made = [m.generate(input_ids=ids[:1, :6], max_new_tokens=6, do_sample=False) for m in (plain.model, replayed.model)]
    assert torch.equal(*made)
    assert sum(len(kinds) for kinds in replays.recordings.values()) > 12  # with and without gradients, with and without adapters


def test_what_an_earlier_recording_may_have_written_over_is_computed_again(checkpoint, tmp_path):
    _, replays = train(checkpoint, tmp_path, "kept", max_steps=4)
    kept = [r for kinds in replays.recordings.values() for r in kinds.values() if r.keep]
    first, second = kept[:2]
    assert first.number < second.number and all(r.forwards < 6 for r in kept)  # in their order, none runs twice

    def runs_again(forwards, backward):
        for each in forwards:
            each.forward()
        before = backward.forwards
        backward.backward([torch.ones_like(t) for t in backward.d_outputs], before)
        return backward.forwards > before

    assert not runs_again([first, second], second) and not runs_again([], first)
    assert not runs_again([first, second], first)
    assert runs_again([second, first], second)
    assert not runs_again([], second)


LANGUAGE = r".*language_model\.layers\.\d+\.\w+\."


def untrained(checkpoint, out, how: str, **fields):
    """A model with adapters that do something, always the same."""
    with nullcontext() if how == "plain" else fused_on_cpu(replayed=how != "fused"):
        trainer = QLoRASFTTrainer(checkpoint, sft_config(out, bf16=False, fused=how != "plain", **fields), train_dataset=token_rows(8))
    torch.manual_seed(4)
    for name, parameter in trainer.model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return trainer.model.eval()


@pytest.mark.parametrize("change", ["merge_and_unload", "unload", "merge_adapter", "unmerge_adapter", "add_adapter"])
@pytest.mark.parametrize("how", ["fused", "replayed"])
def test_adapters_that_change_after_fusing_count(checkpoint, tmp_path, how, change):
    ids, found = torch.randint(8, 300, (2, 24)), []
    for this in ("plain", how):
        model = untrained(checkpoint, tmp_path, this, lora_target_modules=["q_proj", "down_proj"])
        with torch.no_grad():
            before = [model(input_ids=ids).logits for _ in range(3)][-1]
            if change == "add_adapter":
                torch.manual_seed(4)
                model.add_adapter("other", LoraConfig(target_modules=LANGUAGE + "(k_proj|down_proj)", init_lora_weights=False))
                model.set_adapter("other")
            elif change == "unmerge_adapter":
                model.merge_adapter()
                model(input_ids=ids)
                model.unmerge_adapter()
            else:
                model = getattr(model, change)() or model
            after = [model(input_ids=ids).logits for _ in range(3)]
        assert (after[0] - before).norm() > 1e-2 * before.norm()  # unmerged weights have been rounded twice
        found.append(torch.stack(after))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ({"target_modules": LANGUAGE + "k_proj", "use_dora": True}, "an adapter of kind DoraLinearVariant"),
        ({"target_modules": LANGUAGE + "q_proj", "use_dora": True}, "an adapter of kind DoraLinearVariant"),
        ({"target_modules": LANGUAGE + "q_proj", "lora_bias": True}, "an adapter with a bias"),
        ({"target_modules": LANGUAGE + "q_proj", "modules_to_save": ["input_layernorm"]}, "norms that train"),
    ],
)
@pytest.mark.parametrize("other_model", [False, True])
def test_layers_that_cannot_be_fused_any_more_are_said(checkpoint, llama, tmp_path, caplog, later, reason, other_model):
    warn_once.cache_clear()
    ids, found = torch.randint(8, 300, (2, 24)), []
    if other_model:  # whose LoRA layers are fused each alone
        later = {**later, "target_modules": later["target_modules"].replace(LANGUAGE, r".*layers\.\d+\.\w+\.")}
    for how in ("plain", "fused", "replayed"):
        model = untrained(llama if other_model else checkpoint, tmp_path, how, lora_target_modules=["q_proj"])
        model.add_adapter("other", LoraConfig(**later, init_lora_weights=False))
        for name, parameter in model.named_parameters():
            if ".other." in name:
                nn.init.normal_(parameter, std=0.3)
        model.set_adapter("other")
        logits = [model(input_ids=ids).logits for _ in range(3)][-1]
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad for name, p in model.named_parameters() if ".other." in name and p.grad is not None)])
    for one in found[1:]:
        assert len(one) == len(found[0]) > 1
        for got, expected in zip(one, found[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-5)
    if not (other_model and "norms" in reason or other_model and "k_proj" in later["target_modules"]):  # those stay as they are
        assert sum("have changed" in m and reason in m for m in caplog.messages) == 1


def test_merging_a_copy_leaves_the_original_alone(checkpoint, tmp_path):
    ids, merged = torch.randint(8, 300, (2, 24)), []

    def hidden(model):  # below what accelerate binds to the model it was given
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        return base.model(input_ids=ids).last_hidden_state

    for how in ("plain", "fused", "replayed"):
        model = untrained(checkpoint, tmp_path, how, mlp_tile_size=8)
        with torch.no_grad():
            before = [hidden(model) for _ in range(3)][-1]
            copied = copy.deepcopy(model).merge_and_unload()
            torch.testing.assert_close(hidden(model), before, rtol=1e-6, atol=1e-6)
            merged.append(hidden(copied))
    for other in merged[1:]:
        torch.testing.assert_close(other, merged[0], rtol=1e-3, atol=1e-3)


def test_a_second_trainer_of_a_model_decides_anew(checkpoint, tmp_path, caplog):
    trainer, _ = train(checkpoint, tmp_path, "replayed", max_steps=3)
    base = trainer.model.merge_and_unload()
    with fused_on_cpu(), caplog.at_level("INFO"):
        plain = QLoRASFTTrainer(base, sft_config(tmp_path, bf16=False, fused=False), train_dataset=token_rows(8))
        plain.train()
        assert "fused operations: turned off" in caplog.messages
        assert not [m for m in base.modules() if "joined" in vars(m) or hasattr(m, "replay")]
        assert base.config.get_text_config()._attn_implementation == "sdpa"
        base = plain.model.unload()
        again = QLoRASFTTrainer(base, sft_config(tmp_path, bf16=False), train_dataset=token_rows(8))
        again.train()
    assert replays_of(again.model).recordings and "8 decoder layers" in [m for m in caplog.messages if m.startswith("fused operations")][-1]
    agree(logged(again), logged(plain))


def test_merging_is_what_peft_does_to_a_model_of_its_own(checkpoint, tmp_path):
    model = untrained(checkpoint, tmp_path, "plain")
    model.save_pretrained(str(tmp_path / "adapter"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, bnb_4bit_use_double_quant=True
    )
    stock = AutoModelForImageTextToText.from_pretrained(checkpoint, quantization_config=config, dtype=torch.float32)
    stock = PeftModel.from_pretrained(stock, str(tmp_path / "adapter"))
    packed = []
    for merged in (model.merge_and_unload(), stock.merge_and_unload()):
        layers = {name: module.weight for name, module in merged.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
        packed.append({name: bnb.functional.dequantize_4bit(weight.data, weight.quant_state) for name, weight in layers.items()})
    assert packed[0].keys() <= packed[1].keys() and len(packed[0]) > 60
    for name, weight in packed[0].items():
        torch.testing.assert_close(weight, packed[1][name], rtol=0, atol=0)


def test_other_places_are_found_after_a_copy(checkpoint, tmp_path):
    trainer, _ = train(checkpoint, tmp_path, "replayed", max_steps=3)
    copied = copy.deepcopy(trainer.model).eval()
    for parameter in copied.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(2)
    layer = next(m for m in copied.modules() if hasattr(m, "replay"))
    assert layer.replay.kind.other[0][0] is layer._buffers and layer.forward.__self__ is layer
    ids = torch.randint(8, 300, (1, 24))
    with torch.no_grad():
        # Below what accelerate binds to the model it was given.
        original, other = (m.eval().get_base_model().model(input_ids=ids).last_hidden_state for m in (trainer.model, copied))
    assert not torch.allclose(original, other)


def test_shortened_walks_answer_as_before(checkpoint, tmp_path):
    trainer = QLoRASFTTrainer(checkpoint, sft_config(tmp_path, bf16=False), train_dataset=token_rows(8))
    model = trainer.model
    count = model.get_base_model().num_parameters(exclude_embeddings=True)
    walks.shorten_walks(model)
    assert {model.get_base_model().num_parameters(exclude_embeddings=True) for _ in range(2)} == {count}
    for _ in range(3):
        assert model.train() is model and all(m.training for m in model.modules())
    model.get_base_model().model.language_model.layers[1].eval()
    assert not all(m.training for m in model.modules())
    assert all(m.training for m in model.train().modules())
    assert not any(m.training for m in model.eval().modules())
    assert all(m.training for m in model.train().modules())
    expected = [id(p) for p in type(model).parameters(model)]
    for _ in range(2):
        assert [id(p) for p in model.parameters()] == expected
    known = walks._watched()
    kept = next(w for w in known if w.model is model and w._known)
    before = dict(kept._known)
    trainer.train()
    assert all(p.grad is None for p in type(model).parameters(model))
    # Still known: a forward pass registers layers in a list of its own, and nothing in the model.
    assert before.keys() <= kept._known.keys() and all(kept._known[key] is value for key, value in before.items())


def test_shortened_walks_notice_what_comes_later_and_follow_a_copy(checkpoint, tmp_path):
    trainer = QLoRASFTTrainer(checkpoint, sft_config(tmp_path, bf16=False), train_dataset=token_rows(8))
    model = trainer.model
    walks.shorten_walks(model)
    known, count = list(model.parameters()), model.get_base_model().num_parameters(only_trainable=True)
    model.train()
    model.add_adapter("second", LoraConfig(r=2, target_modules=r".*language_model.*q_proj"))
    later = [p for p in model.parameters() if not any(p is q for q in known)]
    assert later and all(p.shape[0] == 2 or p.shape[1] == 2 for p in later)
    model.set_adapter("second")
    for parameter in later:
        parameter.grad = torch.ones_like(parameter)
    model.zero_grad()
    assert all(p.grad is None for p in later)
    model.get_base_model().extra = nn.Linear(3, 3).eval()
    assert model.train().get_base_model().extra.training
    assert model.get_base_model().num_parameters(only_trainable=True) != count
    copied = copy.deepcopy(model)
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
    assert copied.train() is copied


def test_packed_bytes_are_copied_as_integers():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)[:, None]
    target = torch.zeros_like(every)
    torch._foreach_copy_([recording.as_integers(target)], [recording.as_integers(every)])
    assert torch.equal(target.view(torch.int16), every.view(torch.int16))
    assert recording.as_integers(every[1:]).dtype == torch.uint8


def test_nothing_changes_on_the_cpu(checkpoint, tmp_path):
    trainer = QLoRASFTTrainer(checkpoint, sft_config(tmp_path, fused=True), train_dataset=token_rows(8))
    assert fusing.apply_fused_layers(trainer.model, CPU) == ("fused operations: none (no GPU)", False)
    assert not any(hasattr(m, "replay") or hasattr(m, "joined") for m in trainer.model.modules())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "fused operations: 8 decoder layers, attention over stretches of queries, CUDA graphs of layers, for shapes that come again"),
        ({"keep_activations": True}, "CUDA graphs of layers, for shapes that come again, which keep activations where there is memory"),
        ({"attn_implementation": "eager"}, "fused operations: 8 decoder layers, no CUDA graphs of layers (attention eager)"),
        ({"lora_dropout": 0.1}, "CUDA graphs of layers, for shapes that come again, not in training (dropout before adapters)"),
        ({"fused": False}, "fused operations: turned off"),
        ({"peft_config": AdaLoraConfig(total_step=9, target_modules=["q_proj"])}, "none; 8 not: an adapter of type SVDLinear4bit"),
        (
            {"peft_config": LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm"])},
            "8 not: norms that train (decoder layers)",
        ),
        ({"peft_config": LoraConfig(use_dora=True, target_modules="all-linear")}, "none; 69 not: an adapter of kind DoraLinearVariant"),
    ],
)
def test_what_is_active_is_said(checkpoint, tmp_path, caplog, fields, said):
    config = sft_config(tmp_path, **{name: value for name, value in fields.items() if name != "peft_config"})
    with fused_on_cpu(), caplog.at_level("INFO"):
        QLoRASFTTrainer(checkpoint, config, train_dataset=token_rows(8), peft_config=fields.get("peft_config"))
    line = next(message for message in caplog.messages if message.startswith("fused operations"))
    assert line.endswith(said)


@pytest.mark.parametrize("fields", [None, {"attn_implementation": "eager"}, {"lora_dropout": 0.1}])
def test_kept_activations_without_graphs_are_said_to_be_none(checkpoint, tmp_path, caplog, fields):
    with nullcontext() if fields is None else fused_on_cpu():
        QLoRASFTTrainer(checkpoint, sft_config(tmp_path, keep_activations=True, **(fields or {})), train_dataset=token_rows(8))
    assert any("`keep_activations=True` has no effect" in message for message in caplog.messages)


def test_activations_that_go_to_host_memory_are_not_kept_by_graphs(checkpoint, tmp_path):
    config = sft_config(tmp_path, gradient_checkpointing=False)
    config.activation_offloading = True  # refused on the CPU
    trainer = QLoRASFTTrainer(checkpoint, sft_config(tmp_path), train_dataset=token_rows(8))
    trainer.args = config
    with fused_on_cpu():
        assert trainer._fuse().endswith("no CUDA graphs: activations go to host memory")
    assert replays_of(trainer.model) is None
