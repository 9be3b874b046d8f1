"""Logits to law: the one distribution function of the project.

Plain decoding, drafting and every acceptance rule use it, so that "the target's law"
means one thing. The order is bias, penalties, temperature, top-k, top-p, min-p, in
float32, row by row. Cut-offs are found by a search over thresholds: ties at the edge
are all kept, and nothing sorts the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.decoding.argmax import first_argmax
from specjax.decoding.types import Counts, Sampling, Window

MOST_SLICED_ROWS = 8
"""Larger batches would make the program long."""


class Laws(struct.PyTreeNode):
    """The target's laws of a window, worked out for the rows that are asked for.

    A rule that walks down the accepted path asks for as many rows as the path has, not
    for all ``W``: over a large vocabulary the laws cost more than the walk.
    """

    logits: jax.Array  # [B, W, V]
    window: Window
    sampling: Sampling
    counts: Counts | None
    counted: int = struct.field(pytree_node=False, default=1)
    """Leading rows whose tokens the counts hold already: of a round's window the
    anchor, of committed text all."""

    def logits_at(self, rows: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The target's own logits, before anything is applied to them."""
        picked = jnp.take_along_axis(
            self.logits, rows[:, None, None], axis=1, mode="clip"
        )
        return picked[:, 0].astype(jnp.float32)

    def adjusted_at(self, rows: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Logits with bias and penalties: the committed counts plus the ancestors'."""
        logits = self.logits_at(rows)
        if self.sampling.bias is not None:
            logits = logits + self.sampling.bias
        if self.counts is None or not self.sampling.has_penalties:
            return logits
        ancestors = jnp.take_along_axis(
            self.window.ancestors, rows[:, None, None], axis=1, mode="clip"
        )[:, 0]
        ancestors = ancestors & (jnp.arange(self.window.width) >= self.counted)
        return _with_penalties(
            logits, self.sampling, self.counts, self.window.tokens, ancestors
        )

    def best_at(self, rows: Int[Array, " B"]) -> Int[Array, " B"]:
        """The argmax of the adjusted logits, the lowest id among equals."""
        batch, width, size = self.logits.shape
        plain = self.sampling.bias is None and not self.sampling.has_penalties
        if not plain or batch > MOST_SLICED_ROWS:
            return first_argmax(self.adjusted_at(rows))
        # read where they lie: to gather the rows first costs as much as the argmax
        rows, zero = jnp.clip(rows, 0, width - 1), jnp.int32(0)
        best = []
        for b in range(batch):
            at = (jnp.int32(b), rows[b], zero)
            row = jax.lax.dynamic_slice(self.logits, at, (1, 1, size))[0]
            best.append(first_argmax(row.astype(jnp.float32)))
        return jnp.concatenate(best)

    def scores_at(self, rows: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The log-law up to a constant; ``-inf`` where it is zero."""
        return warp(self.adjusted_at(rows), self.sampling)

    def probs_at(self, rows: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The law."""
        return jax.nn.softmax(self.scores_at(rows), axis=-1)

    def log_probs_at(self, rows: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The normalised log-law."""
        return jax.nn.log_softmax(self.scores_at(rows), axis=-1)


def penalise(
    logits: Float[Array, "B M"],
    sampling: Sampling,
    in_prompt: Int[Array, "B M"],
    in_output: Int[Array, "B M"],
) -> Float[Array, "B M"]:
    """Penalties for given counts: repetition counts prompt and output (Keskar et al.,
    1909.05858), presence and frequency the output alone.
    """
    if sampling.repetition is not None:
        seen = (in_prompt + in_output) > 0
        factor = sampling.repetition[:, None]
        shrunk = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(seen, shrunk, logits)
    if sampling.frequency is not None:
        logits = logits - sampling.frequency[:, None] * in_output.astype(jnp.float32)
    if sampling.presence is not None:
        logits = logits - jnp.where(in_output > 0, sampling.presence[:, None], 0.0)
    return logits


def _with_penalties(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    counts: Counts,
    tokens: Int[Array, "B W"],
    ancestors: Bool[Array, "B W"],
) -> Float[Array, "B V"]:
    """Committed counts everywhere, then the ancestors' tokens at their own ids."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    same = (tokens[:, :, None] == tokens[:, None, :]) & ancestors[:, None, :]
    extra = same.sum(axis=-1, dtype=jnp.int32)
    at_tokens = penalise(
        logits[rows, tokens],
        sampling,
        counts.prompt[rows, tokens],
        counts.output[rows, tokens] + extra,
    )
    everywhere = penalise(logits, sampling, counts.prompt, counts.output)
    ids = jnp.where(ancestors, tokens, logits.shape[-1])
    return everywhere.at[rows, ids].set(at_tokens, mode="drop")


def warp(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Temperature and cut-offs. A row at temperature 0 gets all its mass on its argmax.

    The row is selected, not divided by a small number: ``1 / epsilon`` overflows.
    """
    best = first_argmax(logits)[:, None]
    is_best = jnp.arange(logits.shape[-1], dtype=jnp.int32) == best
    greedy = jnp.where(is_best, jnp.float32(0.0), -jnp.inf)
    if sampling.temperature is None:
        return greedy
    temperature = sampling.temperature[:, None]
    # measured from the top, so that a tiny temperature overflows to -inf, not to inf
    below = logits - logits.max(axis=-1, keepdims=True)
    scores = whole = below / jnp.where(temperature > 0, temperature, 1.0)
    if sampling.top_k is not None:
        scores = keep_top_k(scores, sampling.top_k)
    if sampling.top_p is not None:
        scores = keep_top_p(scores, sampling.top_p)
    if sampling.min_p is not None:
        floor = scores.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)[:, None]
        scores = jnp.where(scores >= floor, scores, -jnp.inf)
    # A cut-off at the top itself (top-k 1, min-p 1) compares a value with itself, and a
    # compiler may have worked the two out with different roundings.
    scores = jnp.where(is_best, whole, scores)
    return jnp.where(temperature > 0, scores, greedy)


def keep_top_k(scores: Float[Array, "B V"], k: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Keep the ``k`` largest scores of each row and all that tie with the last of them.

    ``k = 0`` keeps everything.
    """

    def enough(kept: jax.Array) -> jax.Array:
        return kept.sum(axis=-1, dtype=jnp.int32) >= k

    keys = _sortable(scores)
    threshold = _largest_threshold(keys, enough)
    kept = (keys >= threshold[:, None]) | (k <= 0)[:, None]
    return jnp.where(kept, scores, -jnp.inf)


def keep_top_p(
    scores: Float[Array, "B V"], p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Keep the fewest largest scores whose probability reaches ``p``, with all ties.

    ``p`` lies in (0, 1]; 1 keeps everything (Holtzman et al., 1904.09751).
    """
    probs = jax.nn.softmax(scores, axis=-1)

    def enough(kept: jax.Array) -> jax.Array:
        return jnp.where(kept, probs, 0.0).sum(axis=-1) >= p

    keys = _sortable(scores)
    threshold = _largest_threshold(keys, enough)
    kept = (keys >= threshold[:, None]) | (p >= 1)[:, None]
    return jnp.where(kept, scores, -jnp.inf)


def _sortable(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Unsigned integers in the order of the floats (-0 and 0 alike)."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(keys: UInt32[Array, "B V"], enough) -> UInt32[Array, " B"]:
    """The largest ``t`` for which ``enough(keys >= t)``, bit by bit from the top.

    ``enough`` must hold for ``t = 0`` or the answer is 0, which keeps everything.
    """

    def body(i: jax.Array, t: jax.Array) -> jax.Array:
        trial = t | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        return jnp.where(enough(keys >= trial[:, None]), trial, t)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(keys.shape[:1], jnp.uint32))
