"""`QLoRASFTTrainer` at one rank, as people call it, and as they should not."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoHaConfig, LoraConfig, PeftModel, PromptTuningConfig, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from tests.tiny import logged, sft_config, token_rows
from trl_fsdp_qlora import QLoRASFTConfig, QLoRASFTTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4
from trl_fsdp_qlora.loading import inspect_checkpoint, load_model, quantization_from
from trl_fsdp_qlora.packed import packed_weights
from trl_fsdp_qlora.targets import resolve_peft_config

ROWS = token_rows(8, lengths=(24, 9, 17, 30))
FAR_TOKEN = Dataset.from_dict({"input_ids": [[2, 40, 511], [2, 40, 512]]})  # the tiny model's vocabulary has 512
ON_HOST = {"per_layer_embedding_device": "cpu"}
EMPTY_STREAM = IterableDataset.from_generator(lambda: iter(()))
UNTYPED = [{"role": "user", "content": [{"text": "hello"}]}, {"role": "assistant", "content": [{"text": "a short text"}]}]


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    return tiny_gemma4(str(model_cache / "gemma4"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def trainer_for(model, tmp_path, rows=ROWS, trainer_args=None, **fields):
    return QLoRASFTTrainer(model, sft_config(tmp_path, **fields), train_dataset=rows, **(trainer_args or {}))


def adapters(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def nf4():
    return quantization_from("nf4", True, torch.bfloat16, torch.bfloat16)


def test_defaults_train_adapters_and_nothing_else(checkpoint, tmp_path):
    trainer = trainer_for(checkpoint, tmp_path)
    before, base = adapters(trainer), {n: m.weight.detach().clone() for n, m in packed_weights(trainer.model).items()}
    assert len(before) == 102 and all("lora_" in name and p.dtype == torch.float32 for name, p in before.items())
    trainer.train()
    after = adapters(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    for name, module in packed_weights(trainer.model).items():
        assert torch.equal(module.weight.view(torch.uint8), base[name].view(torch.uint8))
    trainer.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 102 and all(name.startswith("base_model.model.model.language_model.") for name in saved)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 16 and config["base_model_name_or_path"] == checkpoint
    assert (tmp_path / "tokenizer.json").exists()


def test_modules_that_are_trained_whole(checkpoint, tmp_path):
    config = nf4()
    config.llm_int8_skip_modules = ["k_proj"]
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm", "k_proj"])
    trainer = trainer_for(Path(checkpoint), tmp_path, trainer_args={"peft_config": lora, "quantization_config": config})
    before = adapters(trainer)
    kinds = {name.split(".modules_to_save")[0].rpartition(".")[2] for name in before if "modules_to_save" in name}
    assert kinds == {"input_layernorm", "k_proj"} and not [name for name in before if "tower" in name]
    trainer.train()
    trainer.save_model()
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert not any(torch.equal(before[name], p) for name, p in adapters(trainer).items() if "lora_A" not in name)
    assert len(saved) == len(before)


def test_pissa_on_layers_in_16_bit(checkpoint, tmp_path):
    config = nf4()
    config.llm_int8_skip_modules = ["q_proj"]
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa_niter_4")
    trainer_for(checkpoint, tmp_path, trainer_args={"peft_config": lora, "quantization_config": config}, max_steps=1).train()


def test_gradients_asked_of_embeddings_before_are_not_asked_any_more(checkpoint, tmp_path):
    model = load_model(checkpoint, quantization_config=nf4())
    model.get_input_embeddings().register_forward_hook(lambda *args: None)
    for _ in range(2):
        model.enable_input_require_grads()
    trainer = trainer_for(model, tmp_path, max_steps=1)
    trainer.train()
    assert len(trainer.model.get_base_model().get_input_embeddings()._forward_hooks) == 1


def test_small_updates_are_not_rounded_away(checkpoint, tmp_path):
    trainer = trainer_for(checkpoint, tmp_path, learning_rate=1e-8, max_steps=1)
    before = adapters(trainer)
    trainer.train()
    assert any(not torch.equal(before[n], p) for n, p in adapters(trainer).items() if "lora_B" in n)
    half = trainer_for(checkpoint, tmp_path, adapter_dtype="bfloat16", max_steps=1)
    assert {p.dtype for p in adapters(half).values()} == {torch.bfloat16}
    half.train()


def test_a_plain_config_of_trl_works(checkpoint, tmp_path):
    config = SFTConfig(str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no", per_device_train_batch_size=2)
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=ROWS)
    assert packed_weights(trainer.model)
    trainer.train()


def test_loss_falls_on_one_batch(checkpoint, tmp_path):
    trainer = trainer_for(checkpoint, tmp_path, ROWS.select(range(2)), max_steps=10)
    trainer.train()
    losses = [loss for loss, _ in logged(trainer)]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False)), losses


@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_that_is_not_finite(checkpoint, tmp_path, filtered):
    """Logged as transformers logs it: replaced by the mean since the last log, unless the user wants to see it."""
    losses = {}
    for trainer_class in (QLoRASFTTrainer, SFTTrainer):
        fields = {"max_steps": 4, "logging_steps": 2, "logging_nan_inf_filter": filtered, "max_grad_norm": 0.0, "learning_rate": 0.0}
        trainer = trainer_for(checkpoint, tmp_path, **fields)
        calls = []

        def last_is_nan(model, inputs, *args, calls=calls, compute_loss=trainer.compute_loss, **kwargs):
            calls.append(1)
            loss = compute_loss(model, inputs, *args, **kwargs)
            return loss * float("nan") if len(calls) == 4 else loss

        trainer.compute_loss = last_is_nan
        if trainer_class is SFTTrainer:  # its own training step
            trainer.training_step = SFTTrainer.training_step.__get__(trainer)
        trainer.train()
        assert trainer.args.logging_nan_inf_filter is filtered
        losses[trainer_class] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    mine, stock = losses.values()
    assert mine == pytest.approx(stock, nan_ok=True)
    assert math.isfinite(mine[1]) == filtered


@pytest.mark.parametrize("load_in_4bit", [True, False])
def test_gradients_do_not_depend_on_checkpointing(checkpoint, tmp_path, load_in_4bit):
    """Layers that share keys and values must find attached tensors when they are computed again."""
    fields = {"bf16": False, "max_steps": 4, "load_in_4bit": load_in_4bit}
    steps = []
    for checkpointing in (True, False):
        trainer = trainer_for(checkpoint, tmp_path, gradient_checkpointing=checkpointing, **fields)
        trainer.train()
        steps.append(logged(trainer))
    for (loss, norm), (other_loss, other_norm) in zip(*steps, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-6) and other_norm == pytest.approx(norm, rel=1e-4)


class TestWhatIsGiven:
    """A name, an instance, a `PeftModel`; with and without configs."""

    def test_peft_config_and_quantization_config(self, checkpoint, tmp_path):
        trainer = trainer_for(
            checkpoint, tmp_path,
            trainer_args={
                "peft_config": LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
                "quantization_config": BitsAndBytesConfig(
                    load_in_4bit=True, bnb_4bit_quant_type="fp4",
                    bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
                ),
            },
        )  # fmt: skip
        assert len(adapters(trainer)) == 20
        assert {m.quant_state.quant_type for m in packed_weights(trainer.model).values()} == {"fp4"}
        assert not [name for name in packed_weights(trainer.model) if "tower" in name]
        trainer.train()

    def test_instance_is_taken_as_it_is(self, checkpoint, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
        import logging

        logging.getLogger("trl_fsdp_qlora").propagate = True
        model = load_model(checkpoint, quantization_config=nf4())
        trainer = trainer_for(model, tmp_path, bnb_4bit_quant_type="fp4", attn_implementation="eager", lora_r=4)
        logging.getLogger("trl_fsdp_qlora").propagate = False
        assert "no effect" in caplog.text and "bnb_4bit_quant_type='fp4'" in caplog.text
        assert "lora_r" not in caplog.text  # this one has an effect
        assert {p.shape[0] for n, p in adapters(trainer).items() if "lora_A" in n} == {4}
        trainer.train()

    def test_peft_model_keeps_its_adapter(self, checkpoint, tmp_path):
        first = trainer_for(checkpoint, tmp_path / "a", max_steps=2)
        first.train()
        first.save_model()
        base = load_model(checkpoint, quantization_config=nf4())
        model = PeftModel.from_pretrained(base, tmp_path / "a", is_trainable=True)
        trainer = trainer_for(model, tmp_path / "b", max_steps=1)
        kept, trained = adapters(trainer), adapters(first)
        assert kept.keys() == trained.keys()
        assert all(torch.equal(kept[name].float(), trained[name]) for name in kept)
        trainer.train()

    def test_what_cannot_be(self, checkpoint, tmp_path):
        base = load_model(checkpoint, quantization_config=nf4())
        with pytest.raises(ValueError, match="has 512 at position 2"):
            trainer_for(base, tmp_path, FAR_TOKEN)
        config = resolve_peft_config(base, LoraConfig(r=2, target_modules=["q_proj"]))
        model = get_peft_model(base, config)
        with pytest.raises(ValueError, match="has 512 at position 2"):
            trainer_for(model, tmp_path, FAR_TOKEN)
        with pytest.raises(ValueError, match="wrapped twice"):
            trainer_for(model, tmp_path, trainer_args={"peft_config": config})
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        with pytest.raises(ValueError, match="is_trainable=True"):
            trainer_for(model, tmp_path)


class TestRefusedBeforeLoading:
    """Nothing is read: a checkpoint with a config and no weights is enough to be refused."""

    @pytest.fixture(scope="class")
    def weightless(self, checkpoint, tmp_path_factory):
        folder = tmp_path_factory.mktemp("weightless") / "model"
        shutil.copytree(checkpoint, folder)
        (folder / "model.safetensors").unlink()
        return str(folder)

    @pytest.mark.parametrize(
        ("fields", "trainer_args", "said"),
        [
            ({"lora_target_modules": ["qproj"]}, {}, "matches none of the 51"),
            ({"lora_target_modules": [r".*vision_tower.*"]}, {}, "outside the language model"),
            ({"bnb_4bit_quant_storage": "float16"}, {}, "Packed 4-bit storage is float16"),
            ({"bnb_4bit_compute_dtype": "float32"}, {}, "contradicts `bf16=True`"),
            ({"model_init_kwargs": {"device_map": "auto"}}, {}, "conflicts with this rank's device"),
            ({"model_init_kwargs": {"device_map": {"": 1}}}, {}, "conflicts with this rank's device"),
            ({"model_init_kwargs": {"dtype": "int8"}}, {}, "`dtype='int8'` is unknown"),
            ({"attn_implementation": "eager", "model_init_kwargs": {"attn_implementation": "sdpa"}}, {}, "disagree"),
            ({"bnb_4bit_quant_type": "fp4"}, {"quantization_config": nf4()}, "write one of the two"),
            ({"model_init_kwargs": {"quantization_config": nf4()}}, {"quantization_config": nf4()}, "write one of them"),
            ({"load_in_4bit": False}, {"quantization_config": nf4()}, "`load_in_4bit=False`, and `quantization_config` asks for 4"),
            ({"load_in_4bit": False, "bnb_4bit_quant_type": "fp4"}, {}, "`load_in_4bit=False` quantises nothing, and bnb_4bit_quant_type"),
            ({}, {"peft_config": LoraConfig(target_modules=["nothing"])}, "matches none"),
            ({}, {"peft_config": LoraConfig(inference_mode=True)}, "inference_mode=True"),
            ({}, {"peft_config": LoraConfig(init_lora_weights="pissa")}, "cannot be done to 4-bit"),
            ({}, {"peft_config": LoraConfig(bias="all")}, "biases of towers"),
            ({}, {"peft_config": LoraConfig(modules_to_save=["nonexistent"])}, "does not contain"),
            ({}, {"peft_config": LoraConfig(modules_to_save=["k_proj"])}, r"k_proj' in it has quantised weights.*modules=\['k_proj'\]"),
            ({}, {"peft_config": LoraConfig(modules_to_save=["mlp"])}, r"modules=\['down_proj', 'gate_proj', 'up_proj'\]"),
            ({}, {"peft_config": LoHaConfig(target_modules=["q_proj"])}, "LOHA reads the shape"),
            ({}, {"peft_config": TrainableTokensConfig(token_indices=[10])}, "tied to the embedding"),
            ({}, {"peft_config": LoraConfig(modules_to_save=["audio_tower"])}, "in towers and connectors alone.*language_model_only=False"),
            (ON_HOST, {"peft_config": LoraConfig(modules_to_save=["embed_tokens_per_layer"])}, "per_layer_embedding_device='accelerator'"),
            ({**ON_HOST, "lora_target_modules": ["embed_tokens_per_layer"]}, {}, "per_layer_embedding_device='accelerator'"),
            ({}, {"peft_config": LoraConfig(trainable_token_indices=[10, 15])}, "tied to the embedding"),
            ({}, {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}, "per-layer embeddings"),
            ({"model_init_kwargs": {"dtype": "float16"}}, {}, "do not mix"),
            ({}, {"eval_dataset": Dataset.from_dict({"text": []})}, "`eval_dataset` has no rows"),
            ({}, {"eval_dataset": {"a": Dataset.from_dict({"question": ["x"]})}}, r"eval_dataset\['a'\]"),
            ({}, {"train_dataset": Dataset.from_dict({"text": ["a", None]})}, "Row 1 of `train_dataset`"),
            ({}, {"train_dataset": None}, "`train_dataset` is missing"),
            ({}, {"train_dataset": EMPTY_STREAM}, "`train_dataset` has no rows"),
            ({}, {"train_dataset": EMPTY_STREAM, "formatting_func": str}, "`train_dataset` has no rows"),
            ({}, {"train_dataset": Dataset.from_dict({"text": ["", ""]})}, "Row 0 of `train_dataset`.*'text' is empty"),
            ({}, {"train_dataset": Dataset.from_list([{"messages": UNTYPED}])}, "Row 0 .*message 0 .*without a 'type'"),
            ({}, {"train_dataset": FAR_TOKEN}, "Row 1 of `train_dataset` .*has 512 at position 2: the model's tokens are 0 to 511"),
            ({}, {"eval_dataset": {"a": FAR_TOKEN}}, r"Row 1 of `eval_dataset\['a'\]`.*has 512"),
            ({}, {"train_dataset": FAR_TOKEN.select([1]).to_iterable_dataset()}, "Row 0 of `train_dataset` .*has 512"),
            ({"assistant_only_loss": True}, {}, "`assistant_only_loss=True`.*no 'assistant_masks'"),
            ({}, {"train_dataset": ROWS.add_column("completion_mask", ROWS["input_ids"])}, "Write `completion_only_loss=True`"),
            ({"chat_template_path": "/dev/null/template.jinja"}, {}, "`chat_template_path='/dev/null/template.jinja'` is neither"),
            ({"chat_template_path": os.path.dirname(__file__)}, {}, "is neither a file .* nor a folder or model id with a tokenizer"),
        ],
    )
    def test_refused(self, weightless, tmp_path, fields, trainer_args, said):
        trainer_args = {"train_dataset": ROWS, **trainer_args}
        with pytest.raises(ValueError, match=said):
            QLoRASFTTrainer(weightless, sft_config(tmp_path, **fields), **trainer_args)

    def test_activation_offloading_in_a_plain_config(self, weightless, tmp_path):
        config = SFTConfig(str(tmp_path), use_cpu=True, report_to=[], activation_offloading=True)
        with pytest.raises(ValueError, match="activation_offloading=True"):
            QLoRASFTTrainer(weightless, config, train_dataset=ROWS)

    def test_offloading_by_checkpointing_in_a_plain_config(self, weightless, tmp_path):
        config = SFTConfig(str(tmp_path), use_cpu=True, report_to=[], gradient_checkpointing_kwargs={"offload": True})
        with pytest.raises(ValueError, match="activation_offloading=True"):
            QLoRASFTTrainer(weightless, config, train_dataset=ROWS)

    def test_an_adapter_is_no_model(self, checkpoint, tmp_path):
        trainer_for(checkpoint, tmp_path).save_model()
        with pytest.raises(ValueError, match="is an adapter, not a model.*is_trainable=True"):
            trainer_for(tmp_path, tmp_path)

    def test_flash_attention_and_wide_heads(self, model_cache, tmp_path):
        wide = tiny_gemma4(str(model_cache / "wide"), global_head_dim=512)
        for fields in ({"attn_implementation": "flash_attention_2"}, {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}):
            with pytest.raises(ValueError, match="up to 256.*512"):
                trainer_for(wide, tmp_path, **fields)

    def test_output_folder(self, weightless):
        with pytest.raises(ValueError, match="/dev/null/x.*cannot be written"):
            trainer_for(weightless, "/dev/null/x")

    def test_no_chat_template(self, weightless, tmp_path, checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        tokenizer.chat_template = None
        rows = Dataset.from_dict({"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]})
        with pytest.raises(ValueError, match="no chat template"):
            trainer_for(weightless, tmp_path, rows, {"processing_class": tokenizer})


class TestOneRankUnderFSDP:
    @pytest.fixture(autouse=True)
    def launched_with_fsdp(self, monkeypatch):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")

    def test_nothing_is_wrapped(self, checkpoint, tmp_path, monkeypatch):
        plain = [k for k in os.environ if k.startswith("FSDP")]
        assert plain
        trainer = trainer_for(checkpoint, tmp_path, max_steps=2)
        trainer.train()
        assert not [m for m in trainer.model.modules() if type(m).__name__.startswith("FSDP")]
        assert type(trainer.model_wrapped) is type(trainer.model) and isinstance(trainer.model, PeftModel)
        monkeypatch.delenv("ACCELERATE_USE_FSDP")
        other = trainer_for(checkpoint, tmp_path, max_steps=2)
        other.train()
        assert logged(trainer) == logged(other)

    def test_training_arguments_with_fsdp(self, checkpoint, tmp_path, monkeypatch):
        monkeypatch.delenv("ACCELERATE_USE_FSDP")
        trainer_for(checkpoint, tmp_path, max_steps=1, fsdp="full_shard").train()

    def test_offload_is_refused(self, checkpoint, tmp_path, monkeypatch):
        monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
        with pytest.raises(ValueError, match="fsdp_offload_params.*one rank"):
            trainer_for(checkpoint, tmp_path)

    def test_one_kind_of_checkpointing(self, checkpoint, tmp_path, monkeypatch):
        monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
        trainer = trainer_for(checkpoint, tmp_path, max_steps=1, gradient_checkpointing=False)
        trainer.train()
        layers = trainer.model.get_base_model().model.language_model.layers
        assert all(layer.gradient_checkpointing for layer in layers)

    def test_an_accelerator_that_was_first_is_refused(self, checkpoint, tmp_path):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import FullyShardedDataParallelPlugin

        config = sft_config(tmp_path)  # forgets an accelerator made before it
        Accelerator(cpu=True)
        # On a GPU, `Accelerator` sets this itself under FSDP; on the CPU it turns FSDP off.
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        try:
            with pytest.raises(ValueError, match="Make the trainer first"):
                QLoRASFTTrainer(checkpoint, config, train_dataset=ROWS)
        finally:
            AcceleratorState._reset_state()


MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a short text"}]


class TestRows:
    """Text rows need no processor, no token types, no vision libraries; every format gives the same tokens."""

    @pytest.mark.parametrize(
        "row",
        [
            {"text": "a short text"},
            {"prompt": "a short ", "completion": "text"},
            {"messages": MESSAGES},
            {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        ],
        ids=["text", "prompt-completion", "messages", "conversational"],
    )
    @pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
    def test_formats(self, checkpoint, tmp_path, row, packing):
        trainer = trainer_for(checkpoint, tmp_path, Dataset.from_list([row] * 4), max_steps=1, packing=packing, max_length=64)
        trainer.train()
        assert logged(trainer)[0][0] > 0

    def test_content_as_string_or_as_parts(self, checkpoint, tokenizer, tmp_path):
        parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
        ids = []
        for messages in (MESSAGES, parts):
            trainer = trainer_for(checkpoint, tmp_path, Dataset.from_list([{"messages": messages}]), max_steps=1)
            ids.append(trainer.train_dataset[0]["input_ids"])
        given = trainer_for(
            checkpoint, tmp_path, Dataset.from_list([{"messages": MESSAGES}]), {"processing_class": tokenizer}, max_steps=1
        )
        assert ids[0] == ids[1] == given.train_dataset[0]["input_ids"]

    def test_packed_rows_do_not_see_each_other(self, checkpoint, tmp_path):
        """Two rows in one: the loss is that of the two apart."""
        rows = token_rows(2, lengths=(12, 20))
        losses = []
        for packing in (False, True):
            trainer = trainer_for(
                checkpoint, tmp_path, rows, max_steps=1, packing=packing, max_length=32, bf16=False, per_device_train_batch_size=2
            )
            trainer.train()
            losses.append(logged(trainer)[0][0])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    def test_prompts_are_not_trained_on(self, checkpoint, tmp_path):
        trainer = trainer_for(checkpoint, tmp_path, Dataset.from_list([{"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}]))
        row = trainer.train_dataset[0]
        trained = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        assert trainer.processing_class.decode(trained) == "a short text<turn|>\n"

    def test_assistant_only_loss(self, checkpoint, tmp_path):
        rows = Dataset.from_list([{"messages": [*MESSAGES, {"role": "user", "content": "123"}, {"role": "assistant", "content": "words"}]}])
        config = sft_config(tmp_path, assistant_only_loss=True, max_steps=1)
        trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=rows, eval_dataset=rows)
        for dataset in (trainer.train_dataset, trainer.eval_dataset):
            row = dataset[0]
            trained = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
            assert trainer.processing_class.decode(trained) == "a short text<turn|>words<turn|>"
        assert trainer.args.assistant_only_loss
        trainer.train()
        assert trainer.evaluate(rows)["eval_loss"] > 0

    def test_assistant_only_loss_without_an_answer(self, checkpoint, tmp_path):
        rows = Dataset.from_list([{"messages": MESSAGES}, {"messages": MESSAGES[:1]}])
        with pytest.raises(ValueError, match="[Rr]ow 1"):
            trainer_for(checkpoint, tmp_path, rows, assistant_only_loss=True)

    def test_image_rows_run_the_towers_frozen(self, checkpoint, tmp_path):
        """Features of an image reach the loss; the tower moves in for them and gets no gradient."""
        trainer = trainer_for(checkpoint, tmp_path, max_steps=1, tower_device="cpu")
        model = trainer.model
        patches = 9 * 2  # 2 soft tokens of 3 x 3 patches
        size = model.config.vision_config.patch_size
        positions = torch.stack([torch.arange(patches) % 6, torch.arange(patches) // 6], dim=-1)[None]
        pixels = torch.rand(1, patches, 3 * size * size)
        image = model.config.image_token_id
        ids = torch.tensor([[2, 40, image, image, 41, 42, 43]])
        inputs = {"input_ids": ids, "labels": ids.masked_fill(ids == image, -100), "pixel_values": pixels}
        inputs |= {"image_position_ids": positions, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == image).long()}
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
            other = model(**{**inputs, "pixel_values": torch.rand_like(pixels)}).loss
        assert loss.item() != other.item()
        loss.backward()
        assert all(p.grad is None for n, p in model.named_parameters() if "tower" in n)
        assert any(p.grad is not None for p in model.parameters())


def test_an_instance_with_adapters_is_refused(checkpoint, tmp_path):
    model = load_model(checkpoint, quantization_config=nf4())
    trainer_for(model, tmp_path)
    with pytest.raises(ValueError, match="already carries adapter layers"):
        trainer_for(model, tmp_path)


@pytest.mark.parametrize("labels", [[-100, -100, -100], [2, -100, -100], [2]], ids=["masked", "only-the-first", "one-token"])
def test_rows_without_a_trainable_token_are_refused(checkpoint, tmp_path, labels):
    rows = Dataset.from_dict({"input_ids": [[2, 40, 41][: len(labels)]], "labels": [labels]})
    with pytest.raises(ValueError, match="has a token to train on"):
        trainer_for(checkpoint, tmp_path, rows)


@pytest.mark.parametrize(
    ("mask", "fields"), [("assistant_masks", {}), ("completion_mask", {"completion_only_loss": True})], ids=["assistant", "completion"]
)
def test_masks_of_tokens_are_honoured(checkpoint, tmp_path, mask, fields):
    rows = Dataset.from_dict({"input_ids": [[2, 40, 41, 42], [2, 43, 44]], mask: [[0, 0, 1, 1], [0, 1, 0]]})
    trainer = trainer_for(checkpoint, tmp_path, rows, max_steps=1, **fields)
    assert trainer.train_dataset["labels"] == [[-100, -100, 41, 42], [-100, 43, -100]]
    trainer.train()


def test_a_template_from_a_file_or_another_model(checkpoint, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    rows = Dataset.from_list([{"messages": MESSAGES}])
    trainer = trainer_for(checkpoint, tmp_path, rows, chat_template_path=str(file))
    assert trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"]) == "helloa short text"
    assert trainer_for(checkpoint, tmp_path, rows, chat_template_path=checkpoint).processing_class.chat_template


def test_text_only_class(model_cache, tmp_path):
    folder = tiny_gemma4(str(model_cache / "text"), text_only=True)
    trainer = trainer_for(folder, tmp_path, max_steps=2)
    trainer.train()
    assert len(adapters(trainer)) == 102


def test_evaluation_at_steps_and_best_model(checkpoint, tmp_path):
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    config = sft_config(tmp_path, max_steps=4, load_best_model_at_end=True, **steps)
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=ROWS, eval_dataset=ROWS.select(range(2)))
    trainer.train()
    assert len([e for e in trainer.state.log_history if "eval_loss" in e]) == 2


def test_the_skeleton_needs_no_weights(checkpoint):
    found = inspect_checkpoint(checkpoint)
    assert {p.device.type for p in found.skeleton.parameters()} == {"meta"}


def test_conversion_from_plain_training_arguments(checkpoint, tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
    trainer = QLoRASFTTrainer(checkpoint, args, train_dataset=ROWS)
    assert isinstance(trainer.args, QLoRASFTConfig)
