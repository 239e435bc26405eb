"""What pictures of a run's log share."""

import math
import os


def points_of(log_history: list[dict], key: str) -> list[tuple[int, float]]:
    """(step, value) of every finite value that was logged under `key`."""
    points = [(entry["step"], float(entry[key])) for entry in log_history if entry.get(key) is not None]
    return [(step, value) for step, value in points if math.isfinite(value)]


def plot_points(axis, points: list[tuple[int, float]], label: str | None, dots: bool = False) -> None:
    """A curve, with dots where there are few points."""
    axis.plot(*zip(*points, strict=True), label=label, marker="o" if dots or len(points) < 30 else None, markersize=4)


def save_picture(figure, path: str) -> str:
    """Write `figure` to `path`, whole or not at all."""
    figure.tight_layout()
    temporary = f"{path}.tmp"
    figure.savefig(temporary, dpi=110, format="png")
    os.replace(temporary, path)
    return path
