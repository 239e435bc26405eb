"""Fused operations of a QLoRA step: one operation a file, each beside its plain PyTorch reference.

Every operation runs its reference on the CPU (and wherever Triton is missing) and its kernel on a GPU; the two agree
to the rounding of the dtype. `fusing.apply_fused_layers` puts them into a model.
"""
