"""Candidates for a faster QLoRA step, each measured alone at the shapes of Gemma 4 E2B, then whole training steps.

    python benchmarks/probe_kernels.py CHECKPOINT --out probe.jsonl [--only dequantize linear attention elementwise head compile step]

One JSON line a measurement. `ms`: forward and backward by device events, launch gaps included. `cpu_ms`: until the host
has issued it all. `busy_ms`, `launches`: kernels only, by the profiler. `error`: relative to fp32 arithmetic.
"""

import argparse
import json
import statistics
import time
import traceback

import torch
from torch import nn

from trl_fsdp_qlora.kernels import attention as own_attention
from trl_fsdp_qlora.kernels import dequantize as own_dequantize
from trl_fsdp_qlora.kernels import gated_gelu as own_gelu
from trl_fsdp_qlora.kernels import norm_rotary as own_rotary
from trl_fsdp_qlora.kernels import rms_norm as own_norm
from trl_fsdp_qlora.kernels.joined_layers import JoinedLayers, active_adapters

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BF16 = torch.bfloat16
LENGTH, HIDDEN, HEADS, WINDOW, VOCABULARY = (2048, 1536, 8, 512, 262144) if CUDA else (64, 64, 4, 16, 512)
WIDE = 12288 if CUDA else 128
RESULTS: list[dict] = []


def report(section: str, name: str, **numbers) -> None:
    line = {"section": section, "name": name, **{k: round(v, 5) if isinstance(v, float) else v for k, v in numbers.items()}}
    RESULTS.append(line)
    print(json.dumps(line), flush=True)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def kernels_of(run) -> dict:
    """Busy time and number of kernels of one call."""
    if not CUDA:
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return summed(profiler)


def summed(profiler) -> dict:
    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in on_device if not getattr(e, "is_user_annotation", False) and "#" not in e.name]
    return {"busy_ms": sum(e.device_time for e in kernels) / 1000, "launches": len(kernels)}


def measure(section: str, name: str, run, repeats: int = 20, profile: bool = True, **extra) -> None:
    """Time `run`, or report why it fails."""
    try:
        begin = time.perf_counter()
        run()
        synchronize()
        first = time.perf_counter() - begin
        for _ in range(2):
            run()
        synchronize()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            cpu = (time.perf_counter() - begin) / repeats * 1000
            torch.cuda.synchronize()
            extra |= {"ms": start.elapsed_time(end) / repeats, "cpu_ms": cpu}
            extra |= {"extra_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
        report(section, name, first_s=first, **extra, **(kernels_of(run) if profile else {}))
    except Exception as error:  # a candidate that does not run is a result
        report(section, name, failed=f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}")


def error_of(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def random(*shape, grad: bool = True, dtype=BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


def backward_of(function, *inputs):
    """A call that runs `function` and its gradients for a fixed random output gradient."""
    gradient = torch.randn_like(function(*inputs).detach())
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]

    def run():
        return torch.autograd.grad(function(*inputs), wanted, gradient)

    return run, gradient


# --- one section each ---


def probe_ceilings() -> None:
    size = 8192 if CUDA else 64
    a, b = random(size, size, grad=False), random(size, size, grad=False)
    measure("ceilings", f"matmul {size}, {2 * size**3 / 1e12:.3f} TFLOP", lambda: a @ b, profile=False)
    source = torch.empty(2**30 if CUDA else 2**10, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    measure("ceilings", "copy 1 GiB", lambda: target.copy_(source), profile=False)
    for shape in ((HIDDEN, 2048), (2048, HIDDEN), (HIDDEN, 2 * WIDE), (WIDE, HIDDEN)):
        x, w = random(LENGTH, shape[0], grad=False), random(shape[1], shape[0], grad=False)
        gflop = 2 * LENGTH * shape[0] * shape[1] / 1e9
        measure("ceilings", f"matmul {LENGTH} x {shape[0]} x {shape[1]}", lambda x=x, w=w: x @ w.t(), gflop=gflop)
    x, a = random(LENGTH, HIDDEN, grad=False), random(48, HIDDEN, grad=False)
    measure("ceilings", "skinny: x A'", lambda: x @ a.t())
    u, dy = random(LENGTH, 16, grad=False), random(LENGTH, WIDE, grad=False)
    measure("ceilings", "skinny: dy' u", lambda: dy.t() @ u)
    if CUDA:
        measure("ceilings", "skinny: dy' u in fp32", lambda: torch.mm(dy.t(), u, out_dtype=torch.float32))
    y, b = random(LENGTH, WIDE, grad=False), random(WIDE, 16, grad=False)
    measure("ceilings", "skinny: y += u B'", lambda: y.addmm_(u, b.t()))


def probe_dequantize() -> None:
    from bitsandbytes.functional import quantize_4bit

    for rows, columns in ((2048, HIDDEN), (WIDE, HIDDEN)):
        weight = random(rows, columns, grad=False)
        for nested in (True, False):
            packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested, quant_storage=BF16)
            out, reference = torch.empty_like(weight), torch.empty_like(weight)
            own_dequantize.dequantize_reference(packed, state, reference)
            own_dequantize.dequantize(packed, state, out)
            name = f"{rows} x {columns}, double quantisation {nested}"
            measure("dequantize", f"bitsandbytes {name}", lambda p=packed, s=state, o=out: own_dequantize.dequantize_reference(p, s, o))
            same = torch.equal(out, reference)
            measure("dequantize", f"own {name}", lambda p=packed, s=state, o=out: own_dequantize.dequantize(p, s, o), same=same)


def quantized_lora(inputs: int, outputs: int):
    """A PEFT LoRA layer on a 4-bit layer, as PEFT makes it, adapters in fp32."""
    import bitsandbytes as bnb
    from peft import LoraConfig
    from peft.tuners.lora.bnb import Linear4bit

    base = bnb.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=BF16, quant_type="nf4", quant_storage=BF16)
    base = base.to(DEVICE)
    layer = Linear4bit(base, "default", LoraConfig(r=16, lora_alpha=32), r=16, lora_alpha=32).to(DEVICE)
    nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return layer


def probe_linear() -> None:
    shapes = {
        "q": (HIDDEN, [2048]),
        "q of a global layer": (HIDDEN, [4096]),
        "q k v": (HIDDEN, [2048, 256, 256]),
        "o": (2048, [HIDDEN]),
        "gate up": (HIDDEN, [WIDE, WIDE]),
        "down": (WIDE, [HIDDEN]),
    }
    for name, (inputs, outputs) in shapes.items():
        layers = [quantized_lora(inputs, out) for out in outputs]
        adapters = [t for layer in layers for t in active_adapters(layer)[0][:2]]
        joined = JoinedLayers(layers)
        x = random(1, LENGTH, inputs)

        def stock(x, *_, layers=layers):
            with torch.autocast(DEVICE, BF16):
                return torch.cat([layer(x) for layer in layers], dim=-1) if len(layers) > 1 else layers[0](x)

        def fused(x, *_, joined=joined):
            return joined(x)

        run_stock, dy = backward_of(stock, x, *adapters)
        gflop = 4 * LENGTH * inputs * sum(outputs) / 1e9
        measure("linear", f"stock {name}", run_stock, gflop=gflop)

        def run_fused(fused=fused, x=x, adapters=adapters, dy=dy):
            return torch.autograd.grad(fused(x), [x, *adapters], dy)

        exact = exact_linear(layers, x, dy)
        errors = {}
        for kind, function, run in (("stock", stock, run_stock), ("own", fused, run_fused)):
            grads = run()
            got = [function(x), grads[0], *grads[1:3]]
            errors[kind] = [float(f"{error_of(g, e):.2e}") for g, e in zip(got, exact, strict=True)]
        measure("linear", f"own {name}", run_fused, gflop=gflop, errors_y_dx_da_db=errors)


def exact_linear(layers, x, dy):
    """Output and gradients (of x, and of the first A and B) in fp32 arithmetic."""
    if CUDA:
        torch.backends.cuda.matmul.allow_tf32 = False
    wide = x.detach().float().requires_grad_()
    outputs, leaves = [], []
    for layer in layers:
        a, b, scale, _ = active_adapters(layer)[0]
        base = layer.get_base_layer()
        weight = torch.empty(base.out_features, base.in_features, dtype=base.quant_state.dtype, device=x.device)
        weight = own_dequantize.dequantize_reference(base.weight, base.quant_state, weight).float()
        a, b = (t.detach().float().requires_grad_() for t in (a, b))
        leaves += [a, b]
        outputs.append(wide @ weight.t() + (wide @ a.t()) @ b.t() * scale)
    y = torch.cat(outputs, dim=-1)
    return [y.detach(), *torch.autograd.grad(y, [wide, leaves[0], leaves[1]], dy.float())]


def probe_attention() -> None:
    for dim, window, length in ((256, WINDOW, LENGTH), (512, None, LENGTH), (256, WINDOW, 4 * LENGTH), (512, None, 4 * LENGTH)):
        long = length > LENGTH
        q, k, v = random(1, length, HEADS, dim), random(1, length, 1, dim), random(1, length, 1, dim)
        q.data *= dim**-0.5 * 2
        name = f"{'window' if window else 'full'} D {dim} S {length}"
        run_own, dy = backward_of(lambda q, k, v, w=window: own_attention.attention(q, k, v, 1.0, w), q, k, v)
        mask = own_attention.visible(0, length, 0, length, window, None, DEVICE)[:, :, :, 0]

        def sdpa(q, k, v, mask=mask if window else None):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            k, v = (t.expand(-1, HEADS, -1, -1).reshape(q.shape) for t in (k, v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0)
            return out.transpose(1, 2).contiguous()

        def run_sdpa(q=q, k=k, v=v, dy=dy, sdpa=sdpa):
            return torch.autograd.grad(sdpa(q, k, v), [q, k, v], dy)

        errors = {}
        if not long:
            exact_in = [t.detach().float().requires_grad_() for t in (q, k, v)]
            exact = own_attention.attention_reference(*exact_in, 1.0, window)
            exact = [exact.detach(), *torch.autograd.grad(exact, exact_in, dy.float())]
            for kind, function, run in (
                ("sdpa", sdpa, run_sdpa),
                ("own", lambda q, k, v, w=window: own_attention.attention(q, k, v, 1.0, w), run_own),
            ):
                got = [function(q, k, v), *run()]
                errors[kind] = [float(f"{error_of(g, e):.2e}") for g, e in zip(got, exact, strict=True)]
            del exact, exact_in
        measure("attention", f"sdpa {name}", run_sdpa)
        measure("attention", f"own {name}", run_own, errors_o_dq_dk_dv=errors)
        for size in (256, 1024):
            own_attention.STRETCH = size
            measure("attention", f"own, {size} queries at a time {name}", run_own)
        own_attention.STRETCH = 512
        with torch.no_grad():
            measure("attention", f"sdpa forward {name}", lambda q=q, k=k, v=v, sdpa=sdpa: sdpa(q, k, v))
            measure("attention", f"own forward {name}", lambda q=q, k=k, v=v, w=window: own_attention.attention(q, k, v, 1.0, w))
        if CUDA and not long:
            probe_flex(name, q, k, v, dy, dim, window)


def probe_flex(name, q, k, v, dy, dim, window) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def rule(batch, head, query, key):
        seen = query >= key
        return seen & (query - key < window) if window else seen

    mask = create_block_mask(rule, None, None, q.shape[1], q.shape[1], device=DEVICE)
    small = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32, "num_stages": 1, "num_warps": 4}
    options = {"default": None, "small": small}
    if dim == 512:
        options |= {"small, 8 warps": {**small, "num_warps": 8}, "16": {**small, "BLOCK_M1": 16, "BLOCK_N2": 16}}
    for label, kernel_options in options.items():
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)

        def flex(q, k, v, compiled=compiled, kernel_options=kernel_options):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = compiled(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True, kernel_options=kernel_options)
            return out.transpose(1, 2).contiguous()

        measure("attention", f"flex {label} {name}", lambda flex=flex: torch.autograd.grad(flex(q, k, v), [q, k, v], dy))


def probe_elementwise() -> None:
    x, residual, weight = random(1, LENGTH, HIDDEN), random(1, LENGTH, HIDDEN), random(HIDDEN, grad=False)
    scale = torch.ones(1, device=DEVICE, dtype=BF16)
    gate_up = random(LENGTH, 2 * WIDE)
    ple_gate, ple = random(1, LENGTH, 256), random(1, LENGTH, 35, 256)
    cases = {
        "norm": (own_norm.rms_norm, own_norm.rms_norm_reference, (x, weight, 1e-6)),
        "residual + norm, scaled": (own_norm.add_rms_norm, own_norm.add_rms_norm_reference, (residual, x, weight, 1e-6, scale)),
        "gated gelu": (own_gelu.split_gated_gelu, lambda t: own_gelu.gated_gelu_reference(*t.chunk(2, dim=-1)), (gate_up,)),
        "gated gelu, per layer": (
            lambda gate, up: own_gelu.gated_gelu(gate, up[:, :, 3]),
            lambda gate, up: own_gelu.gated_gelu_reference(gate, up[:, :, 3]),
            (ple_gate, ple.detach()),
        ),
    }
    for dim in (256, 512):
        q, cos, sin = random(1, LENGTH, HEADS, dim), random(1, LENGTH, dim, grad=False), random(1, LENGTH, dim, grad=False)
        arguments = (q, random(dim, grad=False), 1e-6, cos, sin)
        cases[f"norm and rotary, D {dim}"] = (own_rotary.norm_rotary, own_rotary.norm_rotary_reference, arguments)
    for name, (own, reference, arguments) in cases.items():
        run_reference, dy = backward_of(reference, *arguments)
        measure("elementwise", f"eager {name}", run_reference)
        wanted = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
        same = torch.equal(own(*arguments), reference(*arguments))

        def run_own(own=own, arguments=arguments, wanted=wanted, dy=dy):
            return torch.autograd.grad(own(*arguments), wanted, dy)

        grads = [float(f"{error_of(a, b):.2e}") for a, b in zip(run_own(), run_reference(), strict=True)]
        measure("elementwise", f"own {name}", run_own, same=same, grads=grads)
        if CUDA:
            torch._dynamo.reset()
            compiled = torch.compile(reference, dynamic=False)
            measure("elementwise", f"compiled {name}", lambda c=compiled, a=arguments, w=wanted, d=dy: torch.autograd.grad(c(*a), w, d))
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        report("elementwise", "liger", failed="not installed")
        return
    run, _ = backward_of(lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "gemma", False), x, weight)
    measure("elementwise", "liger norm", run)
    gate, up = random(LENGTH, WIDE), random(LENGTH, WIDE)
    run, _ = backward_of(lambda a, b: LigerGELUMulFunction.apply(a, b), gate, up)
    measure("elementwise", "liger gated gelu", run)


def probe_head() -> None:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden, weight = random(LENGTH, HIDDEN), random(VOCABULARY, HIDDEN, grad=False)
    weight.data *= HIDDEN**-0.5
    targets = torch.randint(VOCABULARY, (LENGTH,), device=DEVICE)
    for chunk in (32768, 8192, 4096):
        for outputs in (("log_probs",), ("log_probs", "entropy", "is_top1")):

            def head(hidden, chunk=chunk, outputs=outputs):
                return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, chunk, 30.0, 1.0, outputs)[0]

            run, _ = backward_of(head, hidden)
            gflop = 6 * LENGTH * HIDDEN * VOCABULARY / 1e9
            measure("head", f"TRL, {chunk} columns at a time, {'+'.join(outputs)}", run, repeats=5, gflop=gflop)


GROUPS: list[JoinedLayers] = []


def compiled_linear():
    """`QLoRALinear` as an opaque operator of a compiled graph; groups are numbers in `GROUPS`."""
    from trl_fsdp_qlora.kernels.qlora_linear import QLoRALinear, Slot

    def slots_of(number: int) -> list[Slot]:
        group, slots, rank = GROUPS[number], [], 0
        for layer, columns in zip(group.layers, group.group.columns, strict=True):
            for a, _, scale, _ in active_adapters(layer):
                slots.append(Slot(columns, slice(rank, rank + a.shape[0]), scale))
                rank += a.shape[0]
        return slots

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    @torch.library.custom_op("probe::qlora", mutates_args=())
    def qlora(x: torch.Tensor, adapters: list[torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = Context()
        y = QLoRALinear.forward(ctx, x, None, GROUPS[number].group, slots_of(number), *adapters)
        return y, ctx.saved_tensors[1]

    @qlora.register_fake
    def _(x, adapters, number):
        return x.new_empty(x.shape[0], sum(GROUPS[number].sizes)), x.new_empty(x.shape[0], sum(a.shape[0] for a in adapters[::2]))

    @torch.library.custom_op("probe::qlora_backward", mutates_args=())
    def qlora_backward(dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor, adapters: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        ctx = Context()
        ctx.group, ctx.slots, ctx.has_own_low = GROUPS[number].group, slots_of(number), False
        ctx.needs_input_grad = (True, False)
        ctx.saved_tensors = (x, u, *adapters)
        grads = QLoRALinear.backward(ctx, dy)
        return [grads[0], *(g.clone() for g in grads[4:])]

    @qlora_backward.register_fake
    def _(dy, x, u, adapters, number):
        return [torch.empty_like(x), *(torch.empty_like(a) for a in adapters)]

    def setup(ctx, inputs, output):
        x, adapters, ctx.number = inputs
        ctx.save_for_backward(x, output[1], *adapters)

    def backward(ctx, dy, _):
        x, u, *adapters = ctx.saved_tensors
        dx, *grads = torch.ops.probe.qlora_backward(dy.contiguous(), x, u, adapters, ctx.number)
        return dx, grads, None

    qlora.register_autograd(backward, setup_context=setup)
    return lambda x, adapters, number: torch.ops.probe.qlora(x, adapters, number)[0]


def probe_compile() -> None:
    """One wide sliding layer that shares its keys and values: own kernels in eager mode, or a compiled graph."""
    shapes = {"q": (HIDDEN, [HEADS * 256]), "o": (HEADS * 256, [HIDDEN]), "gate up": (HIDDEN, [WIDE, WIDE]), "down": (WIDE, [HIDDEN])}
    GROUPS[:] = [JoinedLayers([quantized_lora(i, o) for o in outs]) for i, outs in shapes.values()]
    adapters = [[t for layer in group.layers for t in active_adapters(layer)[0][:2]] for group in GROUPS]
    weights = [random(HIDDEN, grad=False) for _ in range(4)]
    q_weight = random(256, grad=False)
    cos, sin = random(1, LENGTH, 256, grad=False), random(1, LENGTH, 256, grad=False)
    k, v = random(1, LENGTH, 1, 256), random(1, LENGTH, 1, 256)
    h = random(LENGTH, HIDDEN)
    linear = compiled_linear()

    def layer(h, k, v, norm, add_norm, rotary, gelu, product, attend):
        q = rotary(product(norm(h, weights[0], 1e-6), 0).view(1, LENGTH, HEADS, 256), q_weight, 1e-6, cos, sin)
        out = attend(q, k, v).view(LENGTH, -1)
        h = add_norm(h, product(out, 1), weights[1], 1e-6)
        x = gelu(product(norm(h, weights[2], 1e-6), 2))
        return add_norm(h, product(x, 3), weights[3], 1e-6)

    def own_attend(q, k, v):
        return own_attention.attention(q, k, v, 1.0, WINDOW)

    mask = own_attention.visible(0, LENGTH, 0, LENGTH, WINDOW, None, DEVICE)[:, :, :, 0]

    def sdpa(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.expand(-1, HEADS, -1, -1) for t in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2).contiguous()

    def own(h, k, v, attend=own_attend):
        return layer(
            h, k, v, own_norm.rms_norm, own_norm.add_rms_norm, own_rotary.norm_rotary, own_gelu.split_gated_gelu,
            lambda x, i: GROUPS[i](x), attend,
        )  # fmt: skip

    def graph(h, k, v):
        return layer(
            h, k, v, own_norm.rms_norm_reference, own_norm.add_rms_norm_reference, own_rotary.norm_rotary_reference,
            lambda t: own_gelu.gated_gelu_reference(*t.chunk(2, dim=-1)), lambda x, i: linear(x, adapters[i], i), sdpa,
        )  # fmt: skip

    leaves = [h, k, v, *(t for group in adapters for t in group)]
    dy = torch.randn_like(h)
    gflop = 4 * LENGTH * HIDDEN * (2 * HEADS * 256 + 3 * WIDE) / 1e9
    for name, function in (("own, own attention", own), ("own, sdpa", lambda h, k, v: own(h, k, v, sdpa)), ("uncompiled graph", graph)):
        measure("layer", name, lambda f=function: torch.autograd.grad(f(h, k, v), leaves, dy), gflop=gflop)
    torch._dynamo.reset()
    compiled = torch.compile(graph, dynamic=False, fullgraph=True)
    measure("layer", "compiled graph", lambda: torch.autograd.grad(compiled(h, k, v), leaves, dy), gflop=gflop)
    if not CUDA:
        return
    probe_graph_replay(lambda: torch.autograd.grad(own(h, k, v), leaves, dy))


def probe_graph_replay(run) -> None:
    """The same work as a replayed CUDA graph: what is left when launching costs nothing."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        measure("layer", "own, own attention, CUDA graph replay", graph.replay, profile=False)
    except Exception as error:
        report("layer", "CUDA graph", failed=f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")


def probe_step(checkpoint: str, steps: int) -> None:
    """Whole training steps of this project's trainer, one variant after the other on the same data and first adapters."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl_fsdp_qlora import QLoRASFTConfig, QLoRASFTTrainer
    from trl_fsdp_qlora.kernels.fusing import apply_fused_layers
    from trl_fsdp_qlora.kernels.gemma4 import FusedGemma4TextDecoderLayer, replay_layer
    from trl_fsdp_qlora.kernels.graph_pool import Replays

    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(6, VOCABULARY, (steps, LENGTH), generator=generator).tolist()
    begin = time.perf_counter()
    config = QLoRASFTConfig(
        "/tmp/probe", max_steps=steps, per_device_train_batch_size=1, max_length=LENGTH, learning_rate=1e-4, lr_scheduler_type="constant",
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, bf16=True, use_cpu=not CUDA,
        optim="adamw_torch_fused" if CUDA else "adamw_torch", lora_target_modules=projections, shuffle_dataset=False,
    )  # fmt: skip
    if hasattr(config, "fused"):
        config.fused = False
    trainer = QLoRASFTTrainer(checkpoint, config, train_dataset=Dataset.from_dict({"input_ids": rows}))
    report("step", "load", seconds=time.perf_counter() - begin)
    first = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    layer = next(m for m in trainer.model.modules() if type(m).__name__ == "Gemma4TextDecoderLayer")
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append([t.requires_grad for t in inputs]))

    class Clock(TrainerCallback):
        def __init__(self):
            self.times, self.issue, self.profiler, self.kernels = [], [], None, {}

        def on_step_begin(self, args, state, control, **_):
            synchronize()
            if state.global_step == 3 and CUDA:
                torch.cuda.reset_peak_memory_stats()
            if state.global_step == steps - 1 and CUDA:
                activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
                self.profiler = torch.profiler.profile(activities=activities).__enter__()
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            self.issue.append(time.perf_counter() - self.start)
            synchronize()
            self.times.append(time.perf_counter() - self.start)
            if self.profiler is not None:
                self.profiler.__exit__(None, None, None)

    def train(name: str, table: bool = False) -> None:
        for parameter_name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(first[parameter_name])
                parameter.grad = None
        trainer.optimizer = trainer.lr_scheduler = None
        clock = Clock()
        trainer.add_callback(clock)
        logged = len(trainer.state.log_history)
        try:
            torch.manual_seed(0)
            trainer.train()
        except Exception:
            traceback.print_exc()
            report("step", name, failed=traceback.format_exc().splitlines()[-1][:300])
            return
        finally:
            trainer.remove_callback(clock)
        history = [e for e in trainer.state.log_history[logged if len(trainer.state.log_history) > logged else 0 :] if "loss" in e]
        step = statistics.median(clock.times[3:-1] or clock.times)
        issue = statistics.median(clock.issue[3:-1] or clock.issue)
        numbers = {"step_ms": step * 1000, "issue_ms": issue * 1000, "first_s": clock.times[0]}
        numbers |= {"tokens_per_second": round(LENGTH / step), "loss": [round(e["loss"], 4) for e in history]}
        numbers |= {"grad_norm": [round(float(e["grad_norm"]), 4) for e in history]}
        if CUDA:
            numbers |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "reserved_gib": torch.cuda.max_memory_reserved() / 2**30}
            numbers |= summed(clock.profiler)
        report("step", name, **numbers)
        if table and CUDA:
            averages = clock.profiler.key_averages()
            print(averages.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90), flush=True)
            print(averages.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60), flush=True)

    train("plain")
    hook.remove()
    report("step", "inputs of the first layer require gradients", seen=seen[0])
    device = trainer.args.device
    report("step", apply_fused_layers(trainer.model, device, attention=False, replay=False))
    train("fused, sdpa")
    text_config = trainer.model.get_base_model().config.get_text_config()
    from trl_fsdp_qlora.kernels.attention_interface import register

    text_config._attn_implementation = register()
    train("fused, own attention", table=True)
    # The deprecated `gradient_checkpointing` no longer counts once the arguments are made.
    trainer.args.activation_checkpointing = trainer.args.gradient_checkpointing = False
    trainer.model.get_base_model().activation_checkpointing_disable()
    train("fused, own attention, no checkpointing")
    replays = Replays(device)
    for layer in trainer.model.modules():
        if isinstance(layer, FusedGemma4TextDecoderLayer):
            replay_layer(layer, replays)
    train("fused, own attention, replayed", table=True)


SECTIONS = {
    "ceilings": probe_ceilings,
    "dequantize": probe_dequantize,
    "linear": probe_linear,
    "head": probe_head,
    "compile": probe_compile,
    "attention": probe_attention,
    "elementwise": probe_elementwise,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", default=None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=["step", *SECTIONS], choices=["step", *SECTIONS])
    args = parser.parse_args()
    torch.manual_seed(0)
    for section in args.only:
        begin = time.perf_counter()
        try:
            probe_step(args.checkpoint, args.steps) if section == "step" else SECTIONS[section]()
        except Exception:
            traceback.print_exc()
            report(section, "section", failed=traceback.format_exc().splitlines()[-1][:300])
        if CUDA:
            torch.cuda.empty_cache()
        report(section, "section done", seconds=time.perf_counter() - begin)
        if args.out:
            with open(args.out, "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in RESULTS)


if __name__ == "__main__":
    main()
