"""Window attention, as the decoder calls it.

One implementation exists, the reference, and it runs on every platform; a kernel for an
accelerator is chosen here, when the call is lowered, once there is one.
"""

from __future__ import annotations

from pallas_kernels.window_attention.by_row import window_attention_by_row
from pallas_kernels.window_attention.reference import window_attention

__all__ = ["window_attention", "window_attention_by_row"]
