"""Rows with images through Gemma 4's own processor: TRL's data path, the towers frozen."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from tests.tiny import logged, sft_config
from trl_fsdp_qlora import QLoRASFTTrainer
from trl_fsdp_qlora.demo.models import tiny_gemma4

# transformers 5.17 imports torchvision there, of which no build goes with a torch that is for the CPU alone.
pytest.importorskip("transformers.models.gemma4.processing_gemma4", reason="needs torchvision", exc_type=ImportError)

SOFT_TOKENS = 70
TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


@pytest.fixture(scope="module")
def checkpoint(model_cache):
    return tiny_gemma4(str(model_cache / "gemma4"))


@pytest.fixture(scope="module")
def processor(checkpoint):
    return image_processor(checkpoint)


def image_processor(checkpoint):
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.video_processing_utils import BaseVideoProcessor

    class NoVideos(BaseVideoProcessor):
        """The real one needs torchvision."""

        def __init__(self):
            pass

    class WithoutVideos(Gemma4Processor):
        def check_argument_for_proper_class(self, argument_name, argument):
            return type(argument)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, extra_special_tokens=TOKENS)
    patch_size = AutoConfig.from_pretrained(checkpoint).vision_config.patch_size
    return WithoutVideos(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessorPil(patch_size=patch_size, max_soft_tokens=SOFT_TOKENS),
        tokenizer=tokenizer,
        video_processor=NoVideos(),
        chat_template=tokenizer.chat_template,
        image_seq_length=SOFT_TOKENS,
    )


def image_rows(count: int = 4, without: int = 0) -> Dataset:
    """Rows with an image, each followed by so many without."""
    images = [Image.fromarray(np.random.RandomState(i).randint(0, 255, (48, 64, 3), dtype=np.uint8)) for i in range(count)]
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "one and two"}]}
    asked = {"role": "user", "content": [{"type": "text", "text": "what is this"}]}
    text = [([], [asked, answer])] * without
    rows = [row for image in images for row in [([image], [question, answer]), *text]]
    return Dataset.from_dict({"images": [found for found, _ in rows], "messages": [messages for _, messages in rows]})


def test_rows_with_images_train_and_the_towers_stay_frozen(checkpoint, processor, tmp_path):
    config = sft_config(tmp_path, bf16=False, max_steps=4, max_length=None)
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=image_rows(), processing_class=processor)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["pixel_values"].shape[0] == 2 and (batch["input_ids"] == processor.image_token_id).any()
    towers = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "vision" in name}
    trainer.train()
    losses = [loss for loss, _ in logged(trainer)]
    assert losses[-1] < losses[0]
    assert towers and not [name for name, p in trainer.model.named_parameters() if name in towers and not torch.equal(p, towers[name])]
    # The image is seen: another one gives another loss.
    batch = {name: tensor.clone() for name, tensor in batch.items()}
    with torch.no_grad():
        seen = trainer.model.eval()(**batch).loss
        batch["pixel_values"] = torch.rand_like(batch["pixel_values"])
        assert not torch.isclose(trainer.model(**batch).loss, seen, rtol=1e-6)
