"""The operations of a training step, each alone at the shapes of a Gemma 4 model, beside what they stand in for.

    python benchmarks/probe_kernels.py --model e2b --batch 4 [--only dequantize linear attention elementwise head] [--out probe.jsonl]

One JSON line a measurement, for one forward pass (`forward_ms`) and for forward and backward pass together (`ms`), replayed as a CUDA
graph, as training does. `error`: relative to fp32 arithmetic, of the output and of each gradient. Without a GPU shapes are tiny, times
those of the CPU: to see that it works. Candidates that were tried and rejected are in docs/performance_log.md.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import nn

from trl_fsdp_qlora.kernels import attention, dequantize, gated_gelu, norm_rotary, qlora_linear, rms_norm

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
RANK, SCALE, EPS = 16, 2.0, 1e-6
# hidden size, width of the MLP, query heads, key/value heads of windowed and of global layers, window
MODELS = {"e2b": (1536, 12288, 8, 1, 1, 512), "e4b": (2560, 10240, 8, 2, 2, 512), "31b": (5376, 21504, 32, 16, 4, 1024)}
TINY = (64, 128, 4, 2, 1, 16)
VOCABULARY = 262144 if CUDA else 512
LINES: list[dict] = []


def report(section: str, name: str, **numbers) -> None:
    LINES.append({"section": section, "name": name, **numbers})
    print(json.dumps(LINES[-1]), flush=True)


def milliseconds(function: Callable, repeats: int = 20) -> float:
    """Of one call, replayed as a CUDA graph."""
    function()
    if not CUDA:
        begin = time.perf_counter()
        function()
        return round(1000 * (time.perf_counter() - begin), 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / repeats, 4)


def measure(section: str, name: str, function: Callable, inputs: list, *, exact: list | None = None, gflop: float | None = None) -> list:
    """Time `function(*inputs)` without and with the gradients of those that want one. Returns output and gradients."""
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    try:
        with torch.no_grad():
            forward = milliseconds(lambda: function(*inputs))
        d_output = torch.randn(function(*inputs).shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
        both = milliseconds(lambda: torch.autograd.grad(function(*inputs), wanted, d_output)) if wanted else forward
        output = function(*inputs)
        found = [output.detach(), *(torch.autograd.grad(output, wanted, d_output) if wanted else [])]
    except RuntimeError as error:  # a candidate that does not run is a result
        report(section, name, failed=str(error).splitlines()[0][:200])
        return []
    extra = {} if gflop is None else {"forward_tflop_per_s": round(gflop / forward, 1)}
    if exact:
        errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, exact, strict=True)]
        extra["error"] = [float(f"{error:.1e}") for error in errors]
    report(section, name, forward_ms=forward, ms=both, **extra)
    return found


def random(*shape, grad: bool = True, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * std).to(DTYPE).requires_grad_(grad)


def in_fp32(function: Callable, inputs: list) -> list:
    """Output and gradients of a reference on fp32 copies of `inputs`, for the gradient that `measure` takes."""
    wide = [t.detach().float().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]
    output = function(*wide)
    d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = [t for t in wide if isinstance(t, torch.Tensor) and t.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, wanted, d_output)]


def packed_layer(inputs: int, outputs: int) -> nn.Module:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=DTYPE, quant_type="nf4", quant_storage=DTYPE).to(DEVICE)
    layer.weight.quant_state.dtype = DTYPE
    return layer


# --- one section each ---


def probe_dequantize(shape, tokens: int) -> None:
    hidden, mlp, *_ = shape
    layer = packed_layer(hidden, mlp)
    packed, state, out = layer.weight, layer.weight.quant_state, torch.empty(mlp, hidden, dtype=DTYPE, device=DEVICE)
    wider = torch.empty(mlp, hidden + 2 * RANK, dtype=DTYPE, device=DEVICE)[:, :hidden]
    for name, function in (("bitsandbytes", dequantize.dequantize_reference), ("own", dequantize.dequantize)):
        for kind, target in (("", out), (", rows apart", wider)):
            measure("dequantize", f"{name} {mlp} x {hidden}{kind}", lambda t, f=function: f(packed, state, t), [target])


def probe_linear(shape, tokens: int) -> None:
    hidden, mlp, heads, kv_heads, *_ = shape
    groups = {
        "q k v": (hidden, [256 * heads, 256 * kv_heads, 256 * kv_heads]),
        "o": (256 * heads, [hidden]),
        "gate up": (hidden, [mlp, mlp]),
        "down": (mlp, [hidden]),
    }
    usual = qlora_linear.WIDE
    for name, (inputs, outputs) in groups.items():
        group, slots, adapters = qlora_linear.LinearGroup([packed_layer(inputs, out) for out in outputs]), [], []
        for i, (columns, out) in enumerate(zip(group.columns, outputs, strict=True)):
            slots.append(qlora_linear.Slot(columns, slice(RANK * i, RANK * (i + 1)), SCALE))
            adapters += [torch.randn(RANK, inputs, device=DEVICE) * 0.02, torch.randn(out, RANK, device=DEVICE) * 0.02]
        arguments = [random(tokens, inputs, std=0.5), *(a.requires_grad_() for a in adapters)]
        exact = in_fp32(lambda x, *a, g=group, s=slots: qlora_linear.qlora_linear_reference(x, g, s, a), arguments)
        for kind, wide in (("after", 10**9), ("in products twice as wide", 2), ("in all products", 0)):
            qlora_linear.WIDE = wide
            measure(
                "linear",
                f"{name}, low-rank path {kind}",
                lambda x, *a, g=group, s=slots: qlora_linear.QLoRALinear.apply(x, None, g, s, *a),
                arguments,
                exact=exact,
                gflop=2 * tokens * inputs * sum(outputs) / 1e9,
            )
        qlora_linear.WIDE = usual


def probe_attention(shape, tokens: int, batch: int) -> None:
    *_, heads, kv_heads, global_kv_heads, window = shape
    length = tokens // batch
    for dim, keys, reach in ((256, kv_heads, window), (512, global_kv_heads, None)):
        inputs = [random(batch, length, heads, dim, std=2 * dim**-0.5), random(batch, length, keys, dim), random(batch, length, keys, dim)]
        name = f"{'window' if reach else 'full'}, {heads} heads of {dim}, {keys} of keys"
        exact = in_fp32(lambda q, k, v, r=reach: attention.attention_reference(q, k, v, 1.0, r), inputs) if tokens <= 2048 else None
        mask = attention.visible(0, length, 0, length, reach, None, DEVICE)[:, :, :, 0] if reach else None

        def sdpa(q, k, v, mask=mask):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=True)
            return out.transpose(1, 2)

        measure("attention", f"sdpa, {name}", sdpa, inputs, exact=exact)
        usual = attention.STRETCH, attention._MAX_SCORES
        for stretch, scores in ((128, 24), (256, 24), (512, 24), (512, 26), (1024, 26)):
            attention.STRETCH, attention._MAX_SCORES = stretch, 2**scores
            size = next(end - start for start, end, _ in attention.stretches(length, batch * heads, reach))
            own = f"own, {name}, {size} queries at a time (at most 2^{scores} scores)"
            measure("attention", own, lambda q, k, v, r=reach: attention.attention(q, k, v, 1.0, r), inputs, exact=exact)
        attention.STRETCH, attention._MAX_SCORES = usual


def probe_elementwise(shape, tokens: int) -> None:
    hidden, mlp, heads, *_ = shape
    x, residual, weight = random(1, tokens, hidden), random(1, tokens, hidden), random(hidden, grad=False)
    cases = {
        "norm": (rms_norm.rms_norm, rms_norm.rms_norm_reference, [x, weight, EPS]),
        "residual + norm": (rms_norm.add_rms_norm, rms_norm.add_rms_norm_reference, [residual, x, weight, EPS]),
        "gated gelu": (gated_gelu.gated_gelu, gated_gelu.gated_gelu_reference, [random(tokens, mlp), random(tokens, mlp)]),
    }
    for dim in (256, 512):
        q, cos, sin = random(1, tokens, heads, dim), random(1, tokens, dim, grad=False), random(1, tokens, dim, grad=False)
        arguments = [q, random(dim, grad=False), EPS, cos, sin]
        cases[f"norm and rotary, {dim} wide"] = (norm_rotary.norm_rotary, norm_rotary.norm_rotary_reference, arguments)
    for name, (own, reference, arguments) in cases.items():
        exact = in_fp32(reference, arguments)
        measure("elementwise", f"eager {name}", reference, arguments, exact=exact)
        measure("elementwise", f"own {name}", own, arguments, exact=exact)


def probe_head(shape, tokens: int) -> None:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden = shape[0]
    weight, targets = random(VOCABULARY, hidden, grad=False, std=hidden**-0.5), torch.randint(VOCABULARY, (tokens,), device=DEVICE)
    for chunk in (32768, 8192):
        for outputs in (("log_probs",), ("log_probs", "entropy", "is_top1")):

            def head(x, chunk=chunk, outputs=outputs):
                return ChunkedLogProbFunction.apply(x, weight, None, targets, 1.0, chunk, 30.0, 1.0, outputs)[0].to(DTYPE)

            name = f"TRL, {chunk} columns at a time, {'+'.join(outputs)}"
            measure("head", name, head, [random(tokens, hidden)], gflop=2 * tokens * hidden * VOCABULARY / 1e9)


SECTIONS = {
    "dequantize": probe_dequantize,
    "linear": probe_linear,
    "attention": probe_attention,
    "elementwise": probe_elementwise,
    "head": probe_head,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="e2b", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048 if CUDA else 64)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--out", default=None, help="file for the lines")
    args = parser.parse_args()
    torch.manual_seed(0)
    if CUDA:
        torch.backends.cuda.matmul.allow_tf32 = False  # references in fp32
    shape = MODELS[args.model] if CUDA else TINY
    gpu = torch.cuda.get_device_name() if CUDA else "cpu"
    report("about", args.model, batch=args.batch, length=args.length, gpu=gpu, torch=torch.__version__)
    for section in args.only:
        extra = [args.batch] if section == "attention" else []
        SECTIONS[section](shape, args.batch * args.length, *extra)
        if CUDA:
            torch.cuda.empty_cache()
    if args.out:
        with open(args.out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in LINES)


if __name__ == "__main__":
    main()
