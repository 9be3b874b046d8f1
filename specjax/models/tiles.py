"""Row-wise functions in tiles of one fixed number of rows.

A product's last bits depend on how many rows it has: the library takes other kernels.
In tiles they do not, and a row's bits then depend on its own numbers alone, if the
kernel treats the rows of a tile alike (``specjax.models.invariant`` looks).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def in_tiles(
    function: Callable[[jax.Array], jax.Array],
    x: Float[Array, "rows *rest"],
    tile: int | None,
) -> Float[Array, "rows *more"]:
    """``function`` of all rows; of ``tile`` rows at a time, unless that is ``None``.

    Rows of zeros fill the last tile. Every tile runs the one compiled loop body.
    """
    if tile is None:
        return function(x)
    rows = x.shape[0]
    x = jnp.pad(x, [(0, -rows % tile)] + [(0, 0)] * (x.ndim - 1))
    y = jax.lax.map(function, x.reshape(-1, tile, *x.shape[1:]))
    return y.reshape(-1, *y.shape[2:])[:rows]
