"""Figures over many runs: ratios of sums, and medians with their spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.analysis.records import Record
from specjax.decoding.stats import alpha, tau


@dataclasses.dataclass(frozen=True)
class Summary:
    """Several records of one arm."""

    drafter: str
    k: int
    rule: str
    kind: str
    records: int
    identical: int | None
    """Records whose ids are plain decoding's; ``None``: its rule does not promise."""
    tau: float
    """All tokens over all rounds."""
    alpha: float
    """All accepted over all drafted."""
    repetition: float
    """Mean share of repeated text."""
    tokens_per_second: float
    """Median."""
    speedup: float
    """Median."""
    spread: tuple[float, float]
    """Of the speed-ups: a quarter lies below the first, a quarter above the second."""


def summarise(records: Sequence[Record], kind: str) -> Summary:
    """The figures of some records of one arm, under a name for them all."""
    first = records[0]
    speedups = np.array([r.speedup for r in records])
    low, high = np.quantile(speedups, [0.25, 0.75])
    return Summary(
        drafter=first.drafter,
        k=first.k,
        rule=first.rule,
        kind=kind,
        records=len(records),
        identical=_identical(records),
        tau=tau(sum(r.tokens for r in records), sum(r.rounds for r in records)),
        alpha=alpha(sum(r.accepted for r in records), sum(r.drafted for r in records)),
        repetition=float(np.mean([r.repetition for r in records])),
        tokens_per_second=float(np.median([r.tokens_per_second for r in records])),
        speedup=float(np.median(speedups)),
        spread=(float(low), float(high)),
    )


def _identical(records: Sequence[Record]) -> int | None:
    """How many, of records that are all compared or none."""
    verdicts = [r.identical for r in records if r.identical is not None]
    return sum(verdicts) if verdicts else None


def by_kind(records: Sequence[Record]) -> list[Summary]:
    """A summary for each kind and arm in order of appearance, then over all kinds."""
    arms = list(dict.fromkeys(map(_arm, records)))
    kinds = list(dict.fromkeys(r.kind for r in records))

    def of(arm: tuple[str, int, str], kind: str | None) -> list[Record]:
        return [r for r in records if _arm(r) == arm and kind in (None, r.kind)]

    rows = [summarise(of(arm, kind), kind) for kind in kinds for arm in arms]
    if len(kinds) > 1:
        rows += [summarise(of(arm, None), "all") for arm in arms]
    return rows


def _arm(record: Record) -> tuple[str, int, str]:
    return record.drafter, record.k, record.rule
