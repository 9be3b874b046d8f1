"""A progress bar for downloads and conversions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from specjax.checkpoints.files import Progress


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on standard error for as long as the context lasts; pass it to ``load``.

    Nothing is drawn before something takes time, and bars vanish when done.
    """
    # Imported late: programs that load models without a terminal need no bars.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    ]
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            for old in tasks.values():
                bar.update(old, visible=False)
            tasks[what] = bar.add_task(what, total=total)
            bar.start()
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:  # a bar that was never drawn would leave an empty line
            bar.stop()
