"""Window attention in which a row's bits depend on its position and prefix alone.

Every row is a problem of its own and of one shape: its keys and values are put where
they would stand if they were committed, and are reduced in the order of the cache's
slots. So it makes no difference to a single bit whether a key came from the cache or
from the window, how wide the window is, or how many rows the batch has. It costs a copy
of the cache a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def window_attention_by_row(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H Dv"],
    k_cache: Float[Array, "B H T D"],
    v_cache: Float[Array, "B H T Dv"],
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    *,
    scale: float,
    positions: Int[Array, "B W"],
    slots: Int[Array, "B T"] | None = None,
    reach: int | None = None,
    chosen: tuple[jax.Array, jax.Array] | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B W Hq Dv"]:
    """As ``reference.window_attention``; ``slots``, if given, are those of a ring in
    which position ``p`` stands in slot ``p % T``. ``chosen`` is not implemented.
    """
    assert chosen is None, "attention by rows knows no indexer"
    batch, width, q_heads, dim = q.shape
    kv_heads, capacity = k_cache.shape[1], k_cache.shape[2]
    acc = np.promote_types(q.dtype, np.float32)
    if slots is None:
        held = jnp.arange(capacity, dtype=jnp.int32)
        slots = jnp.where(held < lengths[:, None], held, -1)
    # window rows stand behind their ancestors, so the order of rows is that of depth
    row_slots = jnp.remainder(positions, capacity)

    def one(at: Int[Array, " 2"]) -> Float[Array, "Hq Dv"]:
        b, i = at[0], at[1]
        own = ancestors[b, i]
        # an index of T is dropped
        into = jnp.where(own, row_slots[b], capacity)
        position = slots[b].at[into].set(positions[b], mode="drop")
        keys = k_cache[b].at[:, into].set(k[b].swapaxes(0, 1), mode="drop")
        values = v_cache[b].at[:, into].set(v[b].swapaxes(0, 1), mode="drop")
        last = positions[b, i]
        seen = (position >= 0) & (position <= last)
        if reach is not None:
            seen = seen & (position > last - reach)
        values = jnp.where(seen[:, None], values, jnp.zeros((), values.dtype))
        query = (q[b, i] * jnp.asarray(scale, q.dtype)).astype(keys.dtype)
        query = query.reshape(kv_heads, -1, dim)
        scores = jnp.einsum("hgd,htd->hgt", query, keys, preferred_element_type=acc)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen, scores, -jnp.inf)
        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(acc).reshape(kv_heads, -1, 1)
            top = jnp.maximum(top, sink)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sink - top)
        out = jnp.einsum(
            "hgt,htd->hgd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=acc,
        )
        return (out / total).reshape(q_heads, -1)

    rows = jnp.arange(batch * width, dtype=jnp.int32)
    out = jax.lax.map(one, jnp.stack([rows // width, rows % width], axis=1))
    return out.reshape(batch, width, q_heads, -1)
