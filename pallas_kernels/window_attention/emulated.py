"""Window attention on CPU, by the emulated Hopper kernel and by the reference."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels import compat
from pallas_kernels.window_attention import gpu, reference
from pallas_kernels.window_attention.plan import Options


def by_hopper(
    arrays: dict[str, Any], options: dict[str, Any], splits: int | None = 2
) -> np.ndarray:
    """Of a call as ``problems`` makes them, with races looked for: JAX 0.12 only."""
    shared = arrays["v"] is arrays["k"]
    static = Options(
        **options,
        ring=arrays["slots"] is not None,
        shared=shared,
        with_lse=arrays["sinks"] is not None,
    )
    if shared:
        arrays = {**arrays, "v": None, "v_cache": None}
    out = gpu.window_attention(
        **arrays, options=static, splits=splits, interpret=compat.gpu_interpret()
    )
    return np.asarray(out)


def by_reference(arrays: dict[str, Any], options: dict[str, Any]) -> np.ndarray:
    """Of the same call, its cache in one stretch a row."""
    run = jax.jit(lambda **x: reference.window_attention(**x, **options))
    return np.asarray(run(**arrays))
