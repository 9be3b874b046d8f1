"""``specjax drafters``: what can draft, and what it is made from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import field

from rich.table import Table

from specjax.cli import options as o
from specjax.cli.console import stdout
from specjax.drafters import DRAFTERS, DrafterEntry, Source
from specjax.drafters.layouts import LAYOUTS

MADE_OF = """\
q        the law of the drafts: one-hot where they are chosen; drawn where they may be
         drawn from a law that is kept for the rule (--draft-pick drawn)
made of  what --drafter names behind the colon: NAME:MODEL, NAME:FOLDER. Nothing
         is named where it is the target's own checkpoint: that lies in --model.
         draft: and tree: are short for draft-model: and draft-tree:"""


@dataclasses.dataclass(frozen=True)
class Drafters:
    """List the drafters, with what each is made from and the layouts that are read.

    Example: `specjax drafters`
    """

    json: bool = False
    """Print one JSON object instead of a table."""
    report: o.Debug = field(default_factory=o.Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Print them."""
        rows = {name: _row(name, entry) for name, entry in DRAFTERS.items()}
        if self.json:
            print(json.dumps(rows))
            return 0
        table = Table(box=None, pad_edge=False)
        for column in ("name", "drafts", "q", "trained", "made of", "layouts read"):
            table.add_column(column, overflow="fold")
        table.add_column("reference", overflow="fold")
        for name, row in rows.items():
            table.add_row(
                name,
                row["drafts"],
                row["q"],
                "yes" if row["trained"] else "",
                row["made of"],
                "; ".join(row["layouts"]),
                row["reference"],
            )
        stdout().print(table)
        stdout().print()
        stdout().print(MADE_OF, soft_wrap=True)
        return 0


def _row(name: str, entry: DrafterEntry) -> dict:
    """One drafter, in plain values."""
    methods = entry.parts or (name,)
    none = entry.source is Source.NOTHING
    return {
        "drafts": entry.summary,
        "q": entry.q if entry.drafts else "",
        "trained": entry.trained,
        "made of": "" if none else entry.source.value,
        "layouts": [lay.name for lay in LAYOUTS if lay.method in methods],
        "reference": entry.reference,
    }
