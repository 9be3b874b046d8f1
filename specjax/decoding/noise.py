"""Random numbers as a function of (row seed, absolute position, stream).

There is no evolving key. The noise for the token at position ``t`` of a row depends on
that row's seed and on ``t`` alone, so it is the same whatever the batch, the row, the
padding, the number of drafts or the round in which the token is reached.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.decoding.argmax import first_argmax


class Stream(enum.IntEnum):
    """Independent uses of randomness at one position.

    Sharing a stream between drafting and an accept or residual draw biases the output
    (except under the coupled rule, which is built on it), so each use has its own.
    """

    TARGET = 0  # plain sampling, and the coupled rule
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def row_keys(
    seeds: UInt32[Array, " B"], positions: Int[Array, " B"], stream: Stream
) -> jax.Array:
    """One key a row: ``fold_in(fold_in(key(seed), position), stream)``, threefry."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, position), int(stream))

    return jax.vmap(one)(seeds, positions)


def gumbel(
    seeds: UInt32[Array, " B"],
    positions: Int[Array, " B"],
    size: int,
    stream: Stream = Stream.TARGET,
) -> Float[Array, "B size"]:
    """Standard Gumbel noise in float32, ``-log(-log1p(-v))`` with 32-bit uniform ``v``.

    The form keeps the upper tail: ``v`` goes down to ``2**-33``, so a token whose
    probability is far below float32's rounding of 1 can still win an ``argmax``.
    """
    keys = row_keys(seeds, positions, stream)
    bits = jax.vmap(lambda key: jax.random.bits(key, (size,), jnp.uint32))(keys)
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    # float32 rounds the largest bits to 1, where the logarithm ends
    uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def sample(
    scores: Float[Array, "B V"], seeds: UInt32[Array, " B"], positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The coupled draw: one token a row from an unnormalised log-law.

    A drafter that draws with it uses the target's own noise, and so agrees with the
    target more often than with noise of its own.
    """
    noise = gumbel(seeds, positions, scores.shape[-1], Stream.TARGET)
    return first_argmax(scores + noise)
