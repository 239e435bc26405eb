"""What forked ranks have imported (`launch._Forked`). Nothing here may start a thread or read the environment of a rank."""

import gc

import bitsandbytes  # noqa: F401
import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import transformers.models.gemma4.modeling_gemma4  # noqa: F401

from trl_fsdp_qlora import QLoRAGRPOTrainer, QLoRASFTTrainer  # noqa: F401

gc.freeze()  # ranks collect garbage: not among what they were forked with
