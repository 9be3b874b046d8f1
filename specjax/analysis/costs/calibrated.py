"""What a calibration found, as it is kept in a file of JSON."""

from __future__ import annotations

import bisect
import dataclasses
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "specjax calibration 1"


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds of a round, drafting left out, by the rows of its window.

    At one batch and context. ``rounds[W][t]`` is of turn ``t``; all widths and drafters
    were timed in each turn.
    """

    batch: int
    context: int
    rounds: dict[int, list[float]]
    accept: dict[int, float]
    """Seconds of acceptance, of one row and of the most: a part of the round."""
    commit: dict[int, float]
    """Seconds of committing one accepted row, likewise."""
    drafts: dict[str, list[float]]
    """Seconds of drafting, by ``draft_name``."""

    @property
    def widths(self) -> list[int]:
        """That were timed, ascending; the first is 1, a plain step."""
        return sorted(self.rounds)

    @property
    def plain_seconds(self) -> float:
        """A plain step: the median over turns."""
        return statistics.median(self.rounds[1])

    def ratios(self, rows: int) -> np.ndarray:
        """``T(rows) / T(1)``, turn by turn; between widths that were timed a line."""
        plain = np.asarray(self.rounds[1])
        if rows in self.rounds:
            return np.asarray(self.rounds[rows]) / plain
        widths = self.widths
        if not widths[0] <= rows <= widths[-1]:
            raise ValueError(
                f"a window of {rows} rows: {widths[0]} to {widths[-1]} were timed"
            )
        above = bisect.bisect(widths, rows)
        low, high = widths[above - 1], widths[above]
        share = (rows - low) / (high - low)
        mixed = (1 - share) * np.asarray(self.rounds[low]) + share * np.asarray(
            self.rounds[high]
        )
        return mixed / plain

    def c_round(self, rows: int) -> float:
        """A round of ``rows`` rows in plain steps, drafting left out."""
        return float(np.median(self.ratios(rows)))

    def draft_ratios(self, name: str) -> np.ndarray:
        """A round's drafting in plain steps, turn by turn."""
        return np.asarray(self.drafts[name]) / np.asarray(self.rounds[1])

    @property
    def rollback_seconds(self) -> float:
        """What the rejected rows of the widest window add to a commit."""
        least, most = min(self.commit), max(self.commit)
        return self.commit[most] - self.commit[least]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates as JAX reaches them on this device."""

    bandwidth: float
    """Bytes a second, of reads."""
    matrix_flops: dict[str, float]
    """Operations a second of square products, by type."""


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """All that was timed, and of what."""

    model: str
    dtype: str
    device: str
    weight_bytes: int
    """That a plain step reads."""
    machine: Machine
    curves: list[Curve]
    about: dict[str, Any]
    """Date, versions, commit, command."""

    def curve_for(self, batch: int, context: int) -> Curve:
        """Of this batch, and of the context that is nearest.

        Raises ``ValueError`` if no such batch was timed.
        """
        fitting = [each for each in self.curves if each.batch == batch]
        if not fitting:
            known = sorted({each.batch for each in self.curves})
            raise ValueError(
                f"batches of {', '.join(map(str, known))} were timed, and not of "
                f"{batch}: calibrate with --batch {batch}"
            )
        return min(fitting, key=lambda each: abs(each.context - context))

    @property
    def curve(self) -> Curve:
        """The first: of the batch and context that were named first."""
        return self.curves[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, which ``from_dict`` takes back."""
        return {"format": FORMAT} | dataclasses.asdict(self)


def draft_name(drafter: str, k: int) -> str:
    """The key of a drafter at a longest draft."""
    return f"{drafter} k={k}"


def read_calibrated(path: str | Path) -> Calibrated:
    """A calibration from the file that ``specjax calibrate --json`` wrote.

    Raises ``ValueError`` where it is something else.
    """
    try:
        raw = json.loads(Path(path).read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    raw = raw.get("calibration", raw) if isinstance(raw, Mapping) else {}
    kind = raw.get("format") if isinstance(raw, Mapping) else None
    if kind != FORMAT:
        told = "it holds no calibration" if kind is None else f"it is of {kind!r}"
        raise ValueError(f"{told}: write one with `specjax calibrate --json FILE`")
    try:
        return _checked(from_dict(raw))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"its calibration is damaged ({what})") from error


def _checked(found: Calibrated) -> Calibrated:
    """Refuse what no calibration has written."""
    if not found.curves:
        raise ValueError("no curves")
    for curve in found.curves:
        if 1 not in curve.rounds:
            raise ValueError("no plain steps (rounds of 1 row)")
        turns = len(curve.rounds[1])
        for name, times in (*curve.rounds.items(), *curve.drafts.items()):
            if len(times) != turns or turns == 0:
                raise ValueError(f"{name}: {len(times)} turns, plain steps: {turns}")
            if not all(0 <= t < float("inf") for t in times):
                raise ValueError(f"{name}: times are {times}")
        if not all(t > 0 for times in curve.rounds.values() for t in times):
            raise ValueError("rounds that took no time")
    return found


def from_dict(raw: Mapping[str, Any]) -> Calibrated:
    """What ``as_dict`` gave, also after it was JSON."""
    fields = {f.name: raw[f.name] for f in dataclasses.fields(Calibrated)}
    fields["machine"] = Machine(**raw["machine"])
    fields["curves"] = [_curve(each) for each in raw["curves"]]
    return Calibrated(**fields)


def _curve(raw: Mapping[str, Any]) -> Curve:
    """JSON has made texts of the rows that are keys."""
    fields = dict(raw)
    for name in ("rounds", "accept", "commit"):
        fields[name] = {int(rows): value for rows, value in raw[name].items()}
    return Curve(**fields)
