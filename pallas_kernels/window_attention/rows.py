"""A window's queries as rows of a product, for each KV head.

The query heads of one KV head and the window's rows form the rows, heads first: the
cache is then read once for all of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.window_attention.plan import LANES, Options, Plan, Shapes

FIRST_LANE = LANES - 1
"""Of a row's facts: where it says after which position it sees."""

EARLIEST = -(2**30)
"""A position before all others."""


def pack_queries(
    q: Float[Array, "B W Hq D"],
    scale: float,
    shapes: Shapes,
    count: int,
    dtype: jnp.dtype,
) -> Float[Array, "B H R D"]:
    """Scaled, in the cache's dtype, and made up with zeros to ``count`` rows."""
    split = q.reshape(shapes.batch, shapes.width, shapes.kv_heads, shapes.group, -1)
    rows = split.transpose(0, 2, 3, 1, 4) * jnp.asarray(scale, q.dtype)
    rows = rows.reshape(shapes.batch, shapes.kv_heads, shapes.rows, -1)
    missing = count - shapes.rows
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
    k: Float[Array, "B W H D"], count: int, dtype: jnp.dtype
) -> Float[Array, "B H window D"]:
    """The window's own keys or values, as the cache would hold them."""
    missing = count - k.shape[1]
    rows = k.transpose(0, 2, 1, 3)
    return jnp.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)]).astype(dtype)


def first_positions(
    positions: Int[Array, "B W"] | None, reach: int | None
) -> Int[Array, "B W"] | None:
    """After which position each row sees, if its window slides."""
    if reach is None:
        return None
    assert positions is not None, "a sliding window needs the rows' positions"
    return positions - jnp.int32(reach)


def window_seen(
    ancestors: Bool[Array, "B W W"],
    positions: Int[Array, "B W"] | None,
    firsts: Int[Array, "B W"] | None,
    count: int,
) -> Int[Array, "B W count"]:
    """1 where a window row sees another; the width made up with zeros to ``count``."""
    seen = ancestors
    if firsts is not None:
        assert positions is not None
        seen = seen & (positions[:, None] > firsts[:, :, None])
    missing = count - seen.shape[2]
    return jnp.pad(seen.astype(jnp.int32), [(0, 0), (0, 0), (0, missing)])


def rows_of_heads(
    x: Int[Array, "B W *facts"], shapes: Shapes, count: int
) -> Int[Array, "B R *facts"]:
    """What holds for window rows, for the rows of a KV head; zeros make up tiles."""
    rest = [(0, 0)] * (x.ndim - 2)
    rows = jnp.tile(x, (1, shapes.group, *(1 for _ in rest)))
    return jnp.pad(rows, [(0, 0), (0, count - shapes.rows), *rest])


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
    firsts = first_positions(positions, reach)
    seen = window_seen(ancestors, positions, firsts, LANES - 1)
    if firsts is None:
        firsts = jnp.full(ancestors.shape[:2], EARLIEST, jnp.int32)
    facts = jnp.concatenate([seen, firsts[..., None]], axis=-1)
    return rows_of_heads(facts, shapes, plan.rows)


def steps_in_sight(
    lengths: Int[Array, " B"],
    positions: Int[Array, "B W"] | None,
    options: Options,
    block: int,
    blocks: int,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The first block of the cache that a batch row looks at, and the one behind the
    last.
    """
    behind = (lengths + (block - 1)) // block
    first = jnp.zeros_like(lengths)
    if options.ring:
        # a ring may hold any position in any slot
        behind = jnp.where(lengths > 0, jnp.int32(blocks), 0)
    elif options.reach is not None:
        assert positions is not None
        first = jnp.min(positions, axis=1) - jnp.int32(options.reach - 1)
        first = jnp.clip(first // block, 0, blocks)
    return first, behind


def shares_of(
    firsts: Int[Array, " B"], behinds: Int[Array, " B"], splits: int
) -> tuple[Int[Array, "splits B"], Int[Array, "splits B"]]:
    """The blocks in sight of each batch row in as many shares, one behind the other:
    the first block of each, and the one behind its last.

    Shares are of what is in sight, not of the capacity, and differ by a block at most.
    An empty one begins where it ends, behind the last block.
    """
    firsts = jnp.minimum(firsts, behinds)
    each = jax.lax.div(behinds - firsts + (splits - 1), jnp.int32(splits))
    share = jnp.arange(splits + 1, dtype=jnp.int32)[:, None]
    bounds = jnp.minimum(firsts + share * each, behinds)
    return bounds[:-1], bounds[1:]


def merge(
    read: Float[Array, "2 B H R Dv"], lse: Float[Array, "2 B H R Dv"]
) -> tuple[Float[Array, "B H R Dv"], Float[Array, "B H R Dv"]]:
    """What two shares of a cache read, as one, and their log-sum-exp (Dao et al.,
    Flash-Decoding, 2023), which a row has once for each channel.

    A share that saw nothing has a finite ``lse`` far below the other's, and then no
    part in the sum. With two shares, and all of it element by element, the compiler
    makes a single pass of it; sums over an axis of shares would be several.
    """
    # of each by itself: what the other leaves of 1 has no digits where it is small
    ahead = lse[0] - lse[1]
    first, second = jax.nn.sigmoid(ahead), jax.nn.sigmoid(-ahead)
    return read[0] * first + read[1] * second, jnp.logaddexp(lse[0], lse[1])


def apply_sinks(
    read: Float[Array, "B H R Dv"],
    lse: Float[Array, "B H R"],
    sinks: Float[Array, " Hq"],
    shapes: Shapes,
) -> Float[Array, "B H R Dv"]:
    """A key without a value only takes its share of the total."""
    by_head = sinks.astype(jnp.float32).reshape(shapes.kv_heads, shapes.group)
    rows = jnp.repeat(by_head, shapes.width, axis=1)
    rows = jnp.pad(rows, [(0, 0), (0, read.shape[2] - shapes.rows)])
    return read * jax.nn.sigmoid(lse - rows)[..., None]
