"""Traversal verification: a tree of draws, tested from its leaves up.

(Weng et al., "Traversal Verification for Speculative Tree Decoding", 2505.12398.) A
path is accepted or refused as a whole at its leaf; a refused leaf is cut off, its
parent's law becomes what is left, and the next leaf is tested. On a chain it is block
verification. It keeps the target's law, and on average accepts more than rejection from
the top down.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.acceptance.residual import law_of_children, mass_of, normalised, without
from specjax.acceptance.walk import NO_CHILD, along, at_row, next_child
from specjax.decoding.draws import Draws
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Window


class Place(NamedTuple):
    """Where the traversal stands; entries of a stack are by depth, the anchor first."""

    depth: Int[Array, " B"]
    rows: Int[Array, "B P"]  # the path to here
    tested: Int[Array, "B P"]  # the last child gone into
    alpha: Float[Array, "B P"]  # probability of accepting the path to here
    p: Float[Array, "B P V"]  # what is left of the target's law
    q: Float[Array, "B P V"] | None  # what is left of the law of the children, if it
    # changes: with independent siblings it is the proposal's
    accepted: Bool[Array, " B"]


class Traversal(struct.PyTreeNode):
    """Leaf first. ``alpha`` of a child is ``min(1, alpha(parent) p(x) / q(x))``.

    A leaf is accepted with its alpha. If it is not, then at its parent
    ``r = max(alpha p - q, 0)`` with mass ``s`` replaces p (normalised) and
    ``s / (s + 1 - alpha)`` replaces alpha; without replacement, x is taken out of q.
    The anchor's alpha is 1 throughout, so the walk ends there at the latest.
    """

    replaced: bool = struct.field(pytree_node=False, default=True)
    same_tokens = False

    @property
    def name(self) -> str:
        """By how siblings were drawn."""
        return "traversal" if self.replaced else "traversal-without-replacement"

    @property
    def takes(self) -> frozenset[ProposalLaw]:
        """The laws of drawn drafts: the true law of each draw is needed."""
        if self.replaced:
            return frozenset({ProposalLaw.INDEPENDENT, ProposalLaw.IID_CHILDREN})
        return frozenset({ProposalLaw.WITHOUT_REPLACEMENT})

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """Go down to leaves and back up until one is accepted."""
        running = window.valid[:, 0]
        place = _start(proposal, laws, running, max_depth, replaced=self.replaced)

        def open_rows(place: Place) -> Bool[Array, " B"]:
            return running & ~place.accepted

        def step(place: Place) -> Place:
            here = at_row(place.rows, place.depth)
            after = jnp.maximum(at_row(place.tested, place.depth), here)
            child = next_child(proposal, window, here, after)
            down = open_rows(place) & (child != NO_CHILD) & (place.depth < max_depth)
            leaf = open_rows(place) & ~down
            alpha = at_row(place.alpha, place.depth)
            # a leaf is tested once, by the row it is; the anchor cannot be refused
            asked = leaf & (place.depth > 0)
            keeps = draws.accepts(alpha, jnp.ones_like(alpha), here, asked)
            kept = leaf & jnp.where(asked, keeps, True)
            back = leaf & ~kept
            place = place._replace(accepted=place.accepted | kept)
            # each is work over the vocabulary, and seldom are both needed
            place = jax.lax.cond(
                jnp.any(back),
                lambda p: _go_back(proposal, window, p, back),
                _stay,
                place,
            )
            return jax.lax.cond(
                jnp.any(down),
                lambda p: _go_down(proposal, window, laws, p, child, down),
                _stay,
                place,
            )

        place = jax.lax.while_loop(lambda place: jnp.any(open_rows(place)), step, place)
        token = draws.token(at_row(place.p, place.depth))
        num = jnp.where(running, place.depth + 1, 0)
        return along(window, place.rows, num, token)


def _start(
    proposal: Proposal,
    laws: Laws,
    running: Bool[Array, " B"],
    max_depth: int,
    *,
    replaced: bool,
) -> Place:
    """At the anchor."""
    batch = running.shape[0]
    anchor = jnp.zeros((batch,), jnp.int32)
    p = laws.probs_at(anchor)
    q = _law_of_children(proposal, anchor, p)
    slots = max_depth + 1
    stack = jnp.zeros((batch, slots), jnp.int32)
    empty = jnp.zeros((batch, slots, p.shape[-1]), p.dtype)
    return Place(
        depth=anchor,
        rows=stack,
        tested=stack,
        alpha=jnp.ones((batch, slots), p.dtype),
        p=empty.at[:, 0].set(p),
        q=None if replaced else empty.at[:, 0].set(q),
        accepted=~running,
    )


def _stay(place: Place) -> Place:
    return place


def _q_at(
    proposal: Proposal, place: Place, depth: Int[Array, " B"], p: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """The law of the untested children of the path's row at this depth."""
    if place.q is not None:
        return at_row(place.q, depth)
    return _law_of_children(proposal, at_row(place.rows, depth), p)


def _go_back(
    proposal: Proposal, window: Window, place: Place, back: Bool[Array, " B"]
) -> Place:
    """Cut the leaf off, and put what is left at its parent."""
    depth = jnp.maximum(place.depth - 1, 0)
    token = at_row(window.tokens, at_row(place.rows, place.depth))
    p = at_row(place.p, depth)
    q = _q_at(proposal, place, depth, p)
    alpha = at_row(place.alpha, depth)
    left = jnp.maximum(alpha[:, None] * p - q, 0)
    mass = left.sum(axis=-1)
    room = mass + 1 - alpha
    # no room: alpha is 1 and nothing is left, so p and q are equal up to rounding
    # (not "room > 0": a NaN must not count as certainty)
    certain = room <= 0
    new_alpha = jnp.where(certain, 1, mass / jnp.where(certain, 1, room))
    new_q = place.q
    if new_q is not None:
        used = normalised(without(q, token), otherwise=0 * q)
        new_q = _put(new_q, depth, back, used)
    return place._replace(
        depth=jnp.where(back, depth, place.depth),
        alpha=_put(place.alpha, depth, back, new_alpha),
        p=_put(place.p, depth, back, normalised(left, otherwise=p)),
        q=new_q,
    )


def _go_down(
    proposal: Proposal,
    window: Window,
    laws: Laws,
    place: Place,
    child: Int[Array, " B"],
    down: Bool[Array, " B"],
) -> Place:
    """Onto the child; one that its law cannot have drawn is passed over."""
    token = at_row(window.tokens, child)
    here = at_row(place.p, place.depth)
    mass = mass_of(_q_at(proposal, place, place.depth, here), token)
    ratio = mass_of(here, token)
    ratio = ratio / jnp.where(mass > 0, mass, 1)
    alpha = jnp.minimum(1, at_row(place.alpha, place.depth) * ratio)
    tested = _put(place.tested, place.depth, down, child)
    down = down & (mass > 0)
    depth = jnp.where(down, place.depth + 1, place.depth)
    child = jnp.maximum(child, 0)
    p = laws.probs_at(child)
    q = place.q
    if q is not None:
        q = _put(q, depth, down, _law_of_children(proposal, child, p))
    return place._replace(
        depth=depth,
        rows=_put(place.rows, depth, down, child),
        tested=_put(tested, depth, down, child),
        alpha=_put(place.alpha, depth, down, alpha),
        p=_put(place.p, depth, down, p),
        q=q,
    )


def _law_of_children(
    proposal: Proposal, rows: Int[Array, " B"], p: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """Zero where nothing is ever drafted: a drafter of no nodes fits every rule."""
    if proposal.log_q is None:
        return jnp.zeros_like(p)
    return law_of_children(proposal, rows, p)


def _put(
    stack: Array, depth: Int[Array, " B"], rows: Bool[Array, " B"], value: Array
) -> Array:
    """Write one entry of the stack, for some batch rows."""
    at = jnp.arange(stack.shape[0], dtype=jnp.int32)
    # an index beyond the stack is dropped
    slot = jnp.where(rows, depth, stack.shape[1])
    return stack.at[at, slot].set(value, mode="drop")
