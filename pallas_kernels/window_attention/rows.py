"""A window's queries as rows of a product, for each KV head.

The query heads of one KV head and the window's rows form the rows, heads first: the
cache is then read once for all of them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.window_attention.plan import LANES, Plan, Shapes

FIRST_LANE = LANES - 1
"""Of a row's facts: where it says after which position it sees."""

EARLIEST = -(2**30)
"""A position before all others."""


def pack_queries(
    q: Float[Array, "B W Hq D"],
    scale: float,
    shapes: Shapes,
    plan: Plan,
    dtype: jnp.dtype,
) -> Float[Array, "B H R D"]:
    """Scaled, in the cache's dtype, and made up with zeros to whole tiles."""
    split = q.reshape(shapes.batch, shapes.width, shapes.kv_heads, shapes.group, -1)
    rows = split.transpose(0, 2, 3, 1, 4) * jnp.asarray(scale, q.dtype)
    rows = rows.reshape(shapes.batch, shapes.kv_heads, shapes.rows, -1)
    missing = plan.rows - shapes.rows
    return jnp.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)]).astype(dtype)


def unpack_outputs(
    out: Float[Array, "B H R Dv"], shapes: Shapes
) -> Float[Array, "B W Hq Dv"]:
    """The inverse of ``pack_queries``, of what was read."""
    rows = out[:, :, : shapes.rows]
    split = rows.reshape(shapes.batch, shapes.kv_heads, shapes.group, shapes.width, -1)
    return split.transpose(0, 3, 1, 2, 4).reshape(
        shapes.batch, shapes.width, shapes.q_heads, -1
    )


def pack_keys(
    k: Float[Array, "B W H D"], plan: Plan, dtype: jnp.dtype
) -> Float[Array, "B H window D"]:
    """The window's own keys or values, as the cache would hold them."""
    missing = plan.window - k.shape[1]
    rows = k.transpose(0, 2, 1, 3)
    return jnp.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)]).astype(dtype)


def row_facts(
    ancestors: Bool[Array, "B W W"],
    positions: Int[Array, "B W"] | None,
    reach: int | None,
    shapes: Shapes,
    plan: Plan,
) -> Int[Array, "B R 128"]:
    """What each row may see, with a lane for each window row.

    The last lane holds the position after which the row sees the cache; rows that make
    up tiles see nothing of the window, and all of the cache.
    """
    seen, first = ancestors, jnp.full(ancestors.shape[:2], EARLIEST, jnp.int32)
    if reach is not None:
        assert positions is not None, "a sliding window needs the rows' positions"
        first = positions - jnp.int32(reach)
        seen = seen & (positions[:, None] > first[:, :, None])
    wide = [(0, 0), (0, 0), (0, LANES - 1 - shapes.width)]
    facts = jnp.concatenate(
        [jnp.pad(seen.astype(jnp.int32), wide), first[..., None]], axis=-1
    )
    facts = jnp.tile(facts, (1, shapes.group, 1))
    return jnp.pad(facts, [(0, 0), (0, plan.rows - shapes.rows), (0, 0)])
