"""Decays along the paths of a window: exact sums, and powers that cannot overflow."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LOWEST = -1024.0
"""A log decay below this is taken for it: its power is 0, in float64 too."""

STEP = 1 / 32


class PathSums(NamedTuple):
    """Sums of log decays from the start of the window to each row, in two parts.

    ``coarse`` adds multiples of ``STEP``, which is exact up to 500 rows in float32, and
    ``fine`` the small rest. A difference of two sums is then as exact as a sum over the
    rows between them, however much was forgotten before these.
    """

    coarse: jax.Array  # [B, H, W, c]; c is dk, or 1 for one decay a head
    fine: jax.Array  # [B, H, W, c]

    @property
    def total(self) -> jax.Array:
        """``[B, H, W, c]``."""
        return self.coarse + self.fine

    def at(self, rows: slice) -> PathSums:
        """Of some window rows only."""
        return PathSums(self.coarse[:, :, rows], self.fine[:, :, rows])


def per_channel(log_decay: Float[Array, "B W H *dk"]) -> Float[Array, "B W H c"]:
    """With a channel axis, of length 1 for one decay a head; bounded from below."""
    decay = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    return jnp.maximum(decay, jnp.asarray(LOWEST, decay.dtype))


def path_sums(
    decay: Float[Array, "B W H c"],
    ancestors: Bool[Array, "B W W"],
    *,
    fused: bool = False,
) -> PathSums:
    """Of the rows on each row's path, itself included.

    By products, or ``fused`` by plain sums, which a GPU's compiler does all at once.
    """
    coarse = jnp.round(decay / STEP) * STEP

    parts = (coarse, decay - coarse)
    return PathSums(*(along_paths(x, ancestors, fused=fused) for x in parts))


def along_paths(
    x: Float[Array, "B W H c"], ancestors: Bool[Array, "B W W"], *, fused: bool
) -> Float[Array, "B H W c"]:
    """The sum of a row's own and its ancestors' numbers."""
    if fused:
        seen = jnp.where(ancestors[..., None, None], x[:, None], 0)
        return jnp.sum(seen, axis=2).swapaxes(1, 2)
    # by default an accelerator would round the decays to bfloat16
    return jnp.einsum(
        "bts,bshc->bhtc",
        ancestors.astype(x.dtype),
        x,
        precision=jax.lax.Precision.HIGHEST,
    )


def masked_exp(exponent: jax.Array, mask: jax.Array) -> jax.Array:
    """``exp`` where the mask is set, else 0.

    The exponent is masked, not the power: off a path it may be large and positive.
    """
    return jnp.exp(jnp.where(mask, exponent, -jnp.inf))


def decays_after(decay: Float[Array, "B P H c"]) -> Float[Array, "B P H c"]:
    """For rows one after another: the sum of the log decays behind each."""
    behind = jnp.pad(decay[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)])
    return jax.lax.cumsum(behind, axis=1, reverse=True)
