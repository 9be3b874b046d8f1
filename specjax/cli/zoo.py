"""``specjax zoo``: models by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated

import tyro
from rich.table import Table

from specjax.checkpoints import progress_bar, zoo
from specjax.cli.console import stderr, stdout
from specjax.cli.options import Debug

ON_REQUEST = (
    "large: downloaded by `specjax zoo fetch NAME` only; the others also when a "
    "command names them"
)


@dataclasses.dataclass(frozen=True)
class List:
    """List the models that can be had by name, and which are here already."""

    def run(self) -> int:
        """Print a table."""
        table = Table(box=None, pad_edge=False)
        for column in ("name", "download", "kept"):
            table.add_column(column, no_wrap=True)
        table.add_column("here", no_wrap=True)
        table.add_column("licence", max_width=28)
        table.add_column("what it is")
        entries = zoo.listing()
        for entry in entries:
            sizes = [f"{size / 1e6:.0f} MB" for size in (entry.download, entry.size)]
            here = "yes" if entry.cached else "no, large" if entry.on_request else "no"
            table.add_row(entry.name, *sizes, here, entry.licence, entry.description)
        stdout().print(table)
        if any(entry.on_request and not entry.cached for entry in entries):
            stdout().print(f"\n{ON_REQUEST}", soft_wrap=True)
        return 0


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Download a model into the cache (SPECJAX_CACHE, or the user's cache folder).

    Sizes are said first. SHA-256 are checked; a file that is whole is not downloaded
    again.
    """

    name: tyro.conf.Positional[str]
    """A name from the list."""

    def run(self) -> int:
        """Download, and print where the file is."""
        if self.name in zoo.MODELS and (told := zoo.announcement(self.name)):
            stderr().print(told, soft_wrap=True)
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
