"""The inverse of unit lower triangular matrices, by halves."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.delta_window.pairs import dot


def unit_lower_inverse(mix: Float[Array, "B H W W"]) -> Float[Array, "B H W W"]:
    """``(I + mix)^-1`` for strictly lower triangular ``mix``.

    The inverses ``X, Y`` of two neighbouring blocks on the diagonal, with ``A`` below
    the first, give the one of twice the size::

        [I + M  0    ]^-1 = [  X     0]
        [  A    I + N]      [-Y A X  Y]

    so ``log2 W`` steps of products do it, each over all blocks at once. For unit keys
    and ``beta`` in [0, 1] no entry of any of these inverses exceeds 1, and nothing
    large cancels. (Powers of ``mix``, which would do as well on paper, grow like
    binomials where keys repeat. A library solver was seen to hang on CPU when two of
    its calls ran at once.)
    """
    width = mix.shape[-1]
    size = 1 << (width - 1).bit_length()
    missing = size - width
    mix = jnp.pad(mix, [(0, 0), (0, 0), (0, missing), (0, missing)])
    lead = mix.shape[:2]
    inverse = jnp.ones((*lead, size, 1, 1), mix.dtype)  # of every block
    half = 1
    while half < size:
        pairs = size // (2 * half)
        blocks = mix.reshape(*lead, pairs, 2, half, pairs, 2, half)[
            :, :, :, 1, ..., 0, :
        ]
        below = jnp.einsum("bhiaic->bhiac", blocks)
        upper, lower = inverse[:, :, 0::2], inverse[:, :, 1::2]
        corner = -dot("bhiac,bhicd,bhide->bhiae", lower, below, upper)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
                jnp.concatenate([corner, lower], axis=-1),
            ],
            axis=-2,
        )
        half *= 2
    return inverse[:, :, 0, :width, :width]
