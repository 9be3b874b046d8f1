"""What ``specjax calibrate`` prints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.analysis.costs.calibrated import Calibrated, Curve
from specjax.analysis.costs.judge import FREE
from specjax.analysis.costs.oddities import Oddity
from specjax.analysis.costs.predict import Prediction, best
from specjax.analysis.law import break_even_alpha
from specjax.cli.tables import short_name

BAR = 24
"""Characters of the longest bar."""

LEGEND = """\
T(W)         a round whose window has W rows (W - 1 drafts), drafting left out: ms, and
             the ratio to T(1) of the same turn, are medians over turns [middle half]
break-even α chains of W - 1 drafts that are accepted more often than this pay, if
             drafting is free; with a drafter's own cost in the table of drafters
α            chains with this acceptance would commit as many tokens a round
c_draft      drafting a round, in plain steps; c_verify all else, over rounds as they
             came: those that draft little run in narrow windows
speed-up     τ / (c_verify + c_draft) [95 % of what texts and turns drawn again give:
             a run's own luck, and what the machine does later, come on top]
held back by what would help most, and the speed-up without it"""


def show(
    console: Console,
    found: Calibrated,
    predictions: Sequence[Prediction],
    odd: Sequence[Oddity],
) -> None:
    """All of it."""
    rates = ", ".join(
        f"{name} products {rate / 1e9:.0f} GFLOP/s"
        for name, rate in found.machine.matrix_flops.items()
    )
    console.print(f"\n{found.model}, {found.dtype}", soft_wrap=True)
    console.print(
        f"{found.device}: reads {found.machine.bandwidth / 1e9:.1f} GB/s, {rates}",
        soft_wrap=True,
    )
    for curve in found.curves:
        turns = f"{len(curve.rounds[1])} turns"
        console.print(f"\nBatch {curve.batch}, context {curve.context}, {turns}:\n")
        console.print(curve_table(curve))
        console.print(f"\n{parts_sentence(curve)}", soft_wrap=True)
        here = [
            each
            for each in predictions
            if (each.batch, each.context) == (curve.batch, curve.context)
        ]
        if here:
            console.print()
            console.print(drafter_table(here))
            console.print(f"\n{best_sentence(here)}", soft_wrap=True)
    console.print()
    for each in odd:
        console.print(Text(f"Odd: {each.text}.", style="yellow"), soft_wrap=True)
    if not odd:
        console.print("Nothing odd was seen.")
    console.print(f"\n{LEGEND}")


def curve_table(curve: Curve) -> Table:
    """A line a width, with a bar."""
    table = Table(box=None, pad_edge=False)
    for name in ("W", "ms", "T(W)/T(1)", "break-even α"):
        table.add_column(name, justify="right")
    table.add_column("")
    longest = max(curve.c_round(rows) for rows in curve.widths)
    for rows in curve.widths:
        ratio = curve.ratios(rows)
        cost = curve.c_round(rows)
        low, high = np.quantile(ratio, [0.25, 0.75])
        spread = f" [{low:.2f}, {high:.2f}]" if rows > 1 else ""
        table.add_row(
            str(rows),
            f"{1e3 * float(np.median(curve.rounds[rows])):.2f}",
            f"{cost:.2f}{spread}",
            _alpha(break_even_alpha(rows - 1, cost)) if rows > 1 else "",
            Text("█" * max(1, round(BAR * cost / longest)), style="cyan"),
        )
    return table


def parts_sentence(curve: Curve) -> str:
    """Acceptance, commit, rollback."""
    first, last = curve.widths[0], curve.widths[-1]
    accept = f"{1e3 * curve.accept[last]:.2f} ms"
    commit = f"{1e3 * curve.commit[first]:.2f} ms"
    return (
        f"Of a round of {last} rows acceptance takes {accept}; committing a token "
        f"takes {commit}, and rejecting the other rows adds "
        f"{1e3 * max(0.0, curve.rollback_seconds):.2f} ms: there is nothing to undo."
    )


def drafter_table(predictions: Sequence[Prediction]) -> Table:
    """A line a drafter and longest draft."""
    table = Table(box=None, pad_edge=False)
    table.add_column("drafter")
    for name in ("k", "rows", "τ", "α", "c_draft", "c_verify", "break-even α"):
        table.add_column(name, justify="right")
    table.add_column("speed-up", justify="right")
    table.add_column("verdict")
    table.add_column("held back by")
    for each in predictions:
        table.add_row(
            short_name(each.drafter),
            str(each.k),
            str(each.nodes + 1),
            f"{each.tau:.2f}",
            f"{each.alpha:.2f}",
            f"{each.c_draft:.2f}",
            f"{each.c_verify:.2f}",
            _alpha(each.break_even_alpha),
            f"{each.speedup:.2f}× [{each.low:.2f}, {each.high:.2f}]",
            verdict(each),
            f"{each.limit} ({each.without_limit:.2f}×)",
        )
    return table


def verdict(each: Prediction) -> Text:
    """Go or no-go, and whether the spread leaves room for the other."""
    text = "go" if each.go else "no-go"
    return Text(
        text if each.sure else f"{text}, not sure", style="green" if each.go else "red"
    )


def best_sentence(predictions: Sequence[Prediction]) -> str:
    """What to use."""
    real = [each for each in predictions if not each.drafter.startswith(FREE)]
    chosen = best(real or predictions)
    if chosen is None:
        return "Best: decode plainly. None of these is expected to gain."
    sure = "" if chosen.sure else " (not sure: it may lose)"
    shape = "a tree" if chosen.nodes > chosen.k else "a chain"
    return (
        f"Best: {chosen.drafter} with k = {chosen.k} ({shape} of {chosen.nodes}): "
        f"{chosen.speedup:.2f}× expected, {chosen.low:.2f} to {chosen.high:.2f}"
        f"{sure}."
    )


def _alpha(alpha: float | None) -> str:
    return "none" if alpha is None else f"{alpha:.2f}"
