"""Random calls of window attention, for tests and timings.

Every slot that holds nothing is NaN, and so a kernel that looks at one shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.window_attention.specs import AttentionSpec

DRAWN = (1 << 22) + 15
"""Numbers of an array that are drawn. Larger ones, which take seconds to draw, repeat
them: their rows, of even lengths, do not."""

Call = tuple[dict[str, Any], dict[str, Any]]
"""Arrays of ``api.window_attention``, and its options."""


def random_trees(draw: np.random.Generator, batch: int, width: int) -> np.ndarray:
    """Ancestor masks ``[B, W, W]``: a chain, a star, and then random trees."""
    masks = np.zeros((batch, width, width), bool)
    for b in range(batch):
        for row in range(width):
            if row > 0:
                random = int(draw.integers(0, row))
                masks[b, row] = masks[b, [row - 1, 0, random][min(b, 2)]]
            masks[b, row, row] = True
    return masks


def random_call(
    spec: AttentionSpec,
    *,
    lengths: Sequence[int],
    width: int,
    capacity: int,
    dtype: Any = jnp.float32,
    cache: Any = None,
    scaled: bool = True,
    reach: int | None = None,
    seed: int = 0,
) -> Call:
    """A call at a model's heads, for batch rows of these committed lengths.

    A model with a sliding window has a ring; ``reach`` gives one to a contiguous cache.
    ``cache`` is a narrow dtype for the cache, then ``scaled`` or not.
    """
    draw = np.random.default_rng(seed)
    batch, dim = len(lengths), spec.dim

    def normal(*shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        return np.resize(draw.standard_normal(min(count, DRAWN), np.float32), shape)

    masks = random_trees(draw, batch, width)
    committed = np.asarray(lengths, np.int32)
    slots = None
    if spec.reach is not None:
        capacity = spec.reach
        last = committed[:, None] - 1
        slots = last - np.remainder(last - np.arange(capacity), capacity)
        held = slots >= 0
    else:
        held = np.arange(capacity) < committed[:, None]
    at = (batch, width, spec.kv_heads, dim)
    shape = (batch, spec.kv_heads, capacity, dim)

    def poisoned() -> jax.Array:
        return _poisoned(normal(*shape), held, dtype)

    k, k_cache = jnp.asarray(normal(*at), dtype), poisoned()
    arrays = {
        "q": jnp.asarray(normal(batch, width, spec.q_heads, dim), dtype),
        "k": k,
        "v": k if spec.latent else jnp.asarray(normal(*at), dtype),
        "k_cache": k_cache,
        "v_cache": k_cache if spec.latent else poisoned(),
        "lengths": jnp.asarray(committed),
        "ancestors": jnp.asarray(masks),
        "positions": jnp.asarray(committed[:, None] + masks.sum(-1) - 1, jnp.int32),
        "slots": None if slots is None else jnp.asarray(slots, jnp.int32),
        "sinks": jnp.asarray(normal(spec.q_heads)) if spec.sinks else None,
    }
    if cache is not None:
        for name in ("k", "v"):
            arrays |= _narrow(name, normal(*shape), held, jnp.dtype(cache), scaled)
    options = {
        "scale": dim**-0.5,
        "reach": spec.reach if reach is None else reach,
        "softcap": spec.softcap,
    }
    return arrays, options


def _narrow(
    name: str, rows: np.ndarray, held: np.ndarray, dtype: np.dtype, scaled: bool
) -> dict[str, jax.Array]:
    """A cache in codes; its scales are no powers of two, and no two of them alike."""
    if not scaled:
        return {f"{name}_cache": _poisoned(rows, held, dtype)}
    scale = np.max(np.abs(rows), axis=-1) / (127 if dtype == np.int8 else 448)
    codes = rows / scale[..., None]
    if dtype == np.int8:
        codes = np.rint(codes)
    return {
        f"{name}_cache": _poisoned(codes, held, dtype),
        f"{name}_scale": _poisoned(scale, held, jnp.dtype(jnp.float32)),
    }


def _poisoned(rows: np.ndarray, held: np.ndarray, dtype: Any) -> jax.Array:
    """Slots (axis 2) that hold nothing are NaN, or as large as the dtype has it."""
    held = held.reshape(held.shape[0], 1, held.shape[1], *[1] * (rows.ndim - 3))
    return jnp.asarray(np.where(held, rows, rubbish(dtype)), dtype)


def rubbish(dtype: Any) -> float:
    """What shows most, if it is looked at."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else np.nan


def in_pages(arrays: dict[str, Any], size: int, seed: int = 0) -> dict[str, Any]:
    """The same call with its cache in pages, which lie in no order.

    Rows hold pages for their lengths only; all the rest of the pool is rubbish.
    """
    draw = np.random.default_rng(seed)
    lengths = np.asarray(arrays["lengths"])
    batch, _, capacity, _ = arrays["k_cache"].shape
    blocks = -(-capacity // size)
    pages = batch * blocks + 3
    ids = draw.permutation(pages)[: batch * blocks].reshape(batch, blocks)
    held = np.arange(blocks) < -(-lengths[:, None] // size)
    table = np.where(held, ids, pages).astype(np.int32)

    def pool(cache: jax.Array) -> jax.Array:
        fill = rubbish(cache.dtype)
        rows = np.asarray(cache, np.float32)
        _, heads, _, *dim = rows.shape
        missing = [(0, 0), (0, 0), (0, blocks * size - capacity), *[(0, 0)] * len(dim)]
        rows = np.pad(rows, missing, constant_values=fill)
        rows = rows.reshape(batch, heads, blocks, size, *dim).swapaxes(1, 2)
        out = np.full((pages, heads, size, *dim), fill, np.float32)
        out[table[held]] = rows[held]
        return jnp.asarray(out, cache.dtype)

    shared = arrays["v_cache"] is arrays["k_cache"]
    pooled = {
        name: pool(arrays[name])
        for name in ("k_cache", "v_cache", "k_scale", "v_scale")
        if name in arrays
    }
    if shared:
        pooled["v_cache"] = pooled["k_cache"]
    return {**arrays, **pooled, "table": jnp.asarray(table)}
