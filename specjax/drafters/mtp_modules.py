"""Several MTP modules, one behind the other: each says one token more than the last.

(DeepSeek-V3, 2412.19437, section 2.2.) Module ``m``'s row ``p`` takes the output of
module ``m - 1`` at row ``p - 1`` and token ``p + 1``; module 0 takes the target's
hidden state of position ``p``. So module ``m``'s first row is ``m``, and every module
has a state of its own, of true rows alone.

The draft at step ``s`` is module ``s mod M``'s: beyond the last module the first reads
that one's output in the place of the target's hidden state. A module reads all drafts
so far, each with what the module before it said one row earlier, so that behind the
committed pairs there stands a row of its own for every draft. One module drafts as
``HeadChain`` does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window
from specjax.decoding.windows import keep_valid
from specjax.drafters.chain import ChainDrafter, Said
from specjax.drafters.dynamic_tree import HeadDynamicTree
from specjax.drafters.features import (
    FeatureHead,
    along,
    anchor_window,
    pairs_window,
    safe_rows,
)
from specjax.drafters.guessing import guessing
from specjax.drafters.head_chain import HeadChain
from specjax.drafters.model_state import drafts_window
from specjax.drafters.mtp import MTPHead, MTPModules


class ModulesState(struct.PyTreeNode):
    """What the modules remember of the committed pairs."""

    own: tuple[Any, ...]
    """Each module's state."""
    outs: tuple[jax.Array, ...]  # [B, D] each: the output of a module's last row
    lengths: jax.Array  # [B] int32: pairs taken in


class OwnModules(struct.PyTreeNode):
    """The part of a drafter that holds the modules."""

    modules: MTPModules


class ModuleChain(ChainDrafter, OwnModules):
    """At most ``k`` tokens, each said by the module whose turn it is.

    A row with fewer pairs than there are modules drafts at most one token a module: the
    last one has no row yet from which to go round.
    """

    name = "mtp-modules"

    @property
    def heads(self) -> tuple[MTPHead, ...]:
        """The modules."""
        return self.modules.heads

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.heads[0].vocab_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The hidden states that the first module reads."""
        return self.heads[0].taps

    def init(self, batch: int, capacity: int) -> ModulesState:
        """Empty states."""
        return ModulesState(
            own=tuple(head.init(batch, capacity) for head in self.heads),
            outs=tuple(
                jnp.zeros((batch, head.hidden_size), jnp.float32) for head in self.heads
            ),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    def propose(self, state: ModulesState, context: Context) -> tuple[Proposal, None]:
        """Draft on from the modules' last rows."""
        count, heads = len(self.heads), tuple(map(guessing, self.heads, state.own))
        logits = safe_rows(heads[0].logits(state.outs[0][:, None]))
        first = self.laws(logits, anchor_window(context), context, counted=1)
        zeros = jnp.zeros(state.lengths.shape, jnp.int32)

        def read(
            step: jax.Array, tokens: jax.Array, said: jax.Array
        ) -> tuple[Said, jax.Array]:
            rows = jnp.arange(self.k, dtype=jnp.int32)
            causal = jnp.tril(jnp.ones((self.k, self.k), bool))
            window = drafts_window(tokens, causal, rows < step, state.lengths)
            turns = [
                partial(_read, head, state.outs[i - 1], i, state.own[i])
                for i, head in enumerate(heads)
            ]
            said, last = jax.lax.switch(step % count, turns, step, window, said)
            seen = jax.lax.dynamic_index_in_dim(window.ancestors, step - 1, axis=1)
            laws = self.laws(
                safe_rows(last), window.replace(ancestors=seen), context, counted=0
            )
            return Said(laws, zeros), said

        shape = (len(zeros), self.k, state.outs[0].shape[1])
        said = jnp.zeros(shape, state.outs[0].dtype)
        ready = state.lengths > 0
        proposal = self.draft(context, ready, Said(first, zeros), read, said)
        most = jnp.where(state.lengths >= count, self.k, min(self.k, count))
        nodes = jnp.minimum(proposal.num_nodes, most)
        return proposal.replace(num_nodes=nodes), None

    def observe(
        self,
        state: ModulesState,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> ModulesState:
        """Take in the accepted pairs, module after module; no guess is kept."""
        features = {tap: verdict.features[tap] for tap in self.taps}
        path = jax.tree.map(lambda x: along(x, acceptance.path), features)
        hidden = self.heads[0].fuse(path)
        pairs = pairs_window(acceptance, state.lengths)
        own, outs = [], []
        for i, head in enumerate(self.heads):
            out, added = head.run(hidden, rows_of_module(pairs, i), state.own[i])
            taken = _rows_taken(acceptance, state.lengths, i, out)
            own.append(head.commit(state.own[i], added, taken))
            last = jnp.maximum(acceptance.num_tokens - 1, 0)[:, None]
            said = along(out, last)[:, 0].astype(state.outs[i].dtype)
            outs.append(jnp.where((taken.num_tokens > 0)[:, None], said, state.outs[i]))
            hidden = _one_later(state.outs[i], out)
        lengths = state.lengths + acceptance.num_tokens
        return ModulesState(tuple(own), tuple(outs), lengths)


def mtp_drafter(
    part: MTPHead | MTPModules, k: int, **options: Any
) -> HeadChain | ModuleChain:
    """The drafter that runs what ``load_mtp`` gave; ``options`` are a chain's."""
    if isinstance(part, MTPModules):
        return ModuleChain(part, k, **options)
    return HeadChain(part, k, **options)


def mtp_tree(
    part: MTPHead | MTPModules, top_k: int, depth: int, nodes: int
) -> HeadDynamicTree:
    """The drafter that grows EAGLE-2's tree from what ``load_mtp`` gave.

    Raises ``ValueError`` for several modules: each is trained for a depth of its own,
    and would have to read a tree of the drafts that the others made.
    """
    if isinstance(part, MTPModules):
        raise ValueError(
            f"a tree is grown from one MTP module, and the target has "
            f"{len(part.heads)}: take --drafter mtp, which drafts a chain with all"
        )
    return HeadDynamicTree(part, top_k, depth, nodes)


def rows_of_module(window: Window, module: int) -> Window:
    """A window of pairs as module ``module`` sees it: row ``module`` is its first."""
    valid = window.valid & (window.positions >= module)
    return window.replace(
        positions=jnp.maximum(window.positions - module, 0),
        ancestors=keep_valid(window.ancestors, valid),
        valid=valid,
    )


def _read(
    head: FeatureHead,
    before: Float[Array, "B D"],
    module: int,
    own: Any,
    step: jax.Array,
    window: Window,
    said: Float[Array, "B K D"],
) -> tuple[Float[Array, "B K D"], Float[Array, "B 1 V"]]:
    """All drafts so far, and the logits behind the last of them. ``before`` is what the
    module before said of the last pair, and ``said`` what it said of the drafts."""
    hidden = _one_later(before, said)
    out, _ = head.run(hidden, rows_of_module(window, module), own)
    last = jax.lax.dynamic_index_in_dim(out, step - 1, axis=1)
    return out.astype(said.dtype), head.logits(last)


def _one_later(
    before: Float[Array, "B D"], out: Float[Array, "B W D"]
) -> Float[Array, "B W D"]:
    """What a module said of each row, for the next module's row behind it."""
    return jnp.concatenate([before[:, None].astype(out.dtype), out[:, :-1]], axis=1)


def _rows_taken(
    acceptance: Acceptance,
    lengths: Int[Array, " B"],
    module: int,
    out: Float[Array, "B W D"],
) -> Acceptance:
    """The rows of a window of pairs that a module keeps: none before its first."""
    skipped = jnp.maximum(module - lengths, 0)
    num = jnp.maximum(acceptance.num_tokens - skipped, 0)
    # see take_in: a number that waits for the pass, lest XLA copy the cache
    num = jnp.minimum(num, num + jnp.any(jnp.isnan(out), (1, 2)).astype(num.dtype))
    rows = jnp.arange(out.shape[1], dtype=jnp.int32)
    path = jnp.where(rows < num[:, None], rows + skipped[:, None], 0)
    return Acceptance(path=path, tokens=acceptance.tokens, num_tokens=num)
