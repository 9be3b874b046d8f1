"""What kernels for NVIDIA's Hopper (sm_90: H100, H200) count on."""

from __future__ import annotations

import jax

CAPABILITY = "9.0"
"""Newer GPUs have other matrix units, and cannot run programs for these."""

KINDS = ("H100", "H200", "H800", "H20")
"""Parts of their names, where a name is all that is known."""

SHARED_BYTES = 227 << 10
"""Of shared memory, that one block of threads may have."""

MULTIPROCESSORS = 132
"""Of an H100 or H200. A wrong guess costs speed, and never a result."""


def absent() -> str | None:
    """Why no kernel for Hopper runs here; ``None``: this is one, or there is no GPU.

    A program may be lowered for a GPU that is not here: ``compat.lowering_for``.
    """
    lowered_for = jax.sharding.get_abstract_mesh().abstract_device
    if lowered_for is not None and lowered_for.platform in ("gpu", "cuda"):
        kind = lowered_for.device_kind
        known = any(name in kind for name in KINDS)
    elif jax.default_backend() == "gpu":
        device = jax.devices()[0]
        kind = device.device_kind
        known = getattr(device, "compute_capability", None) == CAPABILITY
    else:
        return None
    return None if known else f"the GPU is a {kind}, and the kernel is for Hopper"
