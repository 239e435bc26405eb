"""What a trainer does on a GPU, on the CPU: fused layers from their PyTorch references, and stand-ins for CUDA graphs."""

from contextlib import contextmanager
from unittest.mock import patch

from trl_fsdp_qlora.kernels import fusing, graph_pool


class RunAgain:
    def __init__(self, function):
        self.replay = function


class OnCpu(graph_pool.Replays):
    """Recordings that run their function again, on the same fixed tensors."""

    def warm_up(self, function):
        return function()

    def record(self, function, kept=False):
        return RunAgain(function)


@contextmanager
def fused_on_cpu(*, replayed: bool = True):
    """Trainers made inside fuse their layers; with `replayed`, layers replay recordings as well."""
    with patch.object(fusing, "what_is_missing", lambda device: None), patch.object(graph_pool, "Replays", OnCpu):
        if replayed:
            yield
        else:
            with patch.object(fusing, "_replay", lambda *args: None):
                yield

