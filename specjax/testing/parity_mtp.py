"""A checkpoint's MTP head against reference outputs, through the real drafter.

The head is run as any drafter is: ``observe`` takes in prompts, ``propose`` drafts. A
listener around it keeps what it said, as ``Recorder`` does for targets.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import io_callback
from jaxtyping import Array, Float

from specjax.acceptance.greedy import Greedy
from specjax.checkpoints import Checkpoint
from specjax.checkpoints.mtp import load_mtp
from specjax.decoding.draws import Draws
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.interfaces import ProposalLaw, Tap
from specjax.decoding.laws import Laws
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.types import Acceptance, DecodeState, Proposal, Window
from specjax.drafters.drawing import Pick
from specjax.drafters.guessing import guessing
from specjax.drafters.head_chain import HeadChain
from specjax.drafters.mtp import MTPHead
from specjax.testing.parity_arrays import MASKED, Oracle

MTPRun = dict[str, np.ndarray]
"""What a head said, by the names of an oracle's arrays."""


def mtp_runs(
    checkpoint: Checkpoint, oracle: Oracle, *, width: int, few: int
) -> tuple[MTPRun, MTPRun] | None:
    """``(plain, drafts)``, or ``None`` for a checkpoint of several modules.

    *plain* reads prompts, and the first token that follows, in windows of ``width``
    rows, and drafts. *drafts* reads prompts ``few`` rows at a time, drafts, has all of
    that rejected for the token that follows, and drafts again.
    """
    head = load_mtp(checkpoint)
    if not isinstance(head, MTPHead):
        return None
    return (
        _run(head, checkpoint, oracle, width=width, rejecting=False),
        _run(head, checkpoint, oracle, width=few, rejecting=True),
    )


def _run(
    head: MTPHead,
    checkpoint: Checkpoint,
    oracle: Oracle,
    *,
    width: int,
    rejecting: bool,
) -> MTPRun:
    prompts = oracle["input_ids"]
    pairs = prompts.shape[1] - 1
    drafts = oracle["mtp_draft_ids"].shape[1] if "mtp_draft_ids" in oracle else 1

    def read(head: MTPHead) -> tuple[DecodeState, HeadChain, list[np.ndarray]]:
        said: list[np.ndarray] = []
        drafter = HeadChain(Listener(head, said.append), k=drafts, pick=Pick.BEST)
        rows = prompts
        if "greedy_ids" in oracle and not rejecting:
            rows = np.concatenate([rows, oracle["greedy_ids"][:, :1]], axis=1)
        engine = Engine(
            checkpoint.decoder,
            drafter,
            RejectAll(),
            EngineOptions(
                prefill_width=min(width, rows.shape[1] - 1),
                widths=(drafts + 1,),
                rounds_per_call=1,
            ),
        )
        requests = [
            Request(prompt_ids=ids, max_tokens=drafts + 2) for ids in rows.tolist()
        ]
        state = engine.prefill(engine.start(requests))
        if rejecting:
            state, _ = engine.rounds(state)
        return state, drafter, said

    state, drafter, said = read(head)
    jax.effects_barrier()
    said.clear()
    propose = jax.jit(lambda drafter, state, context: drafter.propose(state, context))
    proposal, _ = propose(drafter, state.drafter, context_of(state))
    jax.block_until_ready(proposal)
    jax.effects_barrier()
    outs = state.drafter.own.outs[:, :pairs]
    nodes = jnp.arange(drafts) < proposal.num_nodes[:, None]
    run = {
        "mtp_hidden": np.asarray(outs),
        "mtp_logits": np.asarray(head.logits(outs)),
        "mtp_draft_ids": np.asarray(jnp.where(nodes, proposal.tokens, -1)),
        "mtp_draft_logits": np.concatenate(said, axis=1),
    }
    if MASKED in oracle:
        masked = head.replace(mask_first=True)
        own = read(masked)[0].drafter.own
        run[MASKED] = np.asarray(masked.logits(own.outs[:, :pairs]))
    return run


def errors(run: MTPRun, oracle: Oracle, name: str) -> float:
    """How far a run is off in one array; of ids, how many differ."""
    wanted, got = oracle[name], run[name]
    got = got[: wanted.shape[0], : wanted.shape[1]]
    if wanted.dtype.kind == "i":
        return float(np.sum(got != wanted))
    return float(np.max(np.abs(got.astype(np.float64) - wanted)))


class Heard(struct.PyTreeNode):
    """The head's own state, and by pair what it said there."""

    own: Any
    outs: jax.Array  # [B, T, D] float32
    lengths: jax.Array  # [B] int32


class Listener(struct.PyTreeNode):
    """A head of which every committed row's output is kept, and all logits are told."""

    head: MTPHead
    tell: Any = struct.field(pytree_node=False)
    """Called with the logits ``[B, rows, V]``, in the order of the passes."""

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.head.vocab_size

    @property
    def hidden_size(self) -> int:
        """``D``."""
        return self.head.hidden_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The head's."""
        return self.head.taps

    def init(self, batch: int, capacity: int) -> Heard:
        """An empty state, and room for what will be said."""
        return Heard(
            own=self.head.init(batch, capacity),
            outs=jnp.zeros((batch, capacity, self.hidden_size), jnp.float32),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    def guessing(self, state: Heard) -> Listener:
        """The head that reads drafts, listened to."""
        return self.replace(head=guessing(self.head, state.own))

    def fuse(self, features: dict[Tap, Array]) -> Float[Array, "B W D"]:
        """The head's."""
        return self.head.fuse(features)

    def run(
        self, hidden: Float[Array, "B W D"], window: Window, state: Heard
    ) -> tuple[Float[Array, "B W D"], Any]:
        """The head's; what it says goes along as pending."""
        out, pending = self.head.run(hidden, window, state.own)
        return out, (pending, out)

    def logits(self, out: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """The head's, told to the host."""
        logits = self.head.logits(out)
        io_callback(lambda x: self.tell(np.asarray(x)), None, logits, ordered=True)
        return logits

    def commit(self, state: Heard, pending: Any, acceptance: Acceptance) -> Heard:
        """Keep what was said along the accepted path."""
        own, out = pending
        batch, capacity = state.outs.shape[:2]
        path = acceptance.path
        slots = state.lengths[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)
        slots = jnp.where(acceptance.taken, slots, capacity)  # out of range: dropped
        rows = jnp.take_along_axis(out, path[:, :, None], axis=1, mode="clip")
        at = jnp.arange(batch, dtype=jnp.int32)[:, None], slots
        return Heard(
            own=self.head.commit(state.own, own, acceptance),
            outs=state.outs.at[at].set(rows.astype(jnp.float32), mode="drop"),
            lengths=state.lengths + acceptance.num_tokens,
        )


class RejectAll(struct.PyTreeNode):
    """The target's own token, whatever was drafted."""

    name = "reject-all"
    takes = frozenset(ProposalLaw)
    samples = False

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """Accept greedily, of no drafts."""
        anchor = jnp.arange(window.width, dtype=jnp.int32) == 0
        return Greedy().accept(
            proposal.replace(num_nodes=jnp.zeros_like(proposal.num_nodes)),
            window.replace(valid=window.valid & anchor),
            laws,
            draws,
            max_depth=max_depth,
        )
