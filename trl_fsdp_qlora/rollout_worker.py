"""What runs inside a vLLM worker: put an adapter there, and say which of its modules the engine found.

Imported by vLLM's own processes too (`--worker-extension-cls trl_fsdp_qlora.rollout_worker.AdapterReport`), so it
imports vLLM and nothing else, and that late.
"""


class AdapterReport:
    """Mixed into a server's workers, whose methods `/collective_rpc` can call."""

    def newest_adapter_report(self) -> dict:
        """`adapter_report` of the adapter that was loaded last."""
        return adapter_report(self, max(_manager(self).list_adapters(), default=0))


def adapter_report(worker, adapter_id: int) -> dict:
    """How many of an adapter's modules the engine's model has, and the engine's names of those it lacks."""
    manager = _manager(worker)
    adapter = manager.get_adapter(adapter_id)
    if adapter is None:
        return {"matched": 0, "unmatched": []}
    unmatched = sorted(name for name in adapter.loras if name not in manager.modules)
    found = [weights.lora_a for name, weights in adapter.loras.items() if name in manager.modules]
    # The engine joins layers, such as q, k and v, and keeps one weight for each that the adapter has.
    parts = [part for weight in found for part in (weight if isinstance(weight, list) else [weight])]
    return {"matched": sum(part is not None for part in parts), "unmatched": unmatched}


def put_adapter(worker, adapter_id: int, tensors: dict, config: dict) -> dict:
    """Serve `tensors` as adapter `adapter_id` instead of all others, without a file. Returns its `adapter_report`."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = _manager(worker)
    lora_config = manager.lora_config
    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        lora_model_id=adapter_id,
        tensors=tensors,
        peft_helper=helper,
        device=str(manager.device),
        dtype=lora_config.lora_dtype,
        # What splits or drops weights of the base must not touch names of an adapter.
        weights_mapper=mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper,
    )
    for old in list(manager.list_adapters()):
        manager.remove_adapter(old)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter_id)
    return adapter_report(worker, adapter_id)


def drop_adapters(worker, keep: int) -> None:
    """Free every adapter but `keep`."""
    manager = _manager(worker)
    for old in list(manager.list_adapters()):
        if old != keep:
            manager.remove_adapter(old)


def _manager(worker):
    return worker.model_runner.lora_manager._adapter_manager
