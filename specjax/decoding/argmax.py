"""The first largest entry of a row, in the form that compilers make fast."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE = 128
"""Entries that are looked through one by one, once their maximum is known to lie
there.
"""


def first_argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """``argmax`` over the last axis, the lowest index among equals, as int32.

    Maxima of tiles, then the first tile that has the largest, then the first largest
    entry in it. XLA's CPU backend runs maxima as vector code, and a one-pass ``argmax``
    (and all that is fused into it) entry by entry. Over 49 152 logits that is 0.07 ms
    against 0.23, and 0.4 against 1.7 with Gumbel noise.

    Nowhere is an entry compared with a maximum for being equal to it. A compiler may
    work ``x`` out twice, once for each use, and round it differently: then nothing is
    equal, and there is no index. Seen with sampled rows of one device each. Here a
    second rounding can only choose another entry of the same tile, at a near-tie.
    """
    size = x.shape[-1]
    if size <= TILE:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    # held apart, or what makes x would be worked out once for each of the two passes
    x = jax.lax.optimization_barrier(x)
    missing = -size % TILE
    if missing:
        x = jnp.pad(x, [(0, 0), (0, missing)], constant_values=-jnp.inf)
    tiles = x.reshape(x.shape[0], -1, TILE)
    best = jnp.argmax(tiles.max(axis=-1), axis=-1).astype(jnp.int32)
    tile = jnp.take_along_axis(tiles, best[:, None, None], axis=1, mode="clip")[:, 0]
    inside = jnp.argmax(tile, axis=-1).astype(jnp.int32)
    return jnp.minimum(best * TILE + inside, size - 1)
