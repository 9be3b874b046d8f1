"""What kernels for NVIDIA's Hopper (sm_90: H100, H200) count on."""

from __future__ import annotations

from pallas_kernels import compat

CAPABILITY = "9.0"
"""Newer GPUs have other matrix units, and cannot run programs for these."""

KINDS = ("H100", "H200", "H800", "H20")
"""Parts of their names, where a name is all that is known."""

SHARED_BYTES = 227 << 10
"""Of shared memory, that one block of threads may have."""

MULTIPROCESSORS = 132
"""Of an H100 or H200. A wrong guess costs speed, and never a result."""


def absent() -> str | None:
    """Why no kernel for Hopper runs here; ``None``: this is one, or there is no GPU."""
    device = compat.device_at_hand()
    if device.platform not in ("gpu", "cuda"):
        return None
    kind, capability = device.device_kind, getattr(device, "compute_capability", None)
    by_name = capability is None and any(name in kind for name in KINDS)
    if by_name or capability == CAPABILITY:
        return None
    return f"the GPU is a {kind}, and the kernel is for Hopper"
