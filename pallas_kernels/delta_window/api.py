"""Gated delta windows, as the decoder calls them.

One implementation exists, the reference, and it runs on every platform; a kernel for an
accelerator is chosen here, when the call is lowered, once there is one.
"""

from __future__ import annotations

from pallas_kernels.delta_window.reference import (
    Records,
    delta_commit,
    delta_fold,
    delta_step,
    delta_window,
    take_rows,
)

__all__ = [
    "Records",
    "delta_commit",
    "delta_fold",
    "delta_step",
    "delta_window",
    "take_rows",
]
