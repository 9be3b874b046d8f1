"""Rejection from the top down: children tested in turn, each against what is left.

At a row with the target's law p, a child x drawn from q is kept with probability
min(1, p(x) / q(x)). If it is refused, p becomes the residual ``max(p - q, 0)``,
normalised, and the next sibling is tested against that; when none is left, the token
is drawn from what p has become. What changes from law to law is q:

- one child a row: speculative sampling (Leviathan, Kalman, Matias, 2211.17192; Chen et
  al., 2302.01318);
- i.i.d. children: q stays (SpecInfer's multi-round scheme, 2305.09781);
- children drawn without replacement: q loses the refused token and is normalised
  (recursive rejection sampling, 2402.14160);
- children that were not drawn: each has a q with all mass on itself, so it is kept with
  probability p(x), and a refusal takes x out of p.

The emitted law is the target's in each case; the tests enumerate it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.acceptance.residual import (
    law_of_children,
    mass_of,
    normalised,
    residual,
    without,
)
from specjax.acceptance.walk import (
    NO_CHILD,
    at_row,
    next_child,
    walk,
    with_last_token,
)
from specjax.decoding.draws import Draws
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Window


class TopDown(struct.PyTreeNode):
    """One algorithm under the names of the laws it is exact for."""

    same_tokens = False

    name: str = struct.field(pytree_node=False)
    takes: frozenset[ProposalLaw] = struct.field(pytree_node=False)

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """Walk down while a child is kept; then draw from what is left."""
        replaced = ProposalLaw.WITHOUT_REPLACEMENT not in self.takes

        def visit(rows, depths, walking, last):
            p = laws.probs_at(rows)
            child, p = _test_children(
                proposal, window, draws, rows, walking, p, replaced=replaced
            )
            ends = walking & (child == NO_CHILD)
            last = jnp.where(ends[:, None], p, last)
            return child, at_row(window.tokens, child), last

        none = jnp.zeros_like(laws.probs_at(jnp.zeros_like(window.tokens[:, 0])))
        acceptance, last = walk(window, visit, none, max_depth=max_depth)
        return with_last_token(acceptance, draws.token(last))


def _test_children(
    proposal: Proposal,
    window: Window,
    draws: Draws,
    rows: jax.Array,
    walking: jax.Array,
    p: Float[Array, "B V"],
    *,
    replaced: bool,
) -> tuple[jax.Array, Float[Array, "B V"]]:
    """The child that is kept, or ``NO_CHILD`` and what is left of ``p``."""
    drawn = proposal.log_q is not None
    q = law_of_children(proposal, rows, p) if drawn else None
    none = jnp.full_like(rows, NO_CHILD)
    first = next_child(proposal, window, rows, rows)

    def testing(state):
        child, kept, *_ = state
        return jnp.any(walking & (kept == NO_CHILD) & (child != NO_CHILD))

    def test(state):
        child, kept, p, q = state
        token = at_row(window.tokens, child)
        tested = walking & (kept == NO_CHILD) & (child != NO_CHILD)
        if q is None:
            mass = jnp.ones_like(p[:, 0])
            left = normalised(without(p, token), otherwise=p)
        else:
            mass = mass_of(q, token)
            # what q cannot have drawn was not drawn: no test, and nothing is taken off
            tested = tested & (mass > 0)
            left = residual(p, q)
        keeps = draws.accepts(mass_of(p, token), mass, child, tested)
        kept = jnp.where(tested & keeps, child, kept)
        refused = (tested & ~keeps)[:, None]
        p = jnp.where(refused, left, p)
        if q is not None and not replaced:
            used = normalised(without(q, token), otherwise=jnp.zeros_like(q))
            q = jnp.where(refused, used, q)
        after = next_child(proposal, window, rows, jnp.maximum(child, rows))
        return jnp.where(child == NO_CHILD, NO_CHILD, after), kept, p, q

    state = (first, none, p, q)
    _, kept, p, _ = jax.lax.while_loop(testing, test, state)
    return kept, p


def rejection() -> TopDown:
    """At most one child a row."""
    takes = {ProposalLaw.DETERMINISTIC, ProposalLaw.INDEPENDENT}
    return TopDown("rejection", frozenset(takes))


def multi_round() -> TopDown:
    """Children drawn independently from one law."""
    takes = {ProposalLaw.INDEPENDENT, ProposalLaw.IID_CHILDREN}
    return TopDown("multi-round", frozenset(takes))


def without_replacement() -> TopDown:
    """Children drawn in turn from one law, none of them twice."""
    return TopDown("without-replacement", frozenset({ProposalLaw.WITHOUT_REPLACEMENT}))


def deterministic_children() -> TopDown:
    """Children that were chosen, not drawn: look-up, most probable tokens."""
    return TopDown("deterministic-children", frozenset({ProposalLaw.DETERMINISTIC}))
