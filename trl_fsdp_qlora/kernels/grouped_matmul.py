"""Rows that are sorted by group, each group times a matrix of its own: what a layer of experts is made of."""

import torch


def grouped_matmul_reference(x: torch.Tensor, matrices: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """One product a group. See `grouped_matmul`."""
    starts = [0, *ends[:-1]]
    # Unbound at once: the backward pass of single selections would add up a gradient of full size for each.
    parts = [x[start:end] @ matrix for start, end, matrix in zip(starts, ends, matrices.unbind(), strict=True) if end > start]
    return torch.cat(parts) if parts else x.new_zeros(0, matrices.shape[-1])


def grouped_matmul(x: torch.Tensor, matrices: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """`x[ends[g - 1] : ends[g]] @ matrices[g]` for every group g, one below the other. Differentiable.

    Args:
        x: (rows, inner).
        matrices: (groups, inner, outer), in any stride order.
        ends: where each group of rows ends; the last one is `rows`.

    Returns:
        (rows, outer).
    """
    if not _one_launch_can(x, matrices):
        return grouped_matmul_reference(x, matrices, ends)
    return torch.nn.functional.grouped_mm(x, matrices, offs=torch.tensor(ends, dtype=torch.int32, device=x.device))


def _one_launch_can(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether torch has one launch for it: bf16, on cards from Ampere on, every row a multiple of 16 bytes."""
    return (
        x.device.type == "cuda"
        and x.dtype == matrices.dtype == torch.bfloat16
        and x.shape[0] > 0
        and hasattr(torch.nn.functional, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and not any(size % 8 for size in matrices.shape[1:])
    )
