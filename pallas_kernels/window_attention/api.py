"""Window attention, as the decoder calls it.

On a TPU it is a kernel where ``plan.refusal`` finds nothing against it, and elsewhere
the reference; ``platforms.choices()`` says which.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import platforms
from pallas_kernels.window_attention import reference, tpu
from pallas_kernels.window_attention.by_row import window_attention_by_row
from pallas_kernels.window_attention.plan import refusal

__all__ = ["window_attention", "window_attention_by_row"]

OPERATION = "window_attention"


def window_attention(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H Dv"],
    k_cache: Float[Array, "B H T D"],
    v_cache: Float[Array, "B H T Dv"],
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    *,
    scale: float,
    positions: Int[Array, "B W"] | None = None,
    slots: Int[Array, "B T"] | None = None,
    reach: int | None = None,
    chosen: tuple[Bool[Array, "B W T"], Bool[Array, "B W W"]] | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    softcap: float | None = None,
    spread: bool = False,
    implementation: platforms.Implementation = "auto",
) -> Float[Array, "B W Hq Dv"]:
    """As ``reference.window_attention``, by the platform's kernel if it has one.

    Pass one array for keys and values if they are the same: it is then read once.
    ``spread``: the batch or the heads lie on several devices. For ``implementation``
    see ``platforms.choose``.
    """
    shared = v is k and v_cache is k_cache
    options = tpu.Options(
        scale=scale,
        reach=reach,
        softcap=softcap,
        ring=slots is not None,
        shared=shared,
        with_lse=sinks is not None,
    )
    against = refusal(q, k_cache, v_cache, narrowed=chosen is not None)
    if spread:
        against = against or "its rows lie on several devices"

    def plain(*args: Any) -> jax.Array:
        q, k, v, k_cache, v_cache, lengths, ancestors, positions, slots, sinks = args
        return reference.window_attention(
            q,
            k,
            k if shared else v,
            k_cache,
            k_cache if shared else v_cache,
            lengths,
            ancestors,
            scale=scale,
            positions=positions,
            slots=slots,
            reach=reach,
            chosen=chosen,
            sinks=sinks,
            softcap=softcap,
        )

    return platforms.choose(
        OPERATION,
        (
            q,
            k,
            None if shared else v,
            k_cache,
            None if shared else v_cache,
            lengths,
            ancestors,
            positions,
            slots,
            sinks,
        ),
        reference=plain,
        kernels={
            "tpu": platforms.Kernel(
                functools.partial(tpu.window_attention, options=options), against
            )
        },
        implementation=implementation,
    )
