"""The targets that were set for CPUs with bf16 matrix units, and whether they are met.

Each is judged by the figure on the wall; the figure by processor time, which other work
on the machine disturbs less, stands beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from speed import figures as f

Value = Callable[[str], float | None]


@dataclasses.dataclass(frozen=True)
class Target:
    """What was wanted and what was measured; ``None``: it was not."""

    text: str
    wall: float | None
    cpu: float | None
    bound: float
    at_least: bool
    unit: str = "×"

    @property
    def verdict(self) -> str:
        """Met, missed, or not measured."""
        if self.wall is None:
            return "not measured"
        met = self.wall >= self.bound if self.at_least else self.wall <= self.bound
        return "met" if met else "**missed**"

    def show(self, value: float | None) -> str:
        """A figure in the target's unit."""
        if value is None:
            return "–"
        return f"{value:.1%}" if self.unit == "%" else f"{value:.2f} {self.unit}"

    @property
    def wanted(self) -> str:
        """The bound, with its direction."""
        return ("≥ " if self.at_least else "≤ ") + self.show(self.bound)


def targets(data: f.Data) -> list[Target]:
    """All of them, in the order they were set in."""
    return [*_plain(data), *_drafts(data), *_passes(data), *_start(data)]


def _plain(data: f.Data) -> Iterator[Target]:
    def against(arm: str, base: str | None) -> Value:
        def value(clock: str) -> float | None:
            figure = f.ratio(data, arm, base, clock) if arm in f.arms(data) else None
            return figure and figure.value

        return value

    for dtype in ("float32", "bfloat16"):
        value = against(f"specjax-{dtype}", f"hf-{dtype}")
        text = f"plain decoding over transformers, {dtype}"
        yield Target(text, value("wall"), value("cpu"), 1.2, True)
    best = f.best_float32(data)
    value = against("specjax-float32", best)
    text = f"plain float32 over the best float32 engine ({best or 'no peers'})"
    yield Target(text, value("wall"), value("cpu"), 0.9, True)


def _drafts(data: f.Data) -> Iterator[Target]:
    arm = best_drafts(data, "bfloat16")

    def mean(clock: str) -> float | None:
        figure = f.speed_up(data, arm, clock) if arm else None
        return figure and figure.value

    def worst(clock: str) -> float | None:
        return min(by_kind(data, arm, clock).values()) if arm else None

    said = f"n-gram drafts over plain, bfloat16, best k ({label(arm)})"
    yield Target(f"{said}, mean of kinds", mean("wall"), mean("cpu"), 1.8, True)
    yield Target(f"{said}, worst kind", worst("wall"), worst("cpu"), 0.97, True)


def best_drafts(data: f.Data, dtype: str) -> str | None:
    """Our arm with the highest mean speed-up in a weight type."""
    mine = [a for a in f.arms(data) if a.startswith(f"specjax-{dtype}-")]
    if not mine:
        return None
    return max(mine, key=lambda arm: f.known(f.speed_up(data, arm, "wall")).value)


def by_kind(data: f.Data, arm: str, clock: str) -> dict[str, float]:
    """The speed-up on each kind."""
    return {k: f.known(f.speed_up(data, arm, clock, k)).value for k in f.kinds(data)}


def label(arm: str | None) -> str:
    """``k = 8`` of ``specjax-bfloat16-ngram8``."""
    return "none" if arm is None else f"k = {arm.rpartition('ngram')[2]}"


def _passes(data: f.Data) -> Iterator[Target]:
    passes = f.Passes.of(data, "bfloat16")

    def growth(width: int, clock: str) -> float | None:
        known = width in passes.widths()
        return passes.growth(width, clock).value if known else None

    for width, bound in ((8, 1.15), (16, 1.3)):
        text = f"T({width}) over the best plain step, bfloat16"
        wall, cpu = growth(width, "wall"), growth(width, "cpu")
        yield Target(text, wall, cpu, bound, False)
    for part, bound in (("greedy", 0.05), ("sampled", 0.15)):
        for dtype in ("float32", "bfloat16"):
            timed = f.Passes.of(data, dtype)
            wall, cpu = (timed.overhead(part, 8, clock) for clock in ("wall", "cpu"))
            text = f"share of a {part} round beside the pass, W = 8, {dtype}"
            values = (wall and wall.value, cpu and cpu.value)
            yield Target(text, *values, bound, False, "%")


def _start(data: f.Data) -> Iterator[Target]:
    for dtype in ("float32", "bfloat16"):
        warm = f.start_seconds(data, dtype, "warm")
        text = f"first token after a warm start, {dtype}"
        yield Target(text, warm and warm.value, None, 10.0, False, "s")
