"""One rank and several real FSDP2 ranks train the same, and packed bytes arrive as they were sent.

Starting ranks costs more than training tiny models, so each number of ranks is started once and runs every scenario.
"""

import pytest

from tests.distributed.launch import RankError, run_ranks
from trl_fsdp_qlora.checks import check_backend
from trl_fsdp_qlora.demo.models import tiny_gemma4

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
WRAP = {**FSDP, "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
STEPS = 20
# In fp32 the only difference between one rank and several is the order of a few sums: relative 1e-6 a step, and AdamW
# lets it grow slowly. In bf16 the ranks round other partial sums (their batches have other shapes): 2**-8 relative per
# rounding, averaged over many.
BOUNDS = {"fp32": (2e-5, 2e-3), "bf16": (2e-3, 3e-2)}

FP32 = {"bf16": False}
TOWERS = {"language_model_only": False, "bf16": False, "steps": 3, "rows_per_step": 4, "gradient_accumulation_steps": 2}
SAME_EVERYWHERE = {
    "4bit-fp32": FP32,
    "4bit-bf16": {},
    "16bit-fp32": {"load_in_4bit": False, **FP32},
    "16bit-bf16": {"load_in_4bit": False},
    "accumulated": {"steps": 6, "gradient_accumulation_steps": 2, **FP32},
    "towers": TOWERS,
    "bf16-adapters": {"steps": 3, "adapter_dtype": "bfloat16"},
}
SEVERAL_RANKS_ONLY = {
    "replicas": {"steps": 6, "env": {}, **FP32},
    "streamed": {"steps": 6, "keep_small_shards": True, **FP32},
    "streamed-offloaded": {"steps": 6, "keep_small_shards": True, "env": {**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, **FP32},
    "layer-units": {"steps": 3, "env": {**WRAP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "Gemma4TextDecoderLayer"}, **FP32},
    "one-unit": {"steps": 3, "env": {**WRAP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "Gemma4TextModel"}, **FP32},
    "not-resharded": {"steps": 3, "env": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, **FP32},
}
REFUSED = {
    "uint8": {"bnb_4bit_quant_storage": "uint8"},
    "device-map": {"model_init_kwargs": {"device_map": "auto"}},
    "optimizer": {"optim": "adamw_8bit"},
    "unit": {"env": {**WRAP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}},
}


def run_scenarios(checkpoint, output_dir, names):
    """In each rank's process: train every scenario; what this rank saw, by name."""
    import torch

    torch.set_num_threads(1)
    scenarios = {**SAME_EVERYWHERE, **SEVERAL_RANKS_ONLY}
    return {name: train(checkpoint, f"{output_dir}/{name}", **scenarios[name]) for name in names}


def new_trainer(checkpoint, output_dir, steps, rows_per_step, env, **fields):
    import os

    from accelerate.state import AcceleratorState

    from tests.tiny import sft_config, token_rows
    from trl_fsdp_qlora import QLoRASFTTrainer

    for name in list(os.environ):
        if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP":
            del os.environ[name]
    os.environ.update(env)
    AcceleratorState._reset_state()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    share = world_size * fields.get("gradient_accumulation_steps", 1)
    config = sft_config(output_dir, max_steps=steps, per_device_train_batch_size=rows_per_step // share, **fields)
    # The same number of rows for every scenario, because the order depends on it.
    rows = token_rows(4 * STEPS, lengths=(24, 9, 17, 30))
    return QLoRASFTTrainer(checkpoint, config, train_dataset=rows, eval_dataset=rows.select(range(8)))


def train(checkpoint, output_dir, steps=STEPS, rows_per_step=4, keep_small_shards=False, env=FSDP, **fields):
    import torch
    from torch.distributed.tensor import DTensor

    from tests.tiny import logged
    from trl_fsdp_qlora import sharding, streaming

    usual, streaming.MIN_BYTES = streaming.MIN_BYTES, 64 if keep_small_shards else streaming.MIN_BYTES
    try:
        trainer = new_trainer(checkpoint, output_dir, steps, rows_per_step, env, **fields)
    finally:
        streaming.MIN_BYTES = usual
    held_out = trainer.evaluate()["eval_loss"]
    trainer.train()
    ids = torch.randint(8, 300, (1, 8)).to(trainer.args.device)
    with torch.no_grad():
        scored = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    sharding.reshard(trainer.model)
    base = trainer.model.get_base_model()
    packed = [m.weight for m in base.modules() if getattr(m, "quant_state", None) is not None]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in packed]
    return {
        "held_out": held_out,
        "steps": logged(trainer),
        "sharded": sum(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "trainable_sharded": all(isinstance(p, DTensor) for p in trainer.model.parameters() if p.requires_grad),
        "packed_bytes": sum(p.numel() * p.element_size() for p in local),
        "units": sorted({n.rpartition(".")[2] for n, m in base.named_modules() if type(m).__name__.startswith("FSDP")}),
        "tower_sharded": any(isinstance(p, DTensor) for n, p in base.named_parameters() if "tower" in n),
        "loaded_in_shards": sum(bool(streaming.loaded_in_shards(m)) for m in base.modules()),
        "log_prob_dtype": str(scored.log_probs.dtype),
    }


def refusals(checkpoint, output_dir):
    messages = {}
    for name, fields in REFUSED.items():
        try:
            new_trainer(checkpoint, output_dir, steps=1, rows_per_step=4, **{"env": FSDP, **fields})
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    messages["later-adapter"] = later_adapter(checkpoint, output_dir, env=FSDP)
    messages["later-adapter-replicas"] = later_adapter(checkpoint, output_dir, env={})
    return messages


def later_adapter(checkpoint, output_dir, env):
    from peft import LoraConfig

    trainer = new_trainer(checkpoint, output_dir, steps=1, rows_per_step=4, env=env)
    trainer.model.add_adapter("later", LoraConfig(target_modules=r".*language_model.*q_proj"))
    trainer.model.set_adapter("later")
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    return tiny_gemma4(str(model_cache / "gemma4"))


@pytest.fixture(scope="module")
def one(checkpoint, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("one"))
    return run_ranks(1, run_scenarios, checkpoint, out, list(SAME_EVERYWHERE), timeout=400)[0]


@pytest.fixture(scope="module")
def two(checkpoint, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("two"))
    return run_ranks(2, run_scenarios, checkpoint, out, [*SAME_EVERYWHERE, *SEVERAL_RANKS_ONLY], timeout=600)


def assert_same(one, many, precision):
    """Step by step, over the steps that both ran."""
    loss_bound, norm_bound = BOUNDS[precision]
    steps = list(zip(one["steps"], many["steps"], strict=False))
    assert len(steps) >= 3
    for (loss, norm), (other_loss, other_norm) in steps:
        assert other_loss == pytest.approx(loss, rel=loss_bound)
        assert other_norm == pytest.approx(norm, rel=norm_bound)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("scenario", ["4bit-fp32", "4bit-bf16", "16bit-fp32", "16bit-bf16"])
def test_two_ranks_train_as_one(one, two, scenario):
    precision = scenario.partition("-")[2]
    assert one[scenario]["sharded"] == 0
    for rank in two:
        seen = rank[scenario]
        assert_same(one[scenario], seen, precision)
        assert len(seen["steps"]) == STEPS
        assert seen["sharded"] > 0 and seen["trainable_sharded"]
        assert "embed_tokens_per_layer" in seen["units"] and not seen["tower_sharded"]
        assert seen["log_prob_dtype"] == "torch.float32"
        if precision == "fp32":
            assert seen["held_out"] == pytest.approx(one[scenario]["held_out"], rel=1e-6)


@pytest.mark.parametrize("scenario", SEVERAL_RANKS_ONLY)
def test_every_layout_trains_as_one_rank(one, two, scenario):
    for rank in two:
        assert_same(one["4bit-fp32"], rank[scenario], "fp32")
        assert rank[scenario]["trainable_sharded"]


def test_what_each_layout_holds(one, two):
    whole = one["4bit-fp32"]["packed_bytes"]
    for rank in two:
        assert rank["replicas"]["packed_bytes"] == whole
        assert rank["streamed"]["loaded_in_shards"] > 50
        for scenario in ("4bit-fp32", "streamed", "streamed-offloaded"):
            assert rank[scenario]["packed_bytes"] <= 1.05 * whole / 2
        # Embeddings are looked up before the language model is called, so they are units, once, inside it too.
        assert rank["one-unit"]["units"] == ["embed_tokens", "embed_tokens_per_layer", "language_model", "lm_head"]


def test_four_ranks_hold_a_quarter_each(one, checkpoint, tmp_path):
    for rank in run_ranks(4, run_scenarios, checkpoint, str(tmp_path), ["streamed"], timeout=300):
        assert rank["streamed"]["packed_bytes"] <= 1.05 * one["4bit-fp32"]["packed_bytes"] / 4
        assert_same(one["4bit-fp32"], rank["streamed"], "fp32")


def test_accumulated_rows_of_unequal_length_weigh_the_same(one, two):
    """Gemma 4's class says it takes no loss arguments; the loss must be a mean over the tokens of the step all the same."""
    assert_same(one["4bit-fp32"], one["accumulated"], "fp32")
    assert_same(one["4bit-fp32"], two[0]["accumulated"], "fp32")


def test_towers_that_train_and_never_run(one, two):
    """Adapters on towers, text-only rows, accumulated gradients: https://github.com/pytorch/pytorch/issues/194058"""
    assert two[0]["towers"]["tower_sharded"]
    assert_same(one["towers"], two[0]["towers"], "fp32")


def train_on_some_images(checkpoint, output_dir, env):
    """Adapters on all towers; every second row has an image, so on two ranks the batches of one."""
    import os

    import torch
    from torch.utils.data import SequentialSampler

    from tests.test_image_rows import image_processor, image_rows
    from tests.tiny import logged, sft_config
    from trl_fsdp_qlora import QLoRASFTTrainer
    from trl_fsdp_qlora.training_state import gather_adapters

    os.environ.update(env)
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    config = sft_config(
        output_dir, bf16=False, max_steps=4, max_length=None, language_model_only=False, tower_device="cpu",
        per_device_train_batch_size=1, gradient_accumulation_steps=2 // world_size,
    )  # fmt: skip
    rows = image_rows(4, without=1)
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=rows, processing_class=image_processor(checkpoint))
    trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
    seen = []
    tower = next(m for name, m in trainer.model.named_modules() if name.endswith("vision_tower"))
    tower.register_forward_hook(lambda *_: seen.append(1))
    trainer.train()
    trained = gather_adapters(trainer.model)
    return {
        "steps": logged(trainer),
        "images": len(seen),
        "towers": {name: tensor.double().norm().item() for name, tensor in trained.items() if "vision_tower" in name and "lora_B" in name},
    }


@pytest.mark.parametrize("env", [FSDP, {}], ids=["sharded", "replicas"])
def test_towers_that_train_on_the_images_of_one_rank(checkpoint, tmp_path, env):
    pytest.importorskip("transformers.models.gemma4.processing_gemma4", reason="needs torchvision", exc_type=ImportError)
    (alone,) = run_ranks(1, train_on_some_images, checkpoint, str(tmp_path / "one"), env)
    ranks = run_ranks(2, train_on_some_images, checkpoint, str(tmp_path / "two"), env, timeout=200)
    assert [rank["images"] > 0 for rank in ranks] == [True, False]
    for rank in ranks:
        assert_same(alone, rank, "fp32")
        assert any(norm > 0 for norm in alone["towers"].values())
        assert rank["towers"] == pytest.approx(alone["towers"], rel=1e-3, abs=1e-9)


def test_bf16_adapters(one, two):
    assert_same(one["bf16-adapters"], two[0]["bf16-adapters"], "bf16")


def test_refused_with_several_ranks(checkpoint, tmp_path):
    for messages in run_ranks(2, refusals, checkpoint, str(tmp_path)):
        assert "'bfloat16'" in messages["uint8"] and "FSDP cannot shard" in messages["uint8"]
        assert "device_map" in messages["device-map"] and "Leave it out" in messages["device-map"]
        assert "'Gemma4TextDecoderLayer'" in messages["unit"]
        assert "'adamw_torch'" in messages["optimizer"]
        for name in ("later-adapter", "later-adapter-replicas"):
            assert ".later." in messages[name] and "Put all adapters on the model first" in messages[name]


def test_offloading_without_a_backend_for_host_memory_is_refused():
    check_backend("cpu:gloo,cuda:nccl", "cuda")
    with pytest.raises(ValueError, match="connects cuda alone.*accelerate launch"):
        check_backend("cuda:nccl", "cuda")


def test_a_failing_rank_is_seen(tmp_path):
    with pytest.raises(RankError, match="is neither a folder nor a known model"):
        run_ranks(2, run_scenarios, str(tmp_path / "no_model"), str(tmp_path), ["replicas"])


def gathered_bytes(device_type="cpu"):
    """Every 16-bit pattern through the units of a real sharded model, under every allowed policy."""
    import itertools
    import os

    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from trl_fsdp_qlora.packed import packed_weights
    from trl_fsdp_qlora.sharding import ShardingRequest, shard_model, verify_packed_bytes
    from trl_fsdp_qlora.streaming import packed_checksum

    device = torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device_type == "cuda" else "gloo")
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.uint8).repeat(2).to(device)

    class Packed(nn.Linear):
        def __init__(self, storage):
            super().__init__(8, 8, bias=False)
            self.weight = nn.Parameter(patterns.clone().view(storage).view(-1, 1), requires_grad=False)
            self.quant_state = object()  # marks it as packed

        def forward(self, x):
            self.seen = self.weight.detach().reshape(-1).view(torch.uint8).clone()
            return x

    class Layer(nn.Module):
        def __init__(self, storage, adapters):
            super().__init__()
            self.packed = Packed(storage)
            self.norm = nn.Parameter(torch.ones(8, dtype=storage), requires_grad=False)
            self.adapter = nn.Parameter(torch.ones(8, dtype=adapters))

        def forward(self, x):
            return self.packed(x * self.adapter) * self.norm

    class Model(nn.Module):
        def __init__(self, storage, adapters):
            super().__init__()
            self.embed = nn.Embedding(16, 8, dtype=storage)
            self.embed.requires_grad_(False)
            self.layers = nn.ModuleList([Layer(storage, adapters), Layer(storage, adapters)])

        def get_input_embeddings(self):
            return self.embed

        def get_output_embeddings(self):
            return None

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    seen = []
    floats = (torch.bfloat16, torch.float32)
    for storage, adapters, reduce, cast in itertools.product(floats, floats, (None, torch.float32), (True, False)):
        model = Model(storage, adapters).to(device)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=cast)
        shard_model(model, init_device_mesh(device_type, (2,)), ShardingRequest(fsdp=True), mp_policy=policy)
        model(torch.arange(4, device=device)).float().sum().backward()
        packed = packed_weights(model)
        try:
            verify_packed_bytes(model, {name: packed_checksum(patterns.flip(0)) for name in packed})
            noticed = False
        except RuntimeError:
            noticed = True
        seen.append(
            {
                "case": [str(storage), str(adapters), str(reduce), cast],
                "same": all(bool((p.owner.seen == patterns).all()) for p in packed.values()),
                "noticed": noticed,
                "one_dtype": storage == adapters,
                "guarded": hasattr(model.layers[0], "byte_guard"),
            }
        )
    return seen


def gather_together():
    """Tensors of many shapes, some with fewer rows than ranks, gathered at once and one by one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from trl_fsdp_qlora.sharding import full_tensors

    torch.distributed.init_process_group("gloo")
    mesh, generator = init_device_mesh("cpu", (torch.distributed.get_world_size(),)), torch.Generator().manual_seed(0)
    shapes = [(16, 5), (7, 3), (1, 4), (2,), (0, 6), (4, 2, 3), (5, 1)]
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    whole += [torch.randn(9, 2, generator=generator).bfloat16(), torch.arange(6).view(3, 2)]
    tensors = [distribute_tensor(t, mesh, [Shard(0)]) for t in whole]
    tensors += [distribute_tensor(whole[0], mesh, [Shard(1)]), distribute_tensor(whole[0], mesh, [Replicate()]), whole[0]]
    got = full_tensors(tensors)
    return [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, whole + [whole[0]] * 3, strict=True)] + [not full_tensors([])]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_tensors_are_gathered_together(ranks):
    assert run_ranks(ranks, gather_together) == [[True] * 13] * ranks


def test_every_bit_pattern_arrives_under_every_allowed_policy():
    for rank in run_ranks(2, gathered_bytes):
        assert len(rank) == 16
        for case in rank:
            assert case["same"], case
            assert case["noticed"], "a checksum that does not fit must stop the run"
            # A unit of one 16-bit dtype is copied as numbers, which CUDA rewrites where they are NaN patterns.
            assert case["guarded"] == case["one_dtype"], case
