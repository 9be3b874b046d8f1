"""From logits to the law of the next token, by plain sorting.

The order is bias, penalties (repetition, frequency, presence), temperature, top-k,
top-p, min-p. A cut-off keeps every token that ties with the last one it keeps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specjax.testing.reference.model import Ids, softmax


@dataclass(frozen=True)
class Settings:
    """How logits become a law. The defaults are plain greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """In [0, 1]; 0 keeps all."""
    repetition: float = 1.0
    """Keskar et al., 1909.05858; counts prompt and output."""
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens; ``-inf`` excludes one."""

    def __post_init__(self) -> None:
        sound = (
            self.temperature >= 0
            and self.top_k >= 0
            and 0 < self.top_p <= 1
            and 0 <= self.min_p <= 1
            and self.repetition > 0
        )
        if not sound:
            raise ValueError(f"settings out of range: {self}")


def adjusted(
    logits_row: np.ndarray, settings: Settings, prompt_ids: Ids, output_ids: Ids
) -> np.ndarray:
    """Logits with bias and penalties, ``[V]``. ``output_ids``: the output so far."""
    z = np.array(logits_row, dtype=np.float64)
    for token, value in settings.bias.items():
        z[token] += value
    prompt = Counter(int(token) for token in prompt_ids)
    output = Counter(int(token) for token in output_ids)
    for token in prompt.keys() | output.keys():
        if z[token] > 0:
            z[token] /= settings.repetition
        else:
            z[token] *= settings.repetition
    for token, count in output.items():
        z[token] -= settings.frequency * count + settings.presence
    return z


@dataclass(frozen=True)
class Law:
    """The law of one token, and how close its cut-offs come to another set of tokens.

    A cut-off is a count of the sorted scores. ``slack`` asks what it could keep if
    every score and every mass were off by that much in log-probability.
    """

    scores: np.ndarray  # [V] log-probabilities, up to a constant, before cut-offs
    settings: Settings

    @cached_property
    def probabilities(self) -> np.ndarray:
        """``[V]`` float64. At temperature 0 all mass is on the (lowest) argmax."""
        if self.settings.temperature == 0:
            return np.eye(1, len(self.scores), int(np.argmax(self.scores)))[0]
        return softmax(np.where(self.kept(), self.scores, -np.inf))

    @cached_property
    def edge(self) -> float:
        """Distance to the nearest cut-off: the smallest slack that puts one in doubt.

        Infinite where nothing is cut off.
        """

        def in_doubt(slack: float) -> bool:
            certain, possible = self.num_kept(-slack), self.num_kept(slack)
            if certain != possible or certain == len(self._ordered):
                return certain != possible
            gap = self._ordered[certain - 1] - self._ordered[certain]
            return bool(gap <= slack)

        return smallest(in_doubt)

    def kept(self) -> np.ndarray:
        """``[V]`` bool: the tokens that no cut-off removes."""
        return self.possible(self.scores, 0.0)

    def possible(self, scores: np.ndarray, slack: float) -> np.ndarray:
        """Which of these scores are kept, or could be."""
        last = self._ordered[self.num_kept(slack) - 1]
        return (scores >= last - slack) & (scores > -np.inf)

    def certain(self, scores: np.ndarray, slack: float) -> np.ndarray:
        """Which of these scores are kept in any case."""
        count = self.num_kept(-slack)
        if count == len(self._ordered):
            return scores > -np.inf
        return scores > self._ordered[count] + slack

    def num_kept(self, slack: float = 0.0) -> int:
        """How many of the sorted scores all cut-offs keep, of ties only the first."""
        count = len(self._ordered)
        if self.settings.temperature == 0:
            return count
        if self.settings.top_k > 0:
            count = min(count, self.settings.top_k)
        if self.settings.top_p < 1:
            # the fewest whose mass reaches p
            enough = self.settings.top_p * math.exp(slack)
            count = min(count, int(np.searchsorted(self._mass, enough)) + 1)
        if self.settings.min_p > 0:
            floor = self._ordered[0] + math.log(self.settings.min_p) - slack
            at_least = int(np.searchsorted(-self._ordered, -floor, side="right"))
            count = min(count, max(at_least, 1))
        return count

    @cached_property
    def _ordered(self) -> np.ndarray:
        """The finite scores, largest first."""
        ordered = np.sort(self.scores[self.scores > -np.inf])[::-1]
        if len(ordered) == 0:
            raise ValueError("every token is excluded, or the scores are not numbers")
        return ordered

    @cached_property
    def _mass(self) -> np.ndarray:
        """Mass of the first 1, 2, ... sorted scores, of what top-k has left over."""
        left, k = self._ordered, self.settings.top_k
        if 0 < k < len(left):
            left = left[left >= left[k - 1]]
        return np.cumsum(softmax(left))


def law(
    logits_row: np.ndarray, settings: Settings, prompt_ids: Ids, output_ids: Ids
) -> Law:
    """The law of the token that follows ``output_ids``."""
    scores = adjusted(logits_row, settings, prompt_ids, output_ids)
    if settings.temperature > 0:
        scores = scores / settings.temperature
    return Law(scores, settings)


def smallest(holds: Callable[[float], bool]) -> float:
    """The smallest number from which on ``holds``, found by bisection.

    ``inf`` if that is beyond 700: no rounding error is, and ``exp`` ends there.
    """
    low, high = 0.0, 1e-3
    while not holds(high):
        low, high = high, 2 * high
        if high > 700:
            return math.inf
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
