"""Where the command line writes: text and tables, errors, progress."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

Step = Callable[[str], None]
"""Called when a step begins, with what it is; that ends the one before."""


def stdout() -> Console:
    """For results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """For errors, progress and remarks."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    # without a colour system nothing is styled; no_color alone would keep bold
    system = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=file, color_system=system, highlight=False, markup=False)
    if not console.is_terminal:
        # a file or a pipe has no width: what is narrower than this is not wrapped
        console.width = max(console.width, 120)
    return console


def has_colour(console: Console) -> bool:
    """Whether colour codes may be written."""
    return console.is_terminal and console.color_system is not None


def print_error(message: str) -> None:
    """One line on standard error, in red where there is colour."""
    line = " ".join(f"specjax: error: {message}".split())
    stderr().print(Text(line, style="red"), soft_wrap=True)


@contextlib.contextmanager
def steps(total: int) -> Iterator[Step]:
    """A bar on standard error for a known number of steps; lines where no bar can be.

    The bar vanishes at the end.
    """
    console = stderr()
    if not console.is_terminal:
        done = 0

        def say(what: str) -> None:
            nonlocal done
            done += 1
            console.print(f"[{done}/{total}] {what}", soft_wrap=True)

        yield say
        return
    columns: list[ProgressColumn] = [BarColumn(bar_width=24), MofNCompleteColumn()]
    columns += [TextColumn("{task.description}"), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)

        def show(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield show
