"""Window attention on CPU, by the interpreted TPU kernel and by the reference.

For tests: both ways to run a call of ``problems.random_call``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from pallas_kernels.window_attention import reference, tpu
from pallas_kernels.window_attention.plan import Options

BLOCK = 128
"""Slots of a step, few enough for small caches to have several."""

TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 1.5e-2}
"""Sums in another order; weights are rounded to bfloat16 before the last product."""


def by_kernel(
    arrays: dict[str, Any],
    options: dict[str, Any],
    *,
    block: int | None = BLOCK,
    splits: int | None = None,
    interpret: compat.Interpret = True,
) -> np.ndarray:
    """``splits`` overrides in how many shares the cache is read."""
    x = dict(arrays)
    shared = x["k_cache"] is x["v_cache"]
    if shared:
        x["v"] = x["v_cache"] = None
    static = Options(
        **options,
        ring=x["slots"] is not None,
        shared=shared,
        with_lse=x["sinks"] is not None,
        scaled="k_scale" in x,
    )
    settings = {"block": block, "splits": splits, "interpret": interpret}
    return np.asarray(tpu.window_attention(**x, options=static, **settings))


def by_reference(arrays: dict[str, Any], options: dict[str, Any]) -> np.ndarray:
    """In one program, as the decoder runs it."""
    run = jax.jit(lambda **x: reference.window_attention(**x, **options))
    return np.asarray(run(**arrays))
