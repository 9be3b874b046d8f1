"""Which drafter goes with which rule and target: checked when they are put together."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.interfaces import AcceptanceRule, Drafter, ProposalLaw, Target
from specjax.decoding.types import Context, Proposal, Sampling


class PairError(ValueError):
    """A target, drafter and rule that do not go together."""


def check_pair(target: Target, drafter: Drafter, rule: AcceptanceRule) -> None:
    """Refuse a drafter that the rule is not exact for, or of another vocabulary."""
    vocab = getattr(drafter, "vocab_size", None)
    if vocab is not None and vocab != target.vocab_size:
        raise PairError(
            f"drafter {_name(drafter)} has a vocabulary of {vocab}, the target of "
            f"{target.vocab_size}: they must share their token ids"
        )
    if drafter.max_nodes == 0:
        return  # nothing is drafted, so any rule is exact
    if drafter.law not in rule.takes:
        takes = ", ".join(sorted(law.value for law in rule.takes))
        raise PairError(
            f"rule {_name(rule)} takes {takes} proposals, but drafter {_name(drafter)} "
            f"makes {drafter.law.value} ones: its output would not be the target's; "
            "choose another rule (coupled takes all) or other drafts"
        )
    if getattr(rule, "chains_only", False) and makes_trees(drafter):
        raise PairError(
            f"rule {_name(rule)} takes chains, but drafter {_name(drafter)} makes "
            f"trees of {drafter.max_nodes} nodes and depth {drafter.max_depth}: choose "
            "a rule for trees"
        )
    if drafter.law is not ProposalLaw.DETERMINISTIC:
        proposal = proposal_shape(drafter)
        check_law(drafter, proposal, target.vocab_size)


def makes_trees(drafter: Drafter) -> bool:
    """Whether proposals branch: by their sizes, unless the drafter says so itself.

    A tree chosen in every round may have as many nodes as its longest path.
    """
    return getattr(drafter, "makes_trees", drafter.max_nodes > drafter.max_depth)


def check_law(drafter: Drafter, proposal: Proposal, vocab_size: int) -> None:
    """A law is given where tokens were drawn, and only there.

    ``proposal`` may hold arrays or their shapes.
    """
    log_q = proposal.log_q
    if drafter.law is ProposalLaw.DETERMINISTIC:
        if log_q is not None:
            raise PairError(
                f"drafter {_name(drafter)} says that its drafts are deterministic, and "
                "gives the law they were drawn from: state in `law` how they were "
                "drawn, or leave log_q out"
            )
        return
    if log_q is None:
        raise PairError(
            f"drafter {_name(drafter)} makes {drafter.law.value} proposals but gives "
            "no law: log_q must hold the log-law that each draw came from; were it "
            "left out, the accept test would take drawn drafts for chosen ones"
        )
    nodes = proposal.tokens.shape[1]
    wanted = (proposal.tokens.shape[0], nodes + 1, vocab_size)
    if tuple(log_q.shape) != wanted:
        raise PairError(
            f"drafter {_name(drafter)}: log_q has shape {tuple(log_q.shape)}, it must "
            f"be [B, W, V] = {wanted}: a law for the children of every window row"
        )


def proposal_shape(drafter: Drafter) -> Proposal:
    """The shapes of a proposal for one row that samples; nothing is computed."""
    capacity = drafter.max_depth + 2

    def propose() -> Proposal:
        row = jnp.ones((1,), jnp.int32)
        context = Context(
            tokens=jnp.zeros((1, capacity), jnp.int32),
            lengths=row,
            room=row,
            done=row > 1,
            seeds=row.astype(jnp.uint32),
            sampling=Sampling(temperature=row.astype(jnp.float32)),
            counts=None,
        )
        return drafter.propose(drafter.init(1, capacity), context)[0]

    return jax.eval_shape(propose)


def _name(part: object) -> str:
    return getattr(part, "name", type(part).__name__)
