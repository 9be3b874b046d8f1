"""The same attention by a library's kernel, as an engine without ours would call it.

The window's keys are written behind the committed ones first, and the tree is a mask
over all slots. That takes a cache ``[B, T, H, D]`` and a write to it each round, of
which neither is timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def library_name() -> str:
    """``tokamax`` if it is installed, which picks among several kernels."""
    return "tokamax" if importlib.util.find_spec("tokamax") else "jax.nn"


def attention(scale: float) -> Callable[..., jax.Array]:
    """Of ``arguments_of``: ``[B, W, Hq, D]``."""
    if library_name() == "tokamax":
        import tokamax  # pyright: ignore[reportMissingImports]

        run: Callable[..., jax.Array] = tokamax.dot_product_attention
    else:
        run = jax.nn.dot_product_attention

    def call(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return run(q, k, v, mask=mask, scale=scale)

    return call


def refusal(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """What of a call these libraries have no argument for."""
    if arrays.get("slots") is not None:
        return "a ring"
    if arrays.get("sinks") is not None:
        return "sinks"
    if options.get("softcap") is not None:
        return "a soft cap"
    if arrays.get("k_scale") is not None:
        return "scales of a narrow cache"
    return None


def arguments_of(arrays: Mapping[str, Any]) -> tuple[jax.Array, ...]:
    """Queries, keys, values and mask of a call of ``api.window_attention``.

    Slots behind the window hold zeros: these libraries multiply what they mask.
    """
    lengths = np.asarray(arrays["lengths"])
    ancestors = np.asarray(arrays["ancestors"])
    batch, width, _ = ancestors.shape
    capacity = arrays["k_cache"].shape[2] + width
    slot = np.arange(capacity)
    mask = np.broadcast_to(slot < lengths[:, None, None], (batch, width, capacity))
    mask = mask.copy()
    for row in range(batch):
        mask[row, :, lengths[row] : lengths[row] + width] = ancestors[row]

    def written(cache: jax.Array, rows: jax.Array) -> jax.Array:
        missing = [(0, 0), (0, width), (0, 0), (0, 0)]
        slots = jnp.pad(cache.swapaxes(1, 2), missing)
        held = slot < lengths[:, None]
        slots = jnp.where(held[..., None, None], slots, jnp.zeros((), cache.dtype))
        at = lengths[:, None] + np.arange(width)
        return slots.at[np.arange(batch)[:, None], at].set(rows)

    k = written(arrays["k_cache"], arrays["k"])
    shared = arrays["v_cache"] is arrays["k_cache"]
    v = k if shared else written(arrays["v_cache"], arrays["v"])
    return arrays["q"], k, v, jnp.asarray(mask[:, None])
