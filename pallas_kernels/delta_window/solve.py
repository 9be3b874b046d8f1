"""Unit lower triangular systems, by products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.delta_window.pairs import dot

BLOCK = 16
"""Rows that are solved with one inverse; blocks of them follow each other."""


def solve_unit_lower(
    mix: Float[Array, "B H W W"], rhs: Float[Array, "B H W dv"]
) -> Float[Array, "B H W dv"]:
    """``(I + mix)^-1 rhs``, where of ``mix`` only what is below the diagonal is read.

    Above it there must be zeros. Forward substitution, a block of rows at a time.
    (Powers of ``mix``, which would do on paper, grow like binomials where keys repeat.
    A library solver was seen to hang on CPU when two of its calls ran at once.)
    """
    width = mix.shape[-1]
    if width <= BLOCK:
        return dot("bhts,bhsv->bhtv", unit_lower_inverse(mix), rhs)
    missing = -width % BLOCK
    mix = jnp.pad(mix, [(0, 0), (0, 0), (0, missing), (0, missing)])
    rhs = jnp.pad(rhs, [(0, 0), (0, 0), (0, missing), (0, 0)])
    blocks = (width + missing) // BLOCK
    inverses = unit_lower_inverse(_on_diagonal(mix, blocks))

    def solve_block(block: jax.Array, solved: jax.Array) -> jax.Array:
        start = block * BLOCK
        rows = jax.lax.dynamic_slice_in_dim(mix, start, BLOCK, axis=2)
        own = jax.lax.dynamic_slice_in_dim(rhs, start, BLOCK, axis=2)
        inverse = jax.lax.dynamic_index_in_dim(inverses, block, 2, keepdims=False)
        # rows that are not solved yet are 0
        rest = own - dot("bhts,bhsv->bhtv", rows, solved)
        found = dot("bhts,bhsv->bhtv", inverse, rest)
        return jax.lax.dynamic_update_slice_in_dim(solved, found, start, axis=2)

    solved = jax.lax.fori_loop(
        jnp.int32(0), jnp.int32(blocks), solve_block, jnp.zeros_like(rhs)
    )
    return solved[:, :, :width]


def unit_lower_inverse(mix: Float[Array, "*lead W W"]) -> Float[Array, "*lead W W"]:
    """``(I + mix)^-1`` by halves; of ``mix`` only what is below the diagonal is read.

    The inverses ``X, Y`` of two neighbouring blocks on the diagonal, with ``A`` below
    the first, give the one of twice the size::

        [I + M  0    ]^-1 = [  X     0]
        [  A    I + N]      [-Y A X  Y]

    so ``log2 W`` steps do it, each over all blocks at once. For keys of length one and
    ``beta`` in [0, 1] no entry of any of these exceeds 1, and nothing large cancels.
    """
    *lead, width, _ = mix.shape
    size = 1 << (width - 1).bit_length()
    missing = size - width
    mix = jnp.pad(mix, [(0, 0)] * len(lead) + [(0, missing)] * 2)
    inverse = jnp.ones((*lead, size, 1, 1), mix.dtype)  # of every block
    half = 1
    while half < size:
        pairs = size // (2 * half)
        below = _on_diagonal(mix, pairs)[..., half:, :half]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -dot("...ac,...cd,...de->...ae", lower, below, upper)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
                jnp.concatenate([corner, lower], axis=-1),
            ],
            axis=-2,
        )
        half *= 2
    return inverse[..., 0, :width, :width]


def _on_diagonal(x: Float[Array, "*lead W W"], blocks: int) -> jax.Array:
    """The square blocks on the diagonal, behind each other on a new axis."""
    *lead, width, _ = x.shape
    size = width // blocks
    cut = x.reshape(*lead, blocks, size, blocks, size)
    return jnp.einsum("...iaib->...iab", cut)
