"""Random numbers as a function of (row seed, absolute position, stream).

There is no evolving key, and no batch, row, padding or device in any key.

- **By the token's position** (``row_keys``): the target's own noise. The token at
  position ``t`` is drawn with it in whatever round ``t`` is reached, behind whatever
  drafts: the coupled rule's output is one function of the seed.
- **By the round** (``round_keys``): drafts, accept tests and residual draws. A round
  is named by the position of its anchor, which no other round of the row shares, and a
  draw by its stream and node. Were draft noise keyed by the token's position, a
  later round would draw a position again with noise that an earlier round has looked
  at: block and traversal verification weigh drafts beyond the ones they keep, so what
  they keep says something about that noise, and the next tokens would be biased.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.decoding.argmax import first_argmax
from specjax.decoding.threefry import bits_of


class Stream(enum.IntEnum):
    """Independent uses of randomness at one position.

    Sharing a stream between drafting and an accept or residual draw biases the output
    (except under the coupled rule, which is built on it), so each use has its own.
    """

    TARGET = 0  # plain sampling, and the coupled rule; keyed by the token's position
    DRAFT = 1  # these three are keyed by the round
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


def round_keys(
    seeds: UInt32[Array, " B"],
    anchors: Int[Array, " B"],
    stream: Stream,
    nodes: Int[Array, " B"],
) -> jax.Array:
    """One key a row for a draw of one round: ``row_keys`` of the anchor's position,
    and the node folded in.
    """
    return jax.vmap(jax.random.fold_in)(row_keys(seeds, anchors, stream), nodes)


def gumbel(
    seeds: UInt32[Array, " B"],
    positions: Int[Array, " B"],
    size: int,
    stream: Stream = Stream.TARGET,
) -> Float[Array, "B size"]:
    """Standard Gumbel noise for the tokens at these positions."""
    return gumbel_of(row_keys(seeds, positions, stream), size)


def gumbel_of(keys: jax.Array, size: int) -> Float[Array, "B size"]:
    """Standard Gumbel noise in float32, ``-log(-log1p(-v))`` with 32-bit uniform ``v``.

    The form keeps the upper tail: ``v`` goes down to ``2**-33``, so a token whose
    probability is far below float32's rounding of 1 can still win an ``argmax``.
    """
    bits = bits_of(keys, size)
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    # float32 rounds the largest bits to 1, where the logarithm ends
    uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def uniform_of(keys: jax.Array) -> Float[Array, " B"]:
    """Uniform numbers in [0, 1), multiples of ``2**-24``: never 1, and 0 at times."""
    bits = bits_of(keys, 1)[:, 0]
    return (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)


def sample(
    scores: Float[Array, "B V"], seeds: UInt32[Array, " B"], positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The coupled draw: one token a row from an unnormalised log-law.

    A drafter that draws with it uses the target's own noise, and so agrees with the
    target more often than with noise of its own.
    """
    noise = gumbel(seeds, positions, scores.shape[-1], Stream.TARGET)
    return first_argmax(scores + noise)
