"""From raw times to figures: medians, ratios of pairs, and how sure they are.

Ratios are taken between runs of the same prompt in the same turn, then the median over
turns is taken for each prompt. Intervals are 95 % bootstrap intervals over prompts
(within each kind, where kinds are averaged); spreads are quartiles.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]
Data = dict[str, Any]
RESAMPLES = 2000
FLOAT32_ENGINES = ("hf-float32", "ct2-float32", "ort-float32")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A value and the range it is in."""

    value: float
    low: float
    high: float


def known(figure: Figure | None) -> Figure:
    """A figure that must be there."""
    if figure is None:
        raise ValueError("the file lacks the times that this figure is made of")
    return figure


def quartiles(values: Sequence[float]) -> Figure:
    """The median between the quartiles."""
    low, middle, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
    return Figure(float(middle), float(low), float(high))


def arms(data: Data) -> list[str]:
    """All arms, in the order they were recorded in."""
    return list(dict.fromkeys(r["arm"] for r in data.get("decode", ())))


def kinds(data: Data) -> list[str]:
    """The kinds of prompts."""
    return list(dict.fromkeys(r["kind"] for r in data["decode"]))


def of(data: Data, arm: str, kind: str | None = None) -> list[Record]:
    """An arm's records, of one kind or all."""
    return [r for r in data["decode"] if r["arm"] == arm and kind in (None, r["kind"])]


def dtype_of(arm: str) -> str:
    """``bfloat16`` of ``hf-bfloat16-lookup``."""
    return arm.split("-")[1]


def is_plain(data: Data, arm: str) -> bool:
    """Whether the arm drafts nothing."""
    return of(data, arm)[0]["plain"] == arm


def seconds(record: Record, clock: str) -> float | None:
    """``wall``, ``cpu``, or ``decode``: wall seconds without the prefill."""
    if clock != "decode":
        return record[clock]
    if "prefill_wall" not in record:
        return None
    return record["wall"] - record["prefill_wall"]


def rate(record: Record, clock: str) -> float | None:
    """Tokens a second."""
    taken = seconds(record, clock)
    return None if taken is None else record["tokens"] / taken


def rates(data: Data, arm: str, clock: str) -> Figure | None:
    """Tokens a second over all runs of an arm."""
    values = [rate(r, clock) for r in of(data, arm)]
    measured = [value for value in values if value is not None]
    return quartiles(measured) if measured else None


def prompt_ratios(
    data: Data, arm: str, base: str, clock: str
) -> dict[str, list[float]] | None:
    """How many times faster ``arm`` is than ``base``: by kind, one figure a prompt."""
    bases = {(r["prompt"], r["repeat"]): rate(r, clock) for r in of(data, base)}
    found: dict[str, dict[str, list[float]]] = {}
    for r in of(data, arm):
        mine, other = rate(r, clock), bases.get((r["prompt"], r["repeat"]))
        if mine is None or other is None:
            return None
        found.setdefault(r["kind"], {}).setdefault(r["prompt"], []).append(mine / other)
    return {
        kind: [float(np.median(values)) for values in prompts.values()]
        for kind, prompts in found.items()
    } or None


def ratio(data: Data, arm: str, base: str | None, clock: str) -> Figure | None:
    """The median over prompts."""
    if base is None or base not in arms(data) or arm == base:
        return None
    groups = prompt_ratios(data, arm, base, clock)
    if groups is None:
        return None
    together = [*itertools.chain(*groups.values())]
    return bootstrap([together], lambda g: float(np.median(g[0])))


def speed_up(
    data: Data, arm: str, clock: str, kind: str | None = None
) -> Figure | None:
    """Over the arm's own plain decoding: the mean of a kind's prompts, or of kinds."""
    groups = prompt_ratios(data, arm, of(data, arm)[0]["plain"], clock)
    if groups is None:
        return None
    chosen = [groups[kind]] if kind else list(groups.values())
    return bootstrap(chosen, lambda g: float(np.mean([np.mean(part) for part in g])))


def bootstrap(
    groups: Sequence[Sequence[float]],
    statistic: Callable[[list[np.ndarray]], float],
) -> Figure:
    """A statistic of groups of prompts, each group drawn anew with replacement."""
    arrays = [np.asarray(group, float) for group in groups]
    generator = np.random.default_rng(0)
    drawn = [
        statistic([generator.choice(a, len(a)) for a in arrays])
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Figure(statistic(arrays), float(low), float(high))


def best_float32(data: Data) -> str | None:
    """The fastest of the peers' float32 engines, by its median on the wall."""
    present = [name for name in FLOAT32_ENGINES if name in arms(data)]
    speeds = {name: known(rates(data, name, "wall")) for name in present}
    return max(present, key=lambda name: speeds[name].value) if present else None


def tau(records: Sequence[Record]) -> float | None:
    """Tokens a pass of the target; the peers' passes include the prefill."""
    if any(r["rounds"] is None for r in records):
        return None
    return sum(r["tokens"] for r in records) / sum(r["rounds"] for r in records)


def alpha(records: Sequence[Record]) -> float | None:
    """Accepted over drafted."""
    drafted = sum(r.get("drafted", 0) for r in records)
    return sum(r["accepted"] for r in records) / drafted if drafted else None


def identical(records: Sequence[Record]) -> tuple[int, int]:
    """Outputs equal to plain decoding's, of how many."""
    return sum(r["first_difference"] is None for r in records), len(records)


def floor_ms(data: Data, dtype: str) -> float | None:
    """Milliseconds to read all weights once, at the best rate seen for that size."""
    found = [b["rate"] for b in data["bandwidth"] if b["dtype"] == dtype]
    return data["bytes_read"][dtype] / max(found) * 1e3 if found else None


@dataclasses.dataclass(frozen=True)
class Passes:
    """The timings of section C in one weight type."""

    records: list[Record]

    @classmethod
    def of(cls, data: Data, dtype: str) -> Passes:
        """Those of a weight type."""
        return cls([r for r in data.get("passes", ()) if r["dtype"] == dtype])

    def widths(self, part: str = "pass") -> list[int]:
        """Those that were timed."""
        return sorted({r["width"] for r in self.records if r["part"] == part})

    def ms(self, part: str, width: int, clock: str = "wall") -> dict[int, float]:
        """Milliseconds a pass or round, by repeat."""
        return {
            r["repeat"]: r[clock] / r["count"] * 1e3
            for r in self.records
            if (r["part"], r["width"]) == (part, width)
        }

    def time(self, part: str, width: int, clock: str = "wall") -> Figure:
        """The median over repeats."""
        return quartiles(list(self.ms(part, width, clock).values()))

    def committed(self, part: str, width: int) -> float:
        """Tokens a round."""
        found = [r for r in self.records if (r["part"], r["width"]) == (part, width)]
        return sum(r["committed"] for r in found) / sum(r["count"] for r in found)

    def plain_width(self, clock: str = "wall") -> int:
        """The width of the cheapest pass: the best plain step there is."""
        return min(self.widths(), key=lambda w: self.time("pass", w, clock).value)

    def growth(self, width: int, clock: str = "wall") -> Figure:
        """T(W) / T(plain)."""
        base = self.ms("pass", self.plain_width(clock), clock)
        wide = self.ms("pass", width, clock)
        return quartiles([wide[repeat] / base[repeat] for repeat in wide])

    def overhead(self, part: str, width: int, clock: str = "wall") -> Figure | None:
        """The share of a round that is not the pass."""
        whole = self.ms(part, width, clock)
        alone = self.ms("pass", width, clock)
        if not whole:
            return None
        return quartiles([1 - alone[repeat] / whole[repeat] for repeat in whole])


def peer_growth(data: Data, dtype: str, width: int) -> float | None:
    """T(W) over the cheapest pass, of transformers."""
    by_width: dict[int, list[float]] = {}
    for r in data.get("peer_passes", ()):
        if r["dtype"] == dtype:
            by_width.setdefault(r["width"], []).append(r["wall"])
    if width not in by_width:
        return None
    medians = {w: float(np.median(values)) for w, values in by_width.items()}
    return medians[width] / min(medians.values())


def start_seconds(data: Data, dtype: str, cache: str) -> Figure | None:
    """From the start of the process to the first characters."""
    found = [
        s["first_token"]
        for s in data.get("starts", ())
        if (s["dtype"], s["cache"]) == (dtype, cache)
    ]
    return quartiles(found) if found else None
