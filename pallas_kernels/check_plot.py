"""Two panels of what ``pallas_kernels.check`` has timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST = 12
"""Curves that a panel can hold and still be read."""


def plot(lines: Sequence[Mapping[str, Any]], path: Path) -> str | None:
    """T(W)/T(1), and time over the memory's floor, by width; why not, if it cannot."""
    timed = [line for line in lines if line["kernel_seconds"] is not None]
    if not timed:
        return "nothing was timed"
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "matplotlib is not installed: pip install -e .[plots]"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = sorted({line["operation"] for line in timed})
    figure, panels = pyplot.subplots(
        len(operations), 2, figsize=(12, 4.2 * len(operations)), squeeze=False
    )
    for operation, (left, right) in zip(operations, panels, strict=True):
        mine = [line for line in timed if line["operation"] == operation]
        families = sorted({line["family"] for line in mine})
        for family in families[:MOST]:
            curve = sorted(
                (line for line in mine if line["family"] == family),
                key=lambda line: line["width"],
            )
            for axis, field in ((left, "over_one_row"), (right, "over_floor")):
                points = [(c["width"], c[field]) for c in curve if c[field] is not None]
                axis.plot(*zip(*points, strict=True) if points else ([], []), "o-")
            left.lines[-1].set_label(family)
        left.set_title(f"{operation}: T(W) / T(1)")
        right.set_title(f"{operation}: time / time to read its bytes")
        left.legend(fontsize="x-small", title=_left_out(families))
        for axis in (left, right):
            axis.axhline(1.0, color="grey", linewidth=0.8)
            axis.set_xlabel("rows of the window")
            axis.set_ylim(bottom=0)
    figure.suptitle(f"{timed[0]['device']}, JAX {timed[0]['jax']}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return None


def _left_out(families: Sequence[str]) -> str | None:
    more = len(families) - MOST
    return f"and {more} more, in the lines of JSON" if more > 0 else None
