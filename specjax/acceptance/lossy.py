"""Rules that change what is decoded, for comparison with work that uses them.

Both keep drafts that the target might well have said, without the test that would make
the output its own. Their names begin with ``lossy`` wherever a rule is named.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.acceptance.residual import mass_of, normalised, without
from specjax.acceptance.walk import (
    NO_CHILD,
    along,
    at_row,
    next_child,
    parent_rows,
    walk,
    with_last_token,
)
from specjax.decoding.draws import Draws
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Window


class Typical(struct.PyTreeNode):
    """Typical acceptance (Medusa, 2401.10774): keep a draft x with
    ``p(x) > min(epsilon, delta exp(-H(p)))``, H the entropy of p in nats.

    The longest such path wins, and of equally long ones the most probable. The token
    behind it is drawn from the target's law.
    """

    epsilon: float = struct.field(pytree_node=False, default=0.09)
    delta: float = struct.field(pytree_node=False, default=0.3)
    name = "lossy-typical"
    takes = frozenset(ProposalLaw)
    same_tokens = False

    def __post_init__(self) -> None:
        for field in ("epsilon", "delta"):
            value = getattr(self, field)
            if isinstance(value, int | float) and not 0 <= value <= 1:
                raise ValueError(f"{field} = {value}: it must lie in [0, 1]")

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """Score every row by its parent's law, then take the best path."""
        batch, width = window.tokens.shape
        parents = parent_rows(proposal)

        def score(row):
            rows = jnp.broadcast_to(row, (batch,))
            p = laws.probs_at(at_row(parents, rows))
            entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0), axis=-1)
            mass = mass_of(p, at_row(window.tokens, rows))
            bound = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
            return mass > bound, jnp.log(mass)

        index = jnp.arange(width, dtype=jnp.int32)
        likely, log_mass = jax.lax.map(score, index)
        likely = (likely.T | (index == 0)) & window.valid
        log_mass = jnp.where(index == 0, 0, log_mass.T)
        on_path = window.ancestors
        whole = jnp.all(likely[:, None, :] | ~on_path, axis=-1)
        whole = whole & (window.depths <= max_depth)
        total = jnp.sum(jnp.where(on_path, log_mass[:, None, :], 0), axis=-1)
        longest = jnp.max(jnp.where(whole, window.depths, -1), axis=1)
        best = whole & (window.depths == longest[:, None])
        end = jnp.argmax(jnp.where(best, total, -jnp.inf), axis=1).astype(jnp.int32)
        token = draws.token(laws.probs_at(end))
        num = jnp.where(window.valid[:, 0], at_row(window.depths, end) + 1, 0)
        return along(window, path_to(window, end, max_depth), num, token)


def path_to(window: Window, end: Int[Array, " B"], max_depth: int) -> Int[Array, "B P"]:
    """The rows from the anchor down to row ``end``, by depth."""
    on_path = at_row(window.ancestors, end) & window.valid
    slots = jnp.arange(max_depth + 1, dtype=jnp.int32)
    at_depth = on_path[:, None, :] & (window.depths[:, None, :] == slots[:, None])
    return jnp.argmax(at_depth, axis=-1).astype(jnp.int32)


class Threshold(struct.PyTreeNode):
    """Thresholds of SGLang's tree kernel: with one number u for all siblings, a child
    is kept if ``u < c / accumulated``, c the mass of the children so far, or if its own
    probability is at least ``single``. Both at 1: exact for chosen children.
    """

    single: float = struct.field(pytree_node=False, default=0.5)
    accumulated: float = struct.field(pytree_node=False, default=0.8)
    name = "lossy-threshold"
    takes = frozenset({ProposalLaw.DETERMINISTIC})
    same_tokens = False

    def __post_init__(self) -> None:
        for field in ("single", "accumulated"):
            value = getattr(self, field)
            if isinstance(value, int | float) and not 0 < value <= 1:
                raise ValueError(f"{field} = {value}: it must lie in (0, 1]")

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

        def visit(rows, depths, walking, last):
            p = laws.probs_at(rows)
            child, left = self._level(proposal, window, draws, rows, walking, p)
            ends = walking & (child == NO_CHILD)
            left = normalised(left, otherwise=p)
            return (
                child,
                at_row(window.tokens, child),
                jnp.where(ends[:, None], left, last),
            )

        none = jnp.zeros_like(laws.probs_at(jnp.zeros_like(window.tokens[:, 0])))
        acceptance, last = walk(window, visit, none, max_depth=max_depth)
        return with_last_token(acceptance, draws.token(last))

    def _level(
        self,
        proposal: Proposal,
        window: Window,
        draws: Draws,
        rows: Int[Array, " B"],
        walking: Bool[Array, " B"],
        p: Float[Array, "B V"],
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        """The child that is kept, or what is left of ``p``."""

        def testing(state):
            child, kept, *_ = state
            return jnp.any(walking & (kept == NO_CHILD) & (child != NO_CHILD))

        def test(state):
            child, kept, left = state
            token = at_row(window.tokens, child)
            mass = mass_of(left, token)
            tested = walking & (kept == NO_CHILD) & (child != NO_CHILD)
            # given that u lies above the older siblings' share: the same law as one
            # number for all of them, with an independent draw for each
            spare = self.accumulated - (1 - left.sum(axis=-1))
            keeps = draws.accepts(mass, spare, child, tested) & (mass > 0)
            left = jnp.where(tested[:, None], without(left, token), left)
            keeps = keeps | (mass >= self.single)
            kept = jnp.where(tested & keeps, child, kept)
            after = next_child(proposal, window, rows, jnp.maximum(child, rows))
            return jnp.where(child == NO_CHILD, NO_CHILD, after), kept, left

        first = next_child(proposal, window, rows, rows)
        state = (first, jnp.full_like(rows, NO_CHILD), p)
        _, kept, left = jax.lax.while_loop(testing, test, state)
        return kept, left
