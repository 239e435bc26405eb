"""What a person looks at after a GRPO run: a picture of the curves."""

import resource

import torch

from .curves import plot_points, points_of, save_picture
from .logging import get_logger

logger = get_logger(__name__)

PANELS = {
    "reward": (("reward", "training"), ("eval_reward", "held out")),
    "completion length (tokens)": (("completions/mean_length", "mean"), ("completions/max_length", "longest")),
    "log-probability gap": (("logprob_gap/mean", "mean"), ("logprob_gap/max", "largest")),
    "KL to the reference": (("kl", None),),
    "entropy": (("entropy", None),),
    "adapter sync (ms)": (("adapter_sync/ms", None),),
    "adapter sync (MB)": (("adapter_sync/megabytes", None),),
    "peak memory (GiB)": (("memory/peak_gib", None),),
}
LOGARITHMIC = {"log-probability gap"}


def draw_curves(log_history: list[dict], path: str, title: str = "") -> str | None:
    """Draw what was logged of `PANELS` over steps into a PNG file. `None` if nothing was, or matplotlib is missing."""
    points = {key: points_of(log_history, key) for curves in PANELS.values() for key, _ in curves}
    panels = {name: curves for name, curves in PANELS.items() if any(points[key] for key, _ in curves)}
    if not panels:
        return None
    try:
        import matplotlib
    except ImportError:
        logger.info("No picture of the curves, because matplotlib is not installed (`pip install 'trl-fsdp-qlora[demo]'`).")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.4 * columns, 3.3 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (name, curves) in zip(axes.flat, panels.items(), strict=False):
        for key, label in curves:
            if points[key]:
                plot_points(axis, points[key], label)
        if name in LOGARITHMIC and all(value > 0 for key, _ in curves for _, value in points[key]):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if len(curves) > 1:
            axis.legend()
    figure.suptitle(title)
    save_picture(figure, path)
    plt.close(figure)
    return path


def peak_memory(device: torch.device) -> float:
    """The most memory in use so far, in GiB: of the accelerator, a colocated engine included; on the CPU, of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
