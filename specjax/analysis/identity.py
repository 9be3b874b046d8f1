"""Are these the tokens of plain decoding? And if not, was plain decoding undecided?

Rows of windows of different widths round differently, so two runs may part where plain
decoding itself is at a near-tie. The margin says how near: how far the other token was
from being plain decoding's choice, in logits (greedy) or in log p plus noise (sampled).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.acceptance import is_lossy
from specjax.decoding.engine import Engine
from specjax.decoding.interfaces import AcceptanceRule, Target
from specjax.decoding.laws import Laws
from specjax.decoding.noise import gumbel
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.types import Counts, DecodeState, Proposal
from specjax.decoding.windows import draft_window

NEAR_TIE: dict[str, float] = {
    "float64": 1e-9,
    "float32": 1e-3,
    "bfloat16": 0.5,
    "int8": 4.0,
}
"""Margins above these are not rounding. In logits, by the weights' dtype.

The gap between the best token and a rival was seen to change with the window's width
by up to 8e-5, 0.2 and 2.4 (SmolLM2-135M, ten texts, widths 1 to 64). For int8 that is
much: each activation is rounded to one of 255 steps, and a last bit decides which.
"""


NARROW_TIE: dict[str, float] = {"auto": 0.0, "int8": 0.5, "fp8": 1.5}
"""The same for caches of one byte a number, where a last bit decides a step as well.
Seen: up to 0.23 and 0.53 (SmolLM2-135M in float32, one text, widths 1, 8 and 32)."""


def near_tie(dtype: str, temperature: float = 0.0, cache: str = "auto") -> float:
    """The bound in the units of a margin, which a low temperature stretches."""
    bound = max(NEAR_TIE[dtype], NARROW_TIE[cache])
    return bound / (min(temperature, 1.0) or 1.0)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token that is not plain decoding's."""

    position: int
    """In the output, from 0."""
    margin: float | None
    """``None``: no rounding explains it (a missing token, or one that is cut off)."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """The verdict on an output."""

    first_difference: Difference | None

    @property
    def identical(self) -> bool:
        """Every token is plain decoding's, and none is missing."""
        return self.first_difference is None

    def holds(self, bound: float) -> bool:
        """Identical, or different from a near-tie on."""
        if self.first_difference is None:
            return True
        margin = self.first_difference.margin
        return margin is not None and margin <= bound


def promises_tokens(rule: AcceptanceRule, temperature: float) -> bool:
    """Whether the output can be held to plain decoding's, token for token.

    A rule that keeps only the law draws other tokens of it, except at temperature 0,
    where the law has one token. A lossy rule promises nothing at any temperature.
    """
    if is_lossy(getattr(rule, "name", "")):
        return False
    return temperature == 0 or getattr(rule, "same_tokens", True)


def compare(
    plain: Engine, request: Request, plain_ids: Sequence[int], ids: Sequence[int]
) -> Identity:
    """Compare an output with that of ``plain``, the engine that drafts nothing."""
    position = first_difference(plain_ids, ids)
    if position is None:
        return Identity(None)
    margin = None
    if position < min(len(plain_ids), len(ids)):
        scores = plain_scores(plain, request, plain_ids[:position])
        gap = float(scores[plain_ids[position]] - scores[ids[position]])
        margin = gap if math.isfinite(gap) else None
    return Identity(Difference(position, margin))


def first_difference(plain_ids: Sequence[int], ids: Sequence[int]) -> int | None:
    """The first place where two outputs differ; a missing token differs."""
    for position, (left, right) in enumerate(zip(plain_ids, ids, strict=False)):
        if left != right:
            return position
    return None if len(plain_ids) == len(ids) else min(len(plain_ids), len(ids))


def plain_scores(plain: Engine, request: Request, before: Sequence[int]) -> np.ndarray:
    """What plain decoding takes the largest of, after the prompt and these tokens.

    The tokens are put through the target as a prompt is, in chunks, and a plain step
    follows.
    """
    prompt = [*request.prompt_ids, *before]
    forced = dataclasses.replace(request, prompt_ids=prompt, max_tokens=1, stop=())
    options = dataclasses.replace(plain.options, max_capacity=None)
    engine = dataclasses.replace(plain, options=options)
    state = engine.prefill(engine.start([forced]))
    if state.counts is not None:
        state = state.replace(
            counts=_counts(request.prompt_ids, before, plain.target.vocab_size)
        )
    return np.asarray(_scores(plain.target, state))


def _counts(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> Counts:
    def count(ids: Sequence[int]) -> jax.Array:
        counted = np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)
        return jnp.asarray(counted[None], jnp.int32)

    return Counts(prompt=count(prompt), output=count(output))


@jax.jit
def _scores(target: Target, state: DecodeState) -> jax.Array:
    context = context_of(state)
    nothing = jnp.zeros((1, 0), jnp.int32)
    proposal = Proposal(nothing, nothing, jnp.zeros((1,), jnp.int32))
    window = draft_window(
        context.anchor, context.lengths, context.room, proposal, target.vocab_size
    )
    verdict = target.verify(state.target, window)
    assert verdict.logits is not None
    laws = Laws(verdict.logits, window, state.sampling, state.counts)
    row = jnp.zeros((1,), jnp.int32)
    greedy = laws.adjusted_at(row)[0]
    if state.sampling.temperature is None:
        return greedy
    noise = gumbel(state.seeds, context.lengths, target.vocab_size)
    return jnp.where(
        state.sampling.temperature[0] > 0, (laws.scores_at(row) + noise)[0], greedy
    )
