"""What drafters made of other drafters have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.decoding.interfaces import Drafter, ProposalLaw, Tap
from specjax.decoding.types import ANCHOR, Proposal
from specjax.drafters.model_state import OwnModel


def check_together(drafters: Sequence[Any], what: str) -> None:
    """Refuse drafters that cannot share a round.

    JAX rebuilds pytrees with anything in the place of their parts; of those nothing is
    asked.
    """
    if not isinstance(drafters, tuple) or not all(hasattr(d, "law") for d in drafters):
        return
    if len(drafters) < 2:
        raise ValueError(f"{what} of {len(drafters)} drafters: give two or more")
    laws = [d.law for d in drafters]
    if len(set(laws)) > 1:
        told = ", ".join(f"{name_of(d)}: {d.law.value}" for d in drafters)
        raise ValueError(
            f"{what} of drafters with different laws ({told}): no rule is exact for "
            "both; let all of them choose their tokens, or all draw them"
        )
    vocab_of(drafters)
    deepest = max(d.max_depth for d in drafters)
    for drafter in drafters:
        most = takes_in(drafter)
        if most is not None and most < deepest + 1:
            raise ValueError(
                f"{what} commits up to {deepest + 1} tokens a round, and drafter "
                f"{name_of(drafter)} takes in {most}: give it a draft of {deepest} "
                "tokens, and cap that if it is too long"
            )


def takes_in(drafter: Any) -> int | None:
    """The most committed tokens a round that a drafter keeps up with; ``None``: all."""
    own: Any = drafter
    if isinstance(drafter, OwnModel):
        return own.max_depth + 1
    inside = getattr(drafter, "drafters", None) or [getattr(drafter, "drafter", None)]
    found = [takes_in(part) for part in inside if part is not None]
    return min((most for most in found if most is not None), default=None)


def vocab_of(drafters: Sequence[Drafter]) -> int | None:
    """The vocabulary of those that have one, which must be the same."""
    sizes = [
        (name_of(d), size)
        for d in drafters
        if isinstance(size := getattr(d, "vocab_size", None), int)
    ]
    if len({size for _, size in sizes}) > 1:
        told = ", ".join(f"{name}: {size}" for name, size in sizes)
        raise ValueError(f"drafters of different vocabularies ({told})")
    return sizes[0][1] if sizes else None


def taps_of(drafters: Sequence[Drafter]) -> tuple[Tap, ...]:
    """All that any of them needs, each once."""
    return tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))


def common_law(drafters: Sequence[Drafter]) -> ProposalLaw:
    """The law that they share."""
    return drafters[0].law


def name_of(drafter: Any) -> str:
    """For messages."""
    return getattr(drafter, "name", type(drafter).__name__)


def keep_nodes(proposal: Proposal, kept: Bool[Array, "B N"], size: int) -> Proposal:
    """The first ``size`` of the nodes that are kept, as nodes of their own.

    A kept node's parent must be kept. Whether a node is kept must not depend on its
    token, where tokens are drawn.
    """
    nodes = proposal.tokens.shape[1]
    there = jnp.arange(nodes, dtype=jnp.int32) < proposal.num_nodes[:, None]
    kept = kept & there
    place = jnp.cumsum(kept.astype(jnp.int32), axis=1, dtype=jnp.int32) - 1
    slots = jnp.arange(size, dtype=jnp.int32)
    source = kept[:, None, :] & (place[:, None, :] == slots[:, None])
    source = jnp.argmax(source, axis=2).astype(jnp.int32)
    above = _take(proposal.parents, source)
    parents = jnp.where(above < 0, ANCHOR, _take(place, jnp.maximum(above, 0)))
    log_q = proposal.log_q
    if log_q is not None:
        rows = jnp.pad(source + 1, [(0, 0), (1, 0)])  # the anchor's law stays first
        log_q = jnp.take_along_axis(log_q, rows[:, :, None], axis=1, mode="clip")
    return Proposal(
        tokens=_take(proposal.tokens, source),
        parents=parents,
        num_nodes=jnp.minimum(kept.sum(axis=1, dtype=jnp.int32), size),
        log_q=log_q,
    )


def widen_nodes(proposal: Proposal, nodes: int) -> Proposal:
    """The same proposal with room for ``nodes`` nodes."""
    wide = [(0, 0), (0, nodes - proposal.tokens.shape[1])]
    log_q = proposal.log_q
    return Proposal(
        tokens=jnp.pad(proposal.tokens, wide),
        parents=jnp.pad(proposal.parents, wide, constant_values=ANCHOR),
        num_nodes=proposal.num_nodes,
        log_q=None if log_q is None else jnp.pad(log_q, [*wide, (0, 0)]),
    )


def sound_parents(proposal: Proposal) -> Int[Array, "B N"]:
    """The parents, with the anchor for what is no node before its child."""
    nodes = jnp.arange(proposal.parents.shape[1], dtype=jnp.int32)
    sound = (proposal.parents >= ANCHOR) & (proposal.parents < nodes)
    return jnp.where(sound, proposal.parents, ANCHOR)


def _take(x: Int[Array, "B N"], index: Int[Array, "B n"]) -> Int[Array, "B n"]:
    return jnp.take_along_axis(x, index, axis=1, mode="clip")
