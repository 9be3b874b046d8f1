"""Time on a device, and the time that its memory alone would take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 5


def seconds_of(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    calls: int = 64,
    *,
    carried: Callable[[Any], jax.Array] | None = None,
) -> float:
    """Median time of one call, of several that wait for each other on the device.

    The calls stand in one program, so that the time to launch one does not count. Each
    takes its first array, which should be small, with nothing added: what is added is
    0, which the compiler cannot know. Where a call writes its first array in place,
    ``carried`` picks the new one from what it returns, and the next call takes that:
    the old one would have to be copied. All that a call returns is worked out whole.
    """

    def chain(first: jax.Array, rest: tuple[Any, ...]) -> Any:
        def one(_: jax.Array, before: Any) -> Any:
            x, total = before
            outs = jax.lax.optimization_barrier(function(x, *rest))
            leaves = jax.tree.leaves(outs)
            seen = jnp.stack([jnp.ravel(out)[0].astype(jnp.float32) for out in leaves])
            add = (seen.sum() * 0).astype(x.dtype)
            after = x + add if carried is None else carried(outs)
            return after, total + seen.sum()

        return jax.lax.fori_loop(0, calls, one, (first, jnp.float32(0)))

    first, *rest = arguments
    run = jax.jit(chain)
    jax.block_until_ready(run(first, tuple(rest)))  # compiles
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(first, tuple(rest)))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / calls


def bandwidth(size: int = 1 << 30) -> float:
    """Bytes a second that the device reads, from a sum over ``size`` bytes."""
    x = jnp.ones((size // 4 // 1024, 1024), jnp.float32)
    return size / seconds_of(lambda c, x: c + jnp.sum(x * c), (jnp.float32(0), x), 8)
