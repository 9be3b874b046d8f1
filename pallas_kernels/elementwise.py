"""Elementwise functions whose bits do not depend on where an element stands.

XLA's CPU backend takes what is left of an array behind its last whole vector by other
code. Of ``exp``, and of all that is made of it, that code rounds otherwise (seen in JAX
0.12): the last elements of a small array, which is to say the last row of a batch, then
have bits of their own. Here arrays are made up to whole vectors first. Arrays whose
last axis is whole already, as the channels of real models are, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LANES = 16
"""Numbers in the widest vector, of float32 and narrower types."""


def whole(
    function: Callable[[jax.Array], jax.Array],
    x: Float[Array, "*lead n"],
    fill: float = 0.0,
) -> Float[Array, "*lead n"]:
    """``function(x)``, worked out on whole vectors; ``fill`` stands in what is added.

    The function may reduce over the last axis if ``fill`` does not count there.
    """
    size = x.shape[-1]
    missing = -size % LANES
    if missing == 0:
        return function(x)
    widths = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    wide = jnp.pad(x, widths, constant_values=fill)
    # else XLA pads and cuts around the function, and works it out on the narrow array
    done = function(jax.lax.optimization_barrier(wide))
    return jax.lax.optimization_barrier(done)[..., :size]
