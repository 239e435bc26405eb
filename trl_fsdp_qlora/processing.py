"""The tokenizer or processor of a checkpoint."""

from peft import PeftModel
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel
from trl.trainer.utils import get_config_model_id

from .loading import inspect_checkpoint


def load_processing_class(model: str | PreTrainedModel | PeftModel, args, *, wants_images: bool):
    """The processor if rows hold images, else the tokenizer: text rows must not need vision libraries.

    Raises:
        ValueError: if the checkpoint has none.
    """
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    kwargs = args.model_init_kwargs or {}
    options = {
        "revision": kwargs.get("revision"),
        "trust_remote_code": kwargs.get("trust_remote_code", getattr(args, "trust_remote_code", False)),
    }
    if isinstance(model, str):
        # Says it better than the tokenizer's loader where there is no such checkpoint.
        inspect_checkpoint(name, **options)
    try:
        return (AutoProcessor if wants_images else AutoTokenizer).from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No {'processor' if wants_images else 'tokenizer'} in {name!r}: {str(error).splitlines()[0]} "
            "Pass one as `processing_class`."
        ) from error
