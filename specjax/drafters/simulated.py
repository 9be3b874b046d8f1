"""Drafts of a planted quality: how fast would this be, were the drafts so good?

The target's true continuation is given, as plain decoding emitted it. A draft at depth
``d`` is the true token with probability ``alphas[d - 1]`` and a wrong one otherwise, so
that a system's speed can be measured apart from any drafter: what is accepted follows
from ``alphas`` alone, and drafting costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.decoding.interfaces import ProposalLaw, Tap
from specjax.decoding.noise import Stream, row_keys, uniform_of
from specjax.decoding.types import (
    NO_TOKEN,
    Acceptance,
    Context,
    Proposal,
    Verdict,
    Window,
)


class Simulated(struct.PyTreeNode):
    """Chains of true and wrong tokens; nothing beyond the end of what is known.

    The coin for a draft is a function of (the row's own coin seed, absolute position).
    A position is tested in one round only, so the tests are independent: a round's
    ``i``-th draft, if the ones before it were accepted, is accepted with probability
    ``alphas[i]``. That holds under rules that emit plain decoding's tokens (greedy,
    coupled); the output is the target's under any rule.
    """

    name = "simulated"
    law = ProposalLaw.DETERMINISTIC
    truth: jax.Array  # [B, T] int32: prompt and output, NO_TOKEN beyond
    coins: jax.Array  # [B] uint32
    alphas: tuple[float, ...] = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        if not self.alphas or not all(0 <= alpha <= 1 for alpha in self.alphas):
            raise ValueError(
                f"alphas = {self.alphas}: give a probability for each depth"
            )
        if self.vocab_size < 2:
            raise ValueError(
                f"vocab_size = {self.vocab_size}: a wrong token needs 2 or more"
            )

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        alphas: Sequence[float],
        vocab_size: int,
        seed: int = 0,
    ) -> Simulated:
        """From the prompts and the recorded outputs of plain decoding, row by row."""
        texts = [[*p, *o] for p, o in zip(prompts, outputs, strict=True)]
        truth = np.full((len(texts), max(map(len, texts))), NO_TOKEN, np.int32)
        for row, text in enumerate(texts):
            truth[row, : len(text)] = text
        coins = np.random.default_rng(seed).integers(0, 2**32, len(texts), np.uint32)
        return cls(jnp.asarray(truth), jnp.asarray(coins), tuple(alphas), vocab_size)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """No hidden states are needed."""
        return ()

    @property
    def max_nodes(self) -> int:
        """One a probability."""
        return len(self.alphas)

    @property
    def max_depth(self) -> int:
        """The drafts are a chain."""
        return len(self.alphas)

    def for_rows(self, rows: Sequence[int]) -> Simulated:
        """The same for other rows: entry ``i`` is what row ``rows[i]`` had."""
        picked = np.asarray(rows)
        return self.replace(truth=self.truth[picked], coins=self.coins[picked])

    def init(self, batch: int, capacity: int) -> None:
        """Nothing to remember."""
        check_rows(self.truth.shape[0], batch, type(self).__name__)

    def propose(self, state: None, context: Context) -> tuple[Proposal, None]:
        """True tokens and wrong ones, as the coins fall."""
        depth = self.max_depth
        places = context.lengths[:, None] + jnp.arange(depth, dtype=jnp.int32)
        true = jnp.take_along_axis(self.truth, places, axis=1, mode="clip")
        known = (places < self.truth.shape[1]) & (true >= 0)
        known = jnp.cumprod(known.astype(jnp.int32), axis=1).astype(jnp.int32)
        coins = [
            uniform_of(row_keys(self.coins, places[:, i], Stream.DRAFT)) < alpha
            for i, alpha in enumerate(self.alphas)
        ]
        wrong = wrong_token(true, jnp.arange(depth, dtype=jnp.int32), self.vocab_size)
        tokens = jnp.where(jnp.stack(coins, axis=1), true, wrong)
        parents = jnp.arange(depth, dtype=jnp.int32) - 1
        # the last token a row has room for needs no draft
        useful = jnp.clip(context.room - 1, 0, known.sum(axis=1, dtype=jnp.int32))
        return Proposal(
            tokens=jnp.where(known > 0, tokens, 0),
            parents=jnp.broadcast_to(parents, tokens.shape),
            num_nodes=useful,
        ), None

    def observe(
        self,
        state: None,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> None:
        """Nothing to learn."""
        return None


def wrong_token(true: Any, node: Any, vocab_size: int) -> Any:
    """A token that is not the true one, and not the same for every node."""
    return (true + 1 + node % (vocab_size - 1)) % vocab_size


def check_rows(have: int, batch: int, name: str) -> None:
    """A drafter that holds something for each row fits one batch."""
    if batch != have:
        raise ValueError(
            f"the script has {have} rows, the batch {batch}: see {name}.for_rows"
        )
