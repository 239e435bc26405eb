"""A Gemma 4 decoder layer from fused operations: what its own forward computes, in a quarter of the launches.

Shapes: B batch, S sequence, H query heads, K key/value heads, D head dimension.
"""

import types
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, eager_attention_forward

from ..logging import get_logger, warn_once
from ..packed import quant_state_of
from . import attention_interface
from .gated_gelu import gated_gelu
from .graph_pool import Replays
from .joined_layers import JoinedLayers, active_names, base_of, drops_out, hooked, inner_modules, unknown_kind
from .norm_rotary import norm_rotary
from .recording import Place
from .replay import Kind, LayerReplay, replay
from .rms_norm import add_rms_norm, rms_norm, rms_norm_and_residual

logger = get_logger(__name__)

ACTIVATION = "gelu_pytorch_tanh"
RECORDED_ATTENTION = (attention_interface.NAME, "sdpa")
CACHES = ("cache", "past_key_values")
# transformers 5.17 checkpoints a layer around its `__call__`, 5.24 around its `forward`.
CHECKPOINTS_CALL = "__call__" in vars(GradientCheckpointingLayer)


def why_not(layer: Gemma4TextDecoderLayer) -> str | None:
    """Why `layer` cannot be fused, or None."""
    if layer.enable_moe_block:
        return "experts"
    if layer.config.hidden_activation != ACTIVATION:
        return f"activation {layer.config.hidden_activation}"
    if any(p.requires_grad for norm in _norms(layer) for p in norm.parameters()):
        return "norms that train"
    return next((reason for linear in _linears(layer) if (reason := unknown_kind(linear))), None)


def why_not_recorded(layer: Gemma4TextDecoderLayer) -> str | None:
    """Why no pass through `layer` replays a recording, or None."""
    attention = layer.config._attn_implementation
    return None if attention in RECORDED_ATTENTION else f"attention {attention}"


def why_not_in_training(layer: Gemma4TextDecoderLayer) -> str | None:
    """Why `layer` replays none in training, or None."""
    if layer.self_attn.attention_dropout:
        return "dropout in attention"
    return "dropout before adapters" if any(isinstance(m, nn.Dropout) and m.p for m in layer.modules()) else None


def fuse(layer: Gemma4TextDecoderLayer) -> None:
    """Give `layer` the fused forward, in place. Its class keeps its name, which FSDP settings may mention."""
    _join(layer)
    layer.__class__ = FusedGemma4TextDecoderLayer


def _join(layer) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj]
    if not attention.is_kv_shared_layer:
        qkv += [attention.k_proj] + ([attention.v_proj] if attention.v_proj is not None else [])
    layer.joined_qkv = JoinedLayers(qkv)
    layer.joined_o = JoinedLayers([attention.o_proj])
    layer.joined_gate_up = JoinedLayers([mlp.gate_proj, mlp.up_proj])
    layer.joined_down = JoinedLayers([mlp.down_proj])
    if layer.hidden_size_per_layer_input:
        layer.joined_ple_gate = JoinedLayers([layer.per_layer_input_gate])
        layer.joined_ple_out = JoinedLayers([layer.per_layer_projection])
    layer.linears, layer.inner = _linears(layer), _inner_modules(layer)
    layer.joined = [part for part in vars(layer).values() if isinstance(part, JoinedLayers)]
    # Where the modules are that were fused. Looked at in each call, as is what was joined.
    parts = [(name.rpartition("."), part) for name, part in layer.named_modules() if part in layer.linears or part in _norms(layer)]
    layer.joined_places = [(layer.get_submodule(parent)._modules, leaf, part) for (parent, _, leaf), part in parts]
    layer.stays_unfused = False


def take_apart(layer) -> None:
    """Undo `fuse` and `replay_layer`."""
    if layer.self_attn.config._attn_implementation == attention_interface.NAME:
        layer.self_attn.config._attn_implementation = "sdpa"
    if "replay" in vars(layer):
        layer.replay.replays.release()
        del layer.replay, layer.forward
    for name in [name for name in vars(layer) if name == "joined" or name.startswith("joined_")]:
        delattr(layer, name)
    del layer.linears, layer.inner, layer.stays_unfused
    layer.__class__ = Gemma4TextDecoderLayer


def _keep_up(layer) -> None:
    """Fuse anew what is another layer by now: adapters may have been put on it, merged into it or taken off since."""
    same = all(owner[leaf] is part for owner, leaf, part in layer.joined_places)
    if layer.stays_unfused or same and all(joined.is_current() for joined in layer.joined):
        return
    reason = why_not(layer)
    if reason is not None:
        layer.stays_unfused = True
        warn_once(logger, f"Decoder layers have changed, and take their own operations instead of fused ones from now on: {reason}.")
        return
    _join(layer)
    if "replay" in vars(layer):
        layer.replay = LayerReplay(layer.replay.replays, _kind(layer))


def replay_layer(layer: "FusedGemma4TextDecoderLayer", replays: Replays) -> None:
    """Let a fused `layer` replay recordings of its kind.

    On the instance, so that it comes before the forward of every class, the checkpointing one around it included.
    """
    layer.replay = LayerReplay(replays, _kind(layer))
    layer.forward = types.MethodType(_replayed_forward, layer)


def _linears(layer):
    return [m for name, m in layer.named_modules() if name.endswith(("_proj", "per_layer_input_gate", "per_layer_projection"))]


def _inner_modules(layer):
    """Modules whose own forward the fused one does not call."""
    linears = _linears(layer)
    return [layer.self_attn, layer.mlp, *_norms(layer), *linears, *(m for linear in linears for m in inner_modules(linear))]


def _between_dtypes(hidden_states: torch.Tensor) -> bool:
    """Whether autocast would change the dtype of some operations: a stream in fp32, as from an embedding that trains."""
    kind = hidden_states.device.type
    between = torch.is_autocast_enabled(kind) and hidden_states.dtype != torch.get_autocast_dtype(kind)
    if between:
        stream, autocast = (str(dtype).removeprefix("torch.") for dtype in (hidden_states.dtype, torch.get_autocast_dtype(kind)))
        warn_once(logger, f"Decoder layers get {stream} under {autocast} autocast, and take their own operations instead of fused ones.")
    return between


def _norms(layer):
    return [m for m in layer.modules() if type(m).__name__ == "Gemma4RMSNorm"]


def _kind(layer) -> Kind:
    attention, bases = layer.self_attn, [base_of(linear) for linear in layer.linears]
    packed: list[Place] = []
    other: list[Place] = [(layer._buffers, "layer_scalar")]
    other += [(norm._parameters, "weight") for norm in _norms(layer) if norm._parameters.get("weight") is not None]
    states = []
    for base in bases:
        state = quant_state_of(base)
        (packed if state is not None else other).append((base._parameters, "weight"))
        if base.bias is not None:
            other.append((base._parameters, "bias"))
        if state is not None:
            other.append((vars(state), "absmax"))
            if state.nested:
                other += [(vars(state), "offset"), (vars(state.state2), "absmax")]
            states.append((state.quant_type, state.blocksize, state.nested, state.dtype, state.state2.blocksize if state.nested else None))
    constants = (
        attention.head_dim, attention.sliding_window, attention.is_kv_shared_layer, attention.store_full_length_kv,
        attention.scaling, layer.hidden_size_per_layer_input, tuple(states),
        tuple((tuple(owner[key].shape), owner[key].dtype) for owner, key in packed + other),
    )  # fmt: skip
    return Kind(packed, other, constants, *(types.MethodType(function, layer) for function in (_run, _adapters, _checkpoints)))


def _checkpoints(layer) -> bool:
    return layer.gradient_checkpointing


def _run(layer, x, ple, k, v, cos, sin, mask):
    shared = {} if k is None else {layer.self_attn.layer_type: (k, v)}
    out = layer.compute(x, ple, shared, (cos, sin), mask, {})
    return (out, *shared[layer.self_attn.layer_type]) if layer.self_attn.store_full_length_kv else (out,)


def _adapters(layer) -> tuple[list[Place], tuple] | None:
    places, numbers = [], []
    for linear in layer.linears:
        names = active_names(linear)
        numbers.append(len(names))
        for name in names:
            if drops_out(linear.lora_dropout[name]):
                return None
            numbers.append(linear.scaling[name])
            places += [(linear.lora_A[name]._parameters, "weight"), (linear.lora_B[name]._parameters, "weight")]
    trained = {owner[key].dtype for owner, key in places if owner[key].requires_grad}
    return (places, tuple(numbers)) if len(trained) <= 1 else None


def _replayed_forward(
    layer, hidden_states, per_layer_input=None, shared_kv_states=None, position_embeddings=None, attention_mask=None, **kwargs
):
    """What this layer computes, by replay where that can be, else by its own forward."""
    _keep_up(layer)
    attention = layer.self_attn
    plain = (
        hidden_states.device.type == layer.replay.replays.device.type
        and not any(isinstance(v, torch.Tensor) or k in CACHES for k, v in kwargs.items() if k != "position_ids" and v is not None)
        and attention.config._attn_implementation in RECORDED_ATTENTION
        and not (layer.training and attention.attention_dropout)
        and not torch.is_inference_mode_enabled()
        and not layer.stays_unfused
        and not hooked(layer.inner)
        and not _between_dtypes(hidden_states)
    )
    if plain:
        k, v = shared_kv_states[attention.layer_type] if attention.is_kv_shared_layer else (None, None)
        outputs = replay(layer.replay, hidden_states, per_layer_input, k, v, *position_embeddings, attention_mask)
        if outputs is not None:
            if attention.store_full_length_kv:
                shared_kv_states[attention.layer_type] = outputs[1:]
            return outputs[0]
    forward = partial(
        type(layer).forward, layer, shared_kv_states=shared_kv_states, position_embeddings=position_embeddings,
        attention_mask=attention_mask, **kwargs,
    )  # fmt: skip
    if CHECKPOINTS_CALL and layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
        # A cache would be filled a second time by the recomputation.
        forward = partial(layer._gradient_checkpointing_func, partial(forward, **{name: None for name in CACHES if name in kwargs}))
    return forward(hidden_states, per_layer_input)


class FusedGemma4TextDecoderLayer(Gemma4TextDecoderLayer):
    def __call__(self, *args, **kwargs):
        if CHECKPOINTS_CALL and "replay" in vars(self):
            # A replay keeps nothing that checkpointing would save. `_replayed_forward` checkpoints what is not replayed.
            return nn.Module.__call__(self, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(
        self, hidden_states, per_layer_input=None, shared_kv_states=None, position_embeddings=None, attention_mask=None, **kwargs
    ):
        _keep_up(self)
        cached = any(kwargs.get(name) is not None for name in CACHES)
        if cached or self.stays_unfused or hooked(self.inner) or _between_dtypes(hidden_states):
            return super().forward(
                hidden_states,
                per_layer_input,
                shared_kv_states=shared_kv_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        return self.compute(hidden_states, per_layer_input, shared_kv_states, position_embeddings, attention_mask, kwargs)

    def compute(self, hidden_states, per_layer_input, shared_kv_states, position_embeddings, attention_mask, kwargs):
        x, hidden_states = _norm(self.input_layernorm, hidden_states)
        x = self._attend(x, shared_kv_states, position_embeddings, attention_mask, kwargs)
        hidden_states = _add(self.post_attention_layernorm, hidden_states, self.joined_o(x))

        x, hidden_states = _norm(self.pre_feedforward_layernorm, hidden_states)
        x = self._feed_forward(x)
        with_ple = bool(self.hidden_size_per_layer_input)
        scale = self.layer_scalar
        hidden_states = _add(self.post_feedforward_layernorm, hidden_states, x, None if with_ple else scale)

        if with_ple:
            x = gated_gelu(self.joined_ple_gate(hidden_states), per_layer_input)
            hidden_states = _add(self.post_per_layer_input_norm, hidden_states, self.joined_ple_out(x), scale)
        return hidden_states

    def _feed_forward(self, x_BSI):
        """In tiles of a row's tokens where `tile_mlps` asks for them."""
        tile_size = getattr(self.mlp, "tile_size", 0) or x_BSI.shape[1]
        if x_BSI.shape[1] <= tile_size:
            return self._mlp(x_BSI)
        tiles = x_BSI.split(tile_size, dim=1)
        if torch.is_grad_enabled():
            # The state of random numbers cannot be read while a graph is recorded, and layers that drop out are not recorded.
            random = any(drops_out(module) for module in self.mlp.modules() if isinstance(module, nn.Dropout))
            return torch.cat([checkpoint(self._mlp, tile, use_reentrant=False, preserve_rng_state=random) for tile in tiles], dim=1)
        return torch.cat([self._mlp(tile) for tile in tiles], dim=1)

    def _mlp(self, x_BSI):
        return self.joined_down.gated(self.joined_gate_up(x_BSI))

    def _attend(self, x_BSI, shared_kv_states, position_embeddings, attention_mask, kwargs):
        attention = self.self_attn
        heads = (*x_BSI.shape[:-1], -1, attention.head_dim)
        cos, sin = position_embeddings
        q, *kv = self.joined_qkv(x_BSI).split(self.joined_qkv.sizes, dim=-1)
        q_BSHD = norm_rotary(q.view(heads), attention.q_norm.weight, attention.q_norm.eps, cos, sin)
        if attention.is_kv_shared_layer:
            k_BKSD, v_BKSD = shared_kv_states[attention.layer_type]
        else:
            k, v = kv[0].view(heads), kv[-1].view(heads)
            k_BKSD = norm_rotary(k, attention.k_norm.weight, attention.k_norm.eps, cos, sin).transpose(1, 2)
            v_BKSD = rms_norm(v, None, attention.v_norm.eps).transpose(1, 2)
        if attention.store_full_length_kv:
            shared_kv_states[attention.layer_type] = k_BKSD, v_BKSD
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_attention_forward)
        out, _ = attend(
            attention,
            q_BSHD.transpose(1, 2),
            k_BKSD,
            v_BKSD,
            attention_mask,
            dropout=attention.attention_dropout if self.training else 0.0,
            scaling=attention.scaling,
            sliding_window=attention.sliding_window,
            **kwargs,
        )
        return out.reshape(*x_BSI.shape[:-1], -1)


FusedGemma4TextDecoderLayer.__name__ = Gemma4TextDecoderLayer.__name__


def _norm(norm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rms_norm_and_residual(x, norm.weight, norm.eps)


def _add(norm, residual: torch.Tensor, x: torch.Tensor, scale=None) -> torch.Tensor:
    return add_rms_norm(residual, x, norm.weight, norm.eps, scale)
