"""Products of window rows with earlier rows' keys, decayed along the path between.

    products[t, s] = sum_c x_t[c] k_s[c] e^(G_t[c] - G_s[c]),   s on the path to t

With one decay a head the power comes out of the sum. With one a channel it does not,
and cannot be split into ``e^(G_t)`` and ``e^(-G_s)`` either: the second overflows.
Between blocks of rows it is split around a sum that lies between the two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.delta_window.decays import PathSums, masked_exp

BLOCK = 8
"""Rows whose decays by channel are taken pair by pair in long windows. The most that is
held at once is a power for each of these rows with each row, head and channel."""

MOST_PAIRED = 24
"""Rows of the longest window that is taken pair by pair as a whole."""

LARGEST_EXPONENT = 30.0
"""Of a split power's second part. The first is never much above 1."""


def decayed_products(
    x: Float[Array, "B m G W dk"],
    k: Float[Array, "B G W dk"],
    sums: PathSums,
    ancestors: Bool[Array, "B W W"],
    *,
    fused: bool = False,
) -> Float[Array, "B m H W W"]:
    """For each of ``m`` stacks of rows; 0 off the paths.

    Short windows are multiplied, or with ``fused`` summed up plainly. Into a sum a
    GPU's compiler puts all that is summed: a power for every pair of rows and channel,
    with one decay a channel, is then never written to memory.
    """
    heads = sums.coarse.shape[1]
    if sums.coarse.shape[-1] == 1:
        if fused and x.shape[3] <= MOST_PAIRED:
            products = _sums(x, k[:, :, None])
        else:
            products = dot("bmgtk,bgsk->bmgts", x, k)
        products = jnp.repeat(products, heads // x.shape[2], axis=2)
        gap = _gap(sums, sums)[..., 0]
        return products * masked_exp(gap, ancestors[:, None])[:, None]
    x = jnp.repeat(x, heads // x.shape[2], axis=2)
    k = jnp.repeat(k, heads // k.shape[1], axis=1)
    if x.shape[3] <= MOST_PAIRED:
        return _pair_by_pair(x, k, sums, sums, ancestors, fused)
    return _by_blocks(x, k, sums, ancestors, fused)


def dot(expression: str, *operands: jax.Array) -> jax.Array:
    """A product in full precision: what enters a recurrent state stays in it."""
    return jnp.einsum(expression, *operands, precision=jax.lax.Precision.HIGHEST)


def _gap(later: PathSums, earlier: PathSums) -> Float[Array, "B H t s c"]:
    def pairs(a: jax.Array, b: jax.Array) -> jax.Array:
        return a[:, :, :, None] - b[:, :, None]

    return pairs(later.coarse, earlier.coarse) + pairs(later.fine, earlier.fine)


def _pair_by_pair(
    x: Float[Array, "B m H t dk"],
    k: Float[Array, "B H s dk"],
    later: PathSums,
    earlier: PathSums,
    mask: Bool[Array, "B t s"],
    fused: bool,
) -> Float[Array, "B m H t s"]:
    """A power for every pair of rows and channel."""
    power = masked_exp(_gap(later, earlier), mask[:, None, :, :, None])
    keys = power * k[:, :, None]
    if fused:
        found = [
            jnp.sum(x[:, i, :, :, None] * keys, axis=-1) for i in range(x.shape[1])
        ]
        return jnp.stack(found, axis=1)
    return dot("bmhtk,bhtsk->bmhts", x, keys)


def _sums(
    x: Float[Array, "B m H t dk"], keys: Float[Array, "B H t_or_1 s dk"]
) -> Float[Array, "B m H t s"]:
    """Products, each stack of rows by itself: a GPU's compiler does not join them."""
    rows = [x[:, i, :, :, None] for i in range(x.shape[1])]
    return jnp.stack([jnp.sum(row * keys, axis=-1) for row in rows], axis=1)


def _by_blocks(
    x: Float[Array, "B m H W dk"],
    k: Float[Array, "B H W dk"],
    sums: PathSums,
    ancestors: Bool[Array, "B W W"],
    fused: bool,
) -> Float[Array, "B m H W W"]:
    """Split powers between blocks; pair by pair for what cannot be split.

    Which rows of the batch take the second way depends on themselves alone; their
    neighbours decide only whether it is computed at all.
    """
    width = x.shape[3]
    missing = -width % BLOCK
    x, k = _pad(x, missing, 3), _pad(k, missing, 2)
    sums = PathSums(_pad(sums.coarse, missing, 2), _pad(sums.fine, missing, 2))
    ancestors = jnp.pad(ancestors, [(0, 0), (0, missing), (0, missing)])
    starts = jnp.arange(0, width + missing, BLOCK, dtype=jnp.int32)
    split, fits = jax.lax.map(
        lambda at: _split_rows(x, k, sums, ancestors, at, fused), starts
    )
    fits = jnp.all(fits, axis=0)

    def pairwise() -> jax.Array:
        def rows(at: jax.Array) -> jax.Array:
            block, later, mask = _block(x, sums, ancestors, at)
            return _pair_by_pair(block, k, later, sums, mask, fused)

        return jax.lax.map(rows, starts)

    exact = jax.lax.cond(jnp.all(fits), lambda: split, pairwise)
    blocks = jnp.where(fits[:, None, None, None, None], split, exact)
    joined = jnp.moveaxis(blocks, 0, 3).reshape(*x.shape[:3], -1, width + missing)
    return joined[..., :width, :width]


def _split_rows(
    x: Float[Array, "B m H W dk"],
    k: Float[Array, "B H W dk"],
    sums: PathSums,
    ancestors: Bool[Array, "B W W"],
    start: jax.Array,
    fused: bool,
) -> tuple[Float[Array, "B m H t W"], Bool[Array, " B"]]:
    """One block's rows against all, and whether the powers could be split.

    They are split at the largest sum among the block's rows: along a chain both parts
    are then at most 1. In a tree an ancestor of one row may have forgotten much more
    than another row of the block, and the second part would grow.
    """
    columns = jnp.arange(k.shape[2], dtype=jnp.int32)
    block, later, mask = _block(x, sums, ancestors, start)
    before = mask & (columns < start)
    behind = jnp.any(before, axis=2)[:, None, :, None]  # rows with such ancestors
    seen = jnp.any(before, axis=1)[:, None, :, None]
    pivot = jnp.max(jnp.where(behind, later.coarse, -jnp.inf), axis=2, keepdims=True)
    pivot = jnp.where(jnp.isfinite(pivot), pivot, 0.0)
    rise = pivot - sums.coarse - sums.fine
    fits = jnp.all(~seen | (rise <= LARGEST_EXPONENT), axis=(1, 2, 3))
    left = block * masked_exp(later.coarse - pivot + later.fine, behind)[:, None]
    right = k * masked_exp(jnp.minimum(rise, LARGEST_EXPONENT), seen)
    far = dot("bmhtk,bhsk->bmhts", left, right)
    far = jnp.where(before[:, None, None], far, 0.0)
    own_k, own, _ = _block(k[:, None], sums, ancestors, start)
    near_mask = jax.lax.dynamic_slice_in_dim(mask, start, BLOCK, axis=2)
    near = _pair_by_pair(block, own_k[:, 0], later, own, near_mask, fused)
    # the block's own columns are still 0 in ``far``
    return jax.lax.dynamic_update_slice_in_dim(far, near, start, axis=4), fits


def _block(
    x: Float[Array, "B m H W dk"],
    sums: PathSums,
    ancestors: Bool[Array, "B W W"],
    start: jax.Array,
) -> tuple[Float[Array, "B m H t dk"], PathSums, Bool[Array, "B t W"]]:
    """The rows of one block."""

    def rows(a: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(a, start, BLOCK, axis=axis)

    return (
        rows(x, 3),
        PathSums(rows(sums.coarse, 2), rows(sums.fine, 2)),
        rows(ancestors, 1),
    )


def _pad(x: jax.Array, missing: int, axis: int) -> jax.Array:
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, missing)
    return jnp.pad(x, pads)
