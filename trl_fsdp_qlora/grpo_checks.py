"""What cannot work in GRPO, found out before a weight is read."""

import functools

from peft import PeftModel
from trl.import_utils import is_vllm_available


def check_arguments(args) -> None:
    """Refuse options of `GRPOConfig` that cannot work with 4-bit adapters.

    Raises:
        ValueError: saying what conflicts, and what to write instead.
        ImportError: if vLLM is asked for and missing.
    """
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "`use_transformers_continuous_batching=True` casts the whole model to 16 bit in place for every rollout, adapters "
            "included, which then lose what they learnt. Write `use_vllm=True`, or leave it out for plain generation."
        )
    if args.sync_ref_model:
        raise ValueError(
            "`sync_ref_model=True` copies weights into a second model, and there is none: the reference is the base with the "
            "adapter off, or a frozen copy of the adapter. Leave it out."
        )
    if args.cast_lm_head_to_fp32:
        raise ValueError(
            "`cast_lm_head_to_fp32=True` makes a second copy of a head that is tied to the embedding, and TRL cannot do it for a "
            "model with adapters. Leave it out: log-probabilities are summed in fp32 anyway."
        )
    if not args.use_vllm or args.vllm_mode == "server":
        return
    if not is_vllm_available():
        raise ImportError(
            "`use_vllm=True` with `vllm_mode='colocate'` needs vLLM in this environment: `pip install 'trl-fsdp-qlora[vllm]'`. "
            "Or write `vllm_mode='server'` and start a server elsewhere, or `use_vllm=False`."
        )
    if getattr(args, "vllm_base_quantization", "none") == "bitsandbytes":
        from .rollout_engine import check_bitsandbytes

        check_bitsandbytes()


def check_reference(model: PeftModel, beta: float) -> None:
    """Refuse adapters that TRL cannot copy as a reference.

    Raises:
        ValueError: if the active adapter is not `default`, or there is a `ref` already.
    """
    if len(model.active_adapters) != 1:
        raise ValueError(f"The adapters {', '.join(model.active_adapters)} are active. Activate the one to train, with `set_adapter`.")
    if beta == 0.0:
        return
    if model.active_adapter != "default":
        raise ValueError(
            f"`beta={beta}` needs a frozen copy of the adapter as a reference, which TRL makes of an adapter named 'default'; this "
            f"one is {model.active_adapter!r}. Load it without `adapter_name`, or write `beta=0.0`."
        )
    if "ref" in model.peft_config:
        raise ValueError("The given `PeftModel` has an adapter 'ref' already, which is the reference's name. Delete or rename it.")


def check_rollout_func(rollout_func):
    """`rollout_func`, whose empty completions raise a `ValueError` that says in which row."""

    @functools.wraps(rollout_func)
    def checked(*args, **kwargs):
        output = rollout_func(*args, **kwargs)
        for row, ids in enumerate(output.get("completion_ids", ())):
            if len(ids) == 0:
                raise ValueError(f"`rollout_func` returned no token for completion {row}. Give it the end-of-turn token at least.")
        return output

    return checked
