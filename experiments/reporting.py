"""What every experiment does last: say how its numbers were made, and write them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.analysis.records import commit, device_name, versions


def about(options: Any) -> dict[str, Any]:
    """What is needed to make this run again; ``options`` is a dataclass."""
    script = Path(sys.argv[0]).name
    asked = {k: v for k, v in dataclasses.asdict(options).items() if k != "out"}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join(["python", f"experiments/{script}", *sys.argv[1:]]),
        "options": asked,
    }


def told(run: dict[str, Any]) -> str:
    """The same in a line, to close a report's first paragraph."""
    jax = run["versions"]["jax"]
    return f"{run['date']}, {run['device']}, JAX {jax}; `{run['command']}`."


def write(
    folder: Path,
    name: str,
    result: dict[str, Any],
    report: str,
    plot: Callable[[Path], None] | None = None,
) -> None:
    """All numbers as JSON, the report as Markdown, and a plot where one can be drawn.

    Results of ``--quick`` runs are named so, and git leaves them out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quick = result.get("options", {}).get("quick", False)
    stem = folder / (f"{name}-quick" if quick else name)
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_name(f"{stem.name}.md").write_text(report.rstrip() + "\n")
    if plot is not None:
        try:
            plot(stem.with_name(f"{stem.name}.png"))
        except ImportError:
            print("no plot: matplotlib is not installed (pip install 'specjax[plots]')")
    print(f"written to {stem}.*")
