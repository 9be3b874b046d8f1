"""``specjax zoo``: models by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated

import tyro
from rich.table import Table

from specjax.checkpoints import progress_bar, zoo
from specjax.cli.console import stdout
from specjax.cli.options import Debug


@dataclasses.dataclass(frozen=True)
class List:
    """List the models that can be had by name, and which are here already."""

    def run(self) -> int:
        """Print a table."""
        table = Table(box=None, pad_edge=False)
        for column in ("name", "size", "licence", "here", "what it is"):
            table.add_column(column)
        for entry in zoo.listing():
            here = "yes" if entry.cached else "no"
            size = f"{entry.size / 1e6:.0f} MB"
            table.add_row(entry.name, size, entry.licence, here, entry.description)
        stdout().print(table)
        return 0


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Download a model into the cache (SPECJAX_CACHE, or the user's cache folder).

    Its SHA-256 is checked; a file that is whole is not downloaded again.
    """

    name: tyro.conf.Positional[str]
    """A name from the list."""

    def run(self) -> int:
        """Download, and print where the file is."""
        with progress_bar() as progress:
            path = zoo.fetch(self.name, progress)
        stdout().print(str(path), soft_wrap=True)
        return 0


@dataclasses.dataclass(frozen=True)
class Zoo:
    """Models that need no account and no hub.

    Example: `specjax zoo fetch smollm2-135m`
    """

    action: (
        Annotated[List, tyro.conf.subcommand("list")]
        | Annotated[Fetch, tyro.conf.subcommand("fetch")]
    ) = field(default_factory=List)
    report: Debug = field(default_factory=Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """List or fetch."""
        return self.action.run()
