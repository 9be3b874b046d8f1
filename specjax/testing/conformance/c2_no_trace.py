"""C2: verify changes nothing, and what is rejected leaves no trace."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.decoding.interfaces import Drafter, Target
from specjax.decoding.round import context_of
from specjax.decoding.types import (
    ANCHOR,
    Acceptance,
    Context,
    Proposal,
    Verdict,
    Window,
)
from specjax.decoding.windows import ancestor_mask, draft_window
from specjax.testing.conformance.case import (
    Case,
    Trace,
    Unsuitable,
    needs_canonical,
    record,
    same_bits,
)

AS_DRAFTED = -1


class Disturbed(struct.PyTreeNode):
    """A drafter whose wrong nodes get another token, just as wrong.

    ``truth [B, T]`` is what plain decoding commits; a node is wrong if it, or a node
    above it, is not the token that stands there. Which nodes are accepted is thus what
    it was; ``token = AS_DRAFTED`` leaves all as it is, in the same compiled program.
    """

    drafter: Drafter
    truth: jax.Array
    token: jax.Array  # [] int32

    @property
    def name(self) -> str:
        """The drafter's own name."""
        return getattr(self.drafter, "name", type(self.drafter).__name__)

    @property
    def taps(self) -> Any:
        """The drafter's."""
        return self.drafter.taps

    @property
    def max_nodes(self) -> int:
        """The drafter's."""
        return self.drafter.max_nodes

    @property
    def max_depth(self) -> int:
        """The drafter's."""
        return self.drafter.max_depth

    @property
    def law(self) -> Any:
        """The drafter's."""
        return self.drafter.law

    def init(self, batch: int, capacity: int) -> Any:
        """The drafter's."""
        return self.drafter.init(batch, capacity)

    def propose(self, state: Any, context: Context) -> tuple[Proposal, Any]:
        """The drafter's proposal, its wrong nodes disturbed."""
        proposal, pending = self.drafter.propose(state, context)
        nodes = jnp.arange(proposal.parents.shape[1], dtype=jnp.int32)
        sound = (proposal.parents >= ANCHOR) & (proposal.parents < nodes)
        above = ancestor_mask(jnp.where(sound, proposal.parents + 1, 0))[:, 1:, 1:]
        depths = above.sum(axis=2, dtype=jnp.int32)
        places = context.lengths[:, None] + depths - 1
        wanted = jnp.take_along_axis(self.truth, places, axis=1, mode="clip")
        agrees = sound & (proposal.tokens == wanted)
        right = jnp.all(agrees[:, None, :] | ~above, axis=2)
        # the token must not make a wrong node right
        other = jnp.where(self.token == wanted, self.token + 1, self.token)
        keep = right | (self.token == AS_DRAFTED)
        tokens = jnp.where(keep, proposal.tokens, other)
        return proposal.replace(tokens=tokens), pending

    def observe(
        self,
        state: Any,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> Any:
        """The drafter's."""
        return self.drafter.observe(state, pending, window, verdict, acceptance)


def verify_changes_nothing(case: Case) -> str:
    """The state given to ``verify`` is bit for bit what it was."""
    engine = case.engine()
    state = engine.prefill(engine.start(case.requests))
    context = context_of(state)
    proposal, _ = case.drafter.propose(state.drafter, context)
    window = draft_window(
        context.anchor,
        context.lengths,
        context.room,
        proposal,
        case.target.vocab_size,
    )
    before = [np.array(x) for x in jax.tree.leaves(state.target)]
    verdict = case.target.verify(state.target, window, taps=case.drafter.taps)
    jax.block_until_ready(verdict)
    leaves = jax.tree_util.tree_leaves_with_path(state.target)
    for (path, leaf), old in zip(leaves, before, strict=True):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise AssertionError(f"C2: verify gave up {name} of the state it was given")
        if not same_bits(leaf, old):
            raise AssertionError(f"C2: verify changed {name} of the state it was given")
    return f"{len(leaves)} arrays unchanged"


def rejected_tokens_leave_no_trace(case: Case) -> str:
    """Other tokens in the rejected nodes: the same states and tokens, to the bit."""
    needs_canonical(case)
    disturbance = _Disturbance(case)
    vocab = case.target.vocab_size
    count = 0
    for token in (0, vocab // 2, vocab + 7, -5):
        disturbance.compare(case.target, token, f"token {token}")
        count += 1
    return f"{count} disturbances of {len(disturbance.base.rounds)} rounds"


def rejected_nan_leaves_no_trace(case: Case) -> str:
    """A draft whose embedding is NaN, rejected: the same states, to the bit."""
    needs_canonical(case)
    disturbance = _Disturbance(case)
    token = unused_token(case)
    poisoned = poison_embedding(case.target, token)
    disturbance.compare(poisoned, token, f"token {token}, whose embedding is NaN,")
    return f"NaN in the rejected nodes of {len(disturbance.base.rounds)} rounds"


def unused_token(case: Case) -> int:
    """A token that no prompt and no output holds."""
    used = {token for request in case.requests for token in request.prompt_ids}
    used |= {token for output in case.plain.outputs for token in output}
    free = sorted(set(range(case.target.vocab_size)) - used)
    if not free:
        raise Unsuitable("every token of the vocabulary is used by the runs")
    return free[len(free) // 2]


def poison_embedding(target: Target, token: int) -> Target:
    """The target with NaN for a token's embedding, its head left as it was."""
    embedding = getattr(target, "embedding", None)
    if not isinstance(embedding, jax.Array) or not hasattr(target, "replace"):
        raise Unsuitable("the target has no embedding to poison")
    return target.replace(embedding=embedding.at[token].set(jnp.nan))  # type: ignore


class _Disturbance:
    """A case's run as it is, to compare disturbed ones with."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def base(self) -> Trace:
        """The run as drafted."""
        return self.run(self.case.target, AS_DRAFTED)

    def run(self, target: Target, token: int) -> Trace:
        """The run with ``token`` in the wrong nodes."""
        truth = jnp.asarray(self.case.plain.last.tokens)
        drafter = Disturbed(self.case.drafter, truth, jnp.int32(token))
        case = self.case.but(target=target)
        # one width: an impossible token is no draft, and could make a window narrower
        engine = case.engine(drafter, widths=(drafter.max_nodes + 1,))
        return record(engine, case.requests)

    def compare(self, target: Target, token: int, told: str) -> None:
        """Every round of the disturbed run, to the last bit."""
        other = self.run(target, token)
        for number, (a, b) in enumerate(
            zip(self.base.snapshots, other.snapshots, strict=False)
        ):
            for row in range(self.case.batch):
                left, right = a.row(row), b.row(row)
                # impossible tokens are not drafts, so what was drafted may differ
                del left["counters"], right["counters"]
                for part in left:
                    if not all(map(same_bits, left[part], right[part])):
                        raise AssertionError(
                            f"C2: round {number}, row {row}: the {part} depends on "
                            f"rejected drafts: not the same with {told} in their place"
                        )
        if len(other.snapshots) != len(self.base.snapshots):
            raise AssertionError(
                f"C2: {len(other.rounds)} rounds with {told} in rejected drafts, "
                f"{len(self.base.rounds)} without"
            )
