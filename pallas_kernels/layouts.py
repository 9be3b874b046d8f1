"""How a cache lies in a TPU's memory.

A kernel takes its arrays one way round. The compiler chooses a layout for a cache from
all that is done with it. Where something else than the kernel decides, it copies the
whole cache before and after each round: seen with an update in place of a few slots,
whose rows came from a gather.
"""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Num

from pallas_kernels.window_attention.plan import LANES


def as_kernels_read(rows: Num[Array, "B H n *D"]) -> Num[Array, "B H n *D"]:
    """The same, laid out on a TPU as window attention reads the cache it goes into.

    Without channels they are scales, whose slots lie in lanes.
    """
    order = tuple(range(rows.ndim))
    if rows.ndim == 4 and rows.shape[3] % LANES:
        order = (0, 1, 3, 2)

    def laid_out(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(major_to_minor=order))

    return jax.lax.platform_dependent(rows, tpu=laid_out, default=lambda x: x)
