"""Re-scoring: is every token of an output the one the target's law picks?

The output itself is the context of each of its tokens, so one pass over the whole
sequence gives all the laws, and a difference does not make later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specjax.testing.reference.law import Law, Settings, law, smallest
from specjax.testing.reference.model import Config, Ids, Tensors, logits
from specjax.testing.reference.serial import values


class Difference(NamedTuple):
    """A token of the output that the reference would not have picked."""

    index: int  # in the output
    margin: float


@dataclass(frozen=True)
class Rescore:
    """The verdict on ``n`` emitted tokens."""

    emitted: np.ndarray  # [n] int64
    chosen: np.ndarray  # [n] int64: what the reference picks after the same tokens
    margin: np.ndarray  # [n] float64, see ``margin_of``

    @property
    def ok(self) -> np.ndarray:
        """``[n]`` bool: the emitted token is the one the reference picks."""
        return self.emitted == self.chosen

    @property
    def differences(self) -> list[Difference]:
        """Every token that is not ``ok``."""
        wrong = np.flatnonzero(~self.ok)
        return [Difference(int(i), float(self.margin[i])) for i in wrong]

    @property
    def first_difference(self) -> Difference | None:
        """The first token that is not ``ok``."""
        differences = self.differences
        return differences[0] if differences else None

    def agrees(self, bound: float) -> bool:
        """Whether every difference stands at a near-tie: a margin below ``bound``."""
        return all(difference.margin < bound for difference in self.differences)


def rescore(
    tensors: Tensors,
    config: Config,
    prompt_ids: Ids,
    output_ids: Ids,
    settings: Settings | None = None,
    seed: int | None = None,
) -> Rescore:
    """Score every token of an output: greedy at temperature 0, else coupled."""
    settings = Settings() if settings is None else settings
    prompt = [int(token) for token in prompt_ids]
    output = [int(token) for token in output_ids]
    if not prompt:
        raise ValueError("a prompt of at least one token is needed")
    n = len(output)
    chosen, margin = np.zeros(n, np.int64), np.zeros(n)
    # the pass takes the last token too: it must be a token, though nothing follows it
    rows = logits(tensors, config, prompt + output, last=n + 1)
    if not np.isfinite(rows).all():
        raise ValueError("the reference's own logits are not finite")
    for i in range(n):
        p = law(rows[i], settings, prompt, output[:i])
        s = values(p, seed, len(prompt) + i)
        chosen[i] = np.argmax(np.where(p.kept(), s, -np.inf))
        margin[i] = margin_of(p, s, int(chosen[i]), output[i])
    return Rescore(np.array(output, np.int64), chosen, margin)


def margin_of(p: Law, s: np.ndarray, chosen: int, emitted: int) -> float:
    """How far the emitted token is from another outcome, in logits or log-probability.

    For the chosen token: how far it is from losing. For any other: how far it is from
    winning. Without cut-offs that is the distance to the second best, or to the best.
    With them a token also wins, or loses, by what a cut-off keeps: the margin is the
    smallest error in scores and masses that would let it.
    """
    if np.isinf(p.edge):
        others = np.flatnonzero(p.kept() & (np.arange(len(s)) != chosen))
        rival = s[others].max(initial=-np.inf) if emitted == chosen else s[emitted]
        return float(s[chosen] - rival)
    if emitted == chosen:

        def loses(slack: float) -> bool:
            """Could it be cut off, or another that could be kept be ahead of it?"""
            near = s >= s[emitted] - slack
            near[emitted] = False
            certain = p.certain(p.scores[[emitted]], slack)
            rivals = p.possible(p.scores[near], slack)
            return not certain.all() or bool(rivals.any())

        return smallest(loses)

    ahead = s > s[emitted]
    lead, scores = s[ahead] - s[emitted], p.scores[ahead]

    def wins(slack: float) -> bool:
        """Could the token be kept, and none that stays ahead of it be sure to be?"""
        possible = p.possible(p.scores[[emitted]], slack)
        rivals = p.certain(scores[lead > slack], slack)
        return bool(possible.all()) and not rivals.any()

    return smallest(wins)
