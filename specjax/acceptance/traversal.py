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

from specjax.acceptance.residual import law_of_children, normalised, without
from specjax.acceptance.walk import NO_CHILD, along, at_row, next_child
from specjax.decoding.draws import Draws
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Window


class Level(NamedTuple):
    """What is known at a row of the path; in a stack ``[B, P, ...]``, by depth."""

    alpha: Float[Array, "B *P"]  # probability of accepting the path to here
    p: Float[Array, "B *P V"]  # what is left of the target's law
    q: Float[Array, "B *P V"] | None  # what is left of the law of the children, if it
    # changes: with independent siblings it is the proposal's


class Place(NamedTuple):
    """Where the traversal stands; entries of a stack are by depth, the anchor first."""

    depth: Int[Array, " B"]
    rows: Int[Array, "B P"]  # the path to here
    tested: Int[Array, "B P"]  # the last child gone into
    levels: Level
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
            alpha = at_row(place.levels.alpha, place.depth)
            # a leaf is tested once, by the row it is; the anchor cannot be refused
            asked = leaf & (place.depth > 0)
            keeps = draws.accepts(alpha, jnp.ones_like(alpha), here, asked)
            kept = leaf & jnp.where(asked, keeps, True)
            back = leaf & ~kept
            tested = _put(place.tested, place.depth, down, child)
            entered, possible = _alpha_of(proposal, window, place, child)
            down = down & possible
            depth = place.depth + jnp.where(down, 1, jnp.where(back, -1, 0))
            left, below = _levels(
                proposal, window, laws, place, child, entered, back=back, down=down
            )
            return Place(
                depth=depth,
                rows=_put(place.rows, depth, down, child),
                tested=_put(tested, depth, down, child),
                # one write into each stack, or the loop would copy it
                levels=jax.tree.map(
                    lambda stack, up, on: _put(
                        stack, depth, back | down, _choose(back, up, on)
                    ),
                    place.levels,
                    left,
                    below,
                ),
                accepted=place.accepted | kept,
            )

        place = jax.lax.while_loop(lambda place: jnp.any(open_rows(place)), step, place)
        token = draws.token(at_row(place.levels.p, place.depth))
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
        levels=Level(
            alpha=jnp.ones((batch, slots), p.dtype),
            p=empty.at[:, 0].set(p),
            q=None if replaced else empty.at[:, 0].set(q),
        ),
        accepted=~running,
    )


def _alpha_of(
    proposal: Proposal, window: Window, place: Place, child: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """The probability of accepting the path on to the child, and whether its law can
    have drawn it: one that it cannot is passed over.
    """
    at = jnp.arange(child.shape[0], dtype=jnp.int32)
    token = at_row(window.tokens, child)
    levels, depth = place.levels, place.depth
    here = levels.p[at, depth, token]
    if levels.q is not None:
        mass = levels.q[at, depth, token]
    elif proposal.log_q is not None:
        row = at_row(place.rows, depth)
        mass = jnp.exp(proposal.log_q[at, row, token].astype(here.dtype))
    else:
        mass = jnp.zeros_like(here)
    possible = mass > 0
    ratio = here / jnp.where(possible, mass, 1)
    return jnp.minimum(1, at_row(levels.alpha, depth) * ratio), possible


def _levels(
    proposal: Proposal,
    window: Window,
    laws: Laws,
    place: Place,
    child: Int[Array, " B"],
    alpha: Float[Array, " B"],
    *,
    back: Bool[Array, " B"],
    down: Bool[Array, " B"],
) -> tuple[Level, Level]:
    """What is left at the parents of the rows that go back, and what stands at the
    children of those that go down: work over the vocabulary, and seldom both.
    """

    def left() -> Level:
        return _cut_off(proposal, window, place)

    def below() -> Level:
        p = laws.probs_at(jnp.maximum(child, 0))
        q = None if place.levels.q is None else _law_of_children(proposal, child, p)
        return Level(alpha, p, q)

    def nothing() -> Level:
        return jax.tree.map(lambda stack: jnp.zeros_like(stack[:, 0]), place.levels)

    return (
        jax.lax.cond(jnp.any(back), left, nothing),
        jax.lax.cond(jnp.any(down), below, nothing),
    )


def _cut_off(proposal: Proposal, window: Window, place: Place) -> Level:
    """The parent's level, once the leaf is cut off."""
    depth = jnp.maximum(place.depth - 1, 0)
    token = at_row(window.tokens, at_row(place.rows, place.depth))
    alpha, p, q = jax.tree.map(lambda stack: at_row(stack, depth), place.levels)
    if q is None:
        q = _law_of_children(proposal, at_row(place.rows, depth), p)
    left = jnp.maximum(alpha[:, None] * p - q, 0)
    mass = left.sum(axis=-1)
    room = mass + 1 - alpha
    # no room: alpha is 1 and nothing is left, so p and q are equal up to rounding
    # (not "room > 0": a NaN must not count as certainty)
    certain = room <= 0
    used = normalised(without(q, token), otherwise=0 * q)
    return Level(
        alpha=jnp.where(certain, 1, mass / jnp.where(certain, 1, room)),
        p=normalised(left, otherwise=p),
        q=None if place.levels.q is None else used,
    )


def _law_of_children(
    proposal: Proposal, rows: Int[Array, " B"], p: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """Zero where nothing is ever drafted: a drafter of no nodes fits every rule."""
    if proposal.log_q is None:
        return jnp.zeros_like(p)
    return law_of_children(proposal, jnp.maximum(rows, 0), p)


def _choose(first: Bool[Array, " B"], a: Array, b: Array) -> Array:
    """Row by row, ``a`` or ``b``."""
    return jnp.where(first.reshape(-1, *[1] * (a.ndim - 1)), a, b)


def _put(
    stack: Array, depth: Int[Array, " B"], rows: Bool[Array, " B"], value: Array
) -> Array:
    """Write one entry of the stack, for some batch rows."""
    at = jnp.arange(stack.shape[0], dtype=jnp.int32)
    # an index beyond the stack is dropped
    slot = jnp.where(rows, depth, stack.shape[1])
    return stack.at[at, slot].set(value, mode="drop")
