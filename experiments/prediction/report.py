"""Predicted beside measured: errors, and whether verdicts were right."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prediction.planted import PLAIN, Cell

MEDIAN, WORST = 0.05, 0.15
"""What was wanted of the planted grid."""

BUSY = (
    "**Other programs ran meanwhile** (see the load average): what is off here may be "
    "theirs. Repeat it when the machine is quiet."
)


def was_busy(file: Mapping[str, Any]) -> bool:
    """Whether more wanted to run than there are cores; a run alone takes them all."""
    load, cores = file.get("load"), file.get("cores")
    return bool(load and cores and load[0] > 1.25 * cores)


class Row(NamedTuple):
    """One cell."""

    cell: Cell
    predicted: float
    low: float
    high: float
    measured: float
    """The median over repeats of rates over plain decoding's in the same repeat."""
    tau: float
    """As the coins fell."""
    by_cost: float
    """The prediction with that tau: what is left of its error is the costs'."""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def cost_error(self) -> float:
        """Of the costs alone."""
        return self.by_cost / self.measured - 1


def rows(
    predicted: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """One for each cell. ``runs`` say under ``group`` which plain runs are theirs."""
    found = []
    for said in predicted:
        cell = Cell(said["dtype"], said["batch"], said["cell_alpha"], said["k"])
        mine = [run for run in runs if run["name"] == cell.name]
        group = f"{cell.dtype} B={cell.batch}"
        plain = {
            run["repeat"]: run
            for run in runs
            if run["name"] == PLAIN and run["group"] == group
        }
        speedups = [_rate(run) / _rate(plain[run["repeat"]]) for run in mine]
        rounds = sum(run["rounds"] for run in mine) * cell.batch
        tau = sum(run["tokens"] for run in mine) / rounds
        found.append(
            Row(
                cell,
                said["speedup"],
                said["low"],
                said["high"],
                statistics.median(speedups),
                tau,
                said["speedup"] * tau / said["tau"],
            )
        )
    return found


def _rate(run: Mapping[str, Any]) -> float:
    return run["tokens"] / run["seconds"]


def planted_table(found: Sequence[Row]) -> str:
    """Markdown, and the median and the worst below it."""
    lines = [
        "| dtype | B | α | k | predicted | measured | error | τ, law | τ, coins | "
        "error with the coins' τ |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        law = row.predicted * row.tau / row.by_cost
        lines.append(
            f"| {row.cell.dtype} | {row.cell.batch} | {row.cell.alpha:g} | "
            f"{row.cell.k} | {row.predicted:.2f} ({row.low:.2f}–{row.high:.2f}) | "
            f"{row.measured:.2f} | {row.error:+.1%} | {law:.2f} | {row.tau:.2f} | "
            f"{row.cost_error:+.1%} |"
        )
    return "\n".join([*lines, "", verdict(found)])


def verdict(found: Sequence[Row]) -> str:
    """Whether the errors are as small as was wanted."""
    errors = np.abs([row.error for row in found])
    costs = np.abs([row.cost_error for row in found])
    middle, worst = float(np.median(errors)), float(errors.max())
    met = "met" if middle <= MEDIAN and worst <= WORST else "**missed**"
    inside = sum(row.low <= row.measured <= row.high for row in found)
    return (
        f"Median error {middle:.1%} (wanted {MEDIAN:.0%}), worst {worst:.1%} (wanted "
        f"{WORST:.0%}): {met}. With the coins' own τ: median {np.median(costs):.1%}, "
        f"worst {costs.max():.1%}. {inside} of {len(found)} speed-ups lie inside the "
        "predicted interval."
    )


def case_table(
    predicted: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> str:
    """Markdown: the verdict, and the sign of what was measured."""
    lines = [
        "| model, dtype, drafter, k | τ here, there | predicted | verdict | measured | "
        "error | right |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    right = 0
    for said in predicted:
        mine = [run for run in runs if run["name"] == said["name"]]
        gain = _gain(mine)
        tokens = sum(run["drafted"]["tokens"] for run in mine)
        tau = tokens / sum(run["drafted"]["rounds"] for run in mine)
        agrees = (said["speedup"] > 1) == (gain > 1)
        right += agrees
        lines.append(
            f"| {said['name']} | {said['tau']:.2f}, {tau:.2f} | {said['speedup']:.2f} "
            f"({said['low']:.2f}–{said['high']:.2f}) | "
            f"{'go' if said['speedup'] > 1 else 'no-go'} | {gain:.2f} | "
            f"{said['speedup'] / gain - 1:+.1%} | {'yes' if agrees else '**no**'} |"
        )
    return "\n".join([*lines, "", f"{right} of {len(predicted)} verdicts are right."])


def _gain(mine: Sequence[Mapping[str, Any]]) -> float:
    """Plain seconds over drafted ones, of all prompts: the median over repeats."""
    repeats = sorted({run["repeat"] for run in mine})
    gains = []
    for repeat in repeats:
        these = [run for run in mine if run["repeat"] == repeat]
        plain = sum(run["plain"]["seconds"] for run in these)
        gains.append(plain / sum(run["drafted"]["seconds"] for run in these))
    return statistics.median(gains)
