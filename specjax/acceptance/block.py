"""Block verification: a chain accepted as a whole, not token by token.

(Sun et al., "Block Verification Accelerates Speculative Decoding", 2403.10444.) It
keeps the target's law and accepts at least as many drafts, in the mean, as testing them
one by one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.acceptance.residual import law_of_children, mass_of, normalised, without
from specjax.acceptance.walk import along
from specjax.decoding.draws import Draws
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Window


class Block(struct.PyTreeNode):
    """The longest prefix whose own independent test holds.

    With ``P_0 = 1`` and ``P_i = min(1, P_{i-1} p(d_i) / q(d_i))``, prefix ``i`` of
    ``n`` drafts passes with probability ``h_i = s_i / (s_i + 1 - P_i)``, where ``s_i``
    is the mass of ``max(P_i p - q, 0)`` for the laws behind draft ``i``, and ``h_n =
    P_n``. The longest prefix that passes is kept (the empty one always does), and the
    token comes from that residual, or from the target's law after all ``n``.
    """

    name = "block"
    takes = frozenset({ProposalLaw.DETERMINISTIC, ProposalLaw.INDEPENDENT})
    chains_only = True
    same_tokens = False

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """One pass down the chain for the tests, then one residual draw."""
        batch = window.tokens.shape[0]
        count = chain_lengths(proposal, window)

        def step(carry, row):
            weight, best, best_weight = carry
            rows = jnp.broadcast_to(row, (batch,))
            left, last = _left(proposal, window, laws, rows, weight, count)
            mass = left.sum(axis=-1)
            room = mass + 1 - weight
            # not "room > 0": a NaN must not count as certainty
            certain = room <= 0
            passes = jnp.where(certain, 1, mass / jnp.where(certain, 1, room))
            passes = jnp.where(last, weight, passes)
            asked = (row > 0) & (rows <= count)
            kept = draws.accepts(passes, jnp.ones_like(passes), rows, asked)
            kept = jnp.where(asked, kept, row == 0)
            best = jnp.where(kept, rows, best)
            best_weight = jnp.where(kept, weight, best_weight)
            weight = _next_weight(proposal, window, laws, rows, weight)
            return (weight, best, best_weight), None

        one = jnp.ones_like(laws.probs_at(jnp.zeros((batch,), jnp.int32))[:, 0])
        none = jnp.zeros((batch,), jnp.int32)
        steps = jnp.arange(min(max_depth + 1, window.width), dtype=jnp.int32)
        (_, best, weight), _ = jax.lax.scan(step, (one, none, one), steps)
        left, _ = _left(proposal, window, laws, best, weight, count)
        token = draws.token(normalised(left, otherwise=laws.probs_at(best)))
        path = jnp.arange(max_depth + 1, dtype=jnp.int32)
        num = jnp.where(window.valid[:, 0], best + 1, 0)
        return along(window, jnp.broadcast_to(path, (batch, len(path))), num, token)


def chain_lengths(proposal: Proposal, window: Window) -> Int[Array, " B"]:
    """How many drafts form an unbroken valid chain behind the anchor."""
    nodes = proposal.parents.shape[1]
    in_chain = proposal.parents == jnp.arange(nodes, dtype=jnp.int32) - 1
    unbroken = jnp.cumprod((in_chain & window.valid[:, 1:]).astype(jnp.int32), axis=1)
    return unbroken.sum(axis=1, dtype=jnp.int32)


def _left(
    proposal: Proposal,
    window: Window,
    laws: Laws,
    rows: Int[Array, " B"],
    weight: Float[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], Bool[Array, " B"]]:
    """``max(P p - q, 0)`` behind these rows, or ``p`` behind the last draft."""
    p = laws.probs_at(rows)
    last = rows >= count
    if proposal.log_q is None:
        token = _draft(window, rows)
        left = weight[:, None] * without(p, token)
    else:
        q = law_of_children(proposal, rows, p)
        left = jnp.maximum(weight[:, None] * p - q, 0)
    return jnp.where(last[:, None], p, left), last


def _next_weight(
    proposal: Proposal,
    window: Window,
    laws: Laws,
    rows: Int[Array, " B"],
    weight: Float[Array, " B"],
) -> Float[Array, " B"]:
    """``P`` with the draft behind these rows taken in."""
    token = _draft(window, rows)
    p = laws.probs_at(rows)
    ratio = mass_of(p, token)
    if proposal.log_q is not None:
        q = mass_of(law_of_children(proposal, rows, p), token)
        ratio = jnp.where(q > 0, ratio / jnp.where(q > 0, q, 1), 0)
    return jnp.minimum(1, weight * ratio)


def _draft(window: Window, rows: Int[Array, " B"]) -> Int[Array, " B"]:
    """The chain's token behind these rows (any, behind the last one)."""
    ahead = jnp.minimum(rows + 1, window.width - 1)
    return jnp.take_along_axis(window.tokens, ahead[:, None], axis=1, mode="clip")[:, 0]
