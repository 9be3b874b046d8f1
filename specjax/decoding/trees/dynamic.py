"""Trees chosen on the device in every round, by what the drafter thinks of its drafts.

A node's score is the log-probability of its path, the sum of the drafter's
log-probabilities along it; a tree is the nodes with the largest scores. They are closed
under parent: a child scores no more than its parent, also in floating point, and of
equal scores the lower index wins (``lax.top_k`` promises it), which is the parent's.

These are trees of deterministic drafts: tokens are the most probable ones, not samples.
A log-probability of -inf stands for "no such candidate", and so does NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.pairs import PairError
from specjax.decoding.types import ANCHOR, Proposal
from specjax.decoding.windows import ancestor_mask


class ScoredTree(struct.PyTreeNode):
    """The chosen nodes, by depth; nodes that do not exist stand last."""

    tokens: jax.Array  # [B, N] int32
    parents: jax.Array  # [B, N] int32 node index, or ANCHOR
    scores: jax.Array  # [B, N] float32: log-probability of the path
    num_nodes: jax.Array  # [B] int32: the nodes whose score is finite

    @property
    def proposal(self) -> Proposal:
        """The tree without its scores."""
        return Proposal(self.tokens, self.parents, self.num_nodes)


class Candidates(struct.PyTreeNode):
    """Nodes to choose from, parents before children and by depth."""

    tokens: jax.Array  # [B, C] int32
    parents: jax.Array  # [B, C] int32 candidate index, or ANCHOR
    scores: jax.Array  # [B, C] float32: log-probability of the path


def depths_of(parents: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Steps below the anchor, 1 for its children."""
    ancestors = ancestor_mask(parents + 1)
    return jnp.sum(ancestors, axis=-1, dtype=jnp.int32)[:, 1:] - 1


def choose(candidates: Candidates, num_nodes: int) -> ScoredTree:
    """The ``num_nodes`` candidates of largest score, in the order they had.

    Candidates that do not exist are chosen only when there is nothing else.
    """
    available = candidates.scores.shape[1]
    if num_nodes > available:
        raise ValueError(
            f"num_nodes = {num_nodes}, but there are only {available} candidates"
        )
    scores, picked = jax.lax.top_k(candidates.scores, num_nodes)
    # By index, so that parents stand before children, but first those that exist.
    missing = (scores == -jnp.inf).astype(jnp.int32)
    picked = jnp.sort(picked + missing * available, axis=1) % available
    parents = _take(candidates.parents, picked)
    # Where in the chosen set a parent stands; the anchor stands nowhere.
    is_parent = parents[:, :, None] == picked[:, None, :]
    places = jnp.arange(num_nodes, dtype=jnp.int32)
    return ScoredTree(
        tokens=_take(candidates.tokens, picked),
        parents=jnp.max(jnp.where(is_parent, places, ANCHOR), axis=-1, initial=ANCHOR),
        scores=_take(candidates.scores, picked),
        num_nodes=num_nodes - jnp.sum(missing, axis=1, dtype=jnp.int32),
    )


def from_marginals(
    log_probs: Float[Array, "B K M"], tokens: Int[Array, "B K M"], num_nodes: int
) -> ScoredTree:
    """The best tree of a drafter whose positions do not see each other.

    ``log_probs[b, d, r]`` is the log-probability that ``tokens[b, d, r]`` stands at
    depth ``d + 1``, whatever stands before it: block-diffusion drafters, as in DDTree
    (2604.12989). Of all ``M + M^2 + ... + M^K`` paths these are the ``num_nodes`` with
    the largest scores; of equal ones the shallower comes first, then the one whose path
    has the lower ranks.

    DDTree walks a heap. Here every depth keeps its ``num_nodes`` best nodes and only
    those are expanded, which loses nothing: call the best nodes of all the chosen ones.
    A chosen node's parent is chosen, for it comes before its child in the order. If the
    chosen nodes of one depth were kept, those of the next are therefore among the
    candidates there; and fewer than ``num_nodes`` nodes come before a chosen one, so it
    is kept as well. Kept nodes stand in the order of their paths' ranks, and therefore
    so do their children: the lower index is the path with the lower ranks.
    """
    log_probs = _log_probs(log_probs)
    batch, depths, width = log_probs.shape
    levels = []
    above, first = jnp.zeros((batch, 1), jnp.float32), ANCHOR  # scores, and their index
    for depth in range(depths):
        size = above.shape[1] * width
        scores = (above[:, :, None] + log_probs[:, depth, None, :]).reshape(batch, size)
        picked = jnp.sort(jax.lax.top_k(scores, min(num_nodes, size))[1], axis=1)
        level = Candidates(
            tokens=_take(tokens[:, depth], picked % width),
            parents=first + picked // width,
            scores=_take(scores, picked),
        )
        levels.append(level)
        above, first = level.scores, first + above.shape[1]
    return choose(_joined(levels), num_nodes)


class Expansion(struct.PyTreeNode):
    """A tree under construction as in EAGLE-2 (2406.16858): all nodes seen so far.

    The beam is the ``k`` nodes of the last depth that are fed to the drafter next, the
    best first. Its hidden states are those of the rows they came from:
    ``hidden[b, beam_rows[b]]``, and so is its mask: what row ``beam_rows[b, i]`` sees,
    and itself.
    """

    candidates: Candidates
    beam: jax.Array  # [B, k] int32 candidate index
    beam_rows: jax.Array  # [B, k] int32: the parent's row in the pass before

    @property
    def beam_tokens(self) -> jax.Array:
        """``[B, k]`` int32: what to feed next."""
        return _take(self.candidates.tokens, self.beam)


def start(log_probs: Float[Array, "B V"], k: int) -> Expansion:
    """The ``k`` most probable children of the anchor, all of them in the beam."""
    scores, tokens = _most_probable(log_probs, k)
    batch = tokens.shape[0]
    rows = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    anchors = jnp.full((batch, k), ANCHOR, jnp.int32)
    return Expansion(
        Candidates(tokens, anchors, scores), beam=rows, beam_rows=jnp.zeros_like(rows)
    )


def grow(expansion: Expansion, log_probs: Float[Array, "B k V"]) -> Expansion:
    """The ``k`` most probable children of every node in the beam.

    All ``k * k`` become candidates; the best ``k`` of them are the next beam.
    """
    old = expansion.candidates
    batch, k = expansion.beam.shape
    if log_probs.shape[1] != k:
        raise ValueError(f"{log_probs.shape[1]} rows for a beam of {k} nodes")
    log_probs, tokens = _most_probable(log_probs, k)
    scores = _take(old.scores, expansion.beam)[:, :, None] + log_probs
    new = Candidates(
        tokens=tokens.reshape(batch, k * k),
        parents=jnp.repeat(expansion.beam, k, axis=1),
        scores=scores.reshape(batch, k * k),
    )
    picked = jax.lax.top_k(new.scores, k)[1]
    return Expansion(
        candidates=_joined([old, new]),
        beam=old.scores.shape[1] + picked,
        beam_rows=picked // k,
    )


def rerank(expansion: Expansion, num_nodes: int) -> ScoredTree:
    """The ``num_nodes`` best of all candidates, whether they were expanded or not."""
    return choose(expansion.candidates, num_nodes)


def _most_probable(
    log_probs: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    vocab = log_probs.shape[-1]
    if not 1 <= k <= vocab:
        raise PairError(
            f"top_k = {k} children of a node: a vocabulary of {vocab} has 1 to {vocab}"
        )
    values, tokens = jax.lax.top_k(_log_probs(log_probs), k)
    return values, tokens


def _log_probs(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """In float32, with nothing in it that could lift a child above its parent.

    ``lax.top_k`` places -0 below 0, and subnormal sums are -0 on some devices: both
    become 0 here, and so does what is above it.
    """
    x = x.astype(jnp.float32)
    smallest = jnp.finfo(jnp.float32).tiny
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(x <= -smallest, x, 0.0))


def _joined(parts: list[Candidates]) -> Candidates:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)


def _take(x: Array, index: Int[Array, "B n"]) -> Array:
    return jnp.take_along_axis(x, index, axis=1, mode="clip")
