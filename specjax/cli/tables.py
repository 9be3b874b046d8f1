"""Tables of benchmark summaries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from specjax.acceptance import is_lossy
from specjax.analysis.summary import Summary

LEGEND = """\
k          most draft tokens a round
τ          tokens that a pass of the model commits: all tokens over all rounds
α          all accepted over all drafted tokens
repeated   share of the output that completes 8 tokens seen in it before
tokens/s   while decoding, without the reading of the prompt; median over runs
speed-up   tokens/s over those of plain decoding on the same prompt; median, and in
           brackets the middle half of the runs
identical  runs whose tokens are all those of plain decoding; "law only": the rule keeps
           the model's law, not the tokens; "lossy": it keeps neither"""


def short_name(drafter: str, at_most: int = 28) -> str:
    """What ``--drafter`` said, with the end of a long path alone."""
    head, colon, where = drafter.partition(":")
    parts = Path(where).parts
    if not colon or len(drafter) <= at_most or len(parts) < 2:
        return drafter
    return f"{head}:…/{parts[-1]}"


def summary_table(summaries: Sequence[Summary]) -> Table:
    """One line for each kind and arm, then the lines over all kinds."""
    table = Table(box=None, pad_edge=False)
    table.add_column("kind")
    table.add_column("drafter")
    rules = len({summary.rule for summary in summaries}) > 1
    if rules:
        table.add_column("rule")
    for name in ("k", "τ", "α", "repeated", "tokens/s", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("identical")
    last = None
    for summary in summaries:
        if last not in (None, summary.kind):
            table.add_row()
        last = summary.kind
        drafts = summary.k > 0
        table.add_row(
            summary.kind,
            short_name(summary.drafter),
            *([summary.rule if drafts else ""] if rules else []),
            str(summary.k),
            f"{summary.tau:.2f}",
            f"{summary.alpha:.2f}" if drafts else "",
            f"{summary.repetition:.2f}",
            f"{summary.tokens_per_second:.1f}",
            _speedup(summary) if drafts else "",
            _identical(summary) if drafts else "",
        )
    return table


def _speedup(summary: Summary) -> str:
    """With the middle half of the runs, where there are enough to have one."""
    low, high = summary.spread
    spread = f" [{low:.2f}, {high:.2f}]" if summary.records > 2 else ""
    return f"{summary.speedup:.2f}×{spread}"


def _identical(summary: Summary) -> Text:
    if summary.identical is None:
        return Text("lossy" if is_lossy(summary.rule) else "law only", style="yellow")
    good = summary.identical == summary.records
    text = f"{summary.identical} of {summary.records}"
    return Text(text, style="green" if good else "bold red")
