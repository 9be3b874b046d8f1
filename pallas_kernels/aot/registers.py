"""Registers and shared memory of the GPU's kernels, kept in a file.

``python -m pallas_kernels.aot --device h100 --write`` makes it anew; without
``--write`` a kernel that takes more than it says fails. More registers are fewer blocks
of threads side by side, and the next step is spilling.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax

from pallas_kernels.aot.cuda import Resources
from pallas_kernels.aot.kept import Figures, Kept

TOLERANCE = 0.1
"""So much more of either is told: another ptxas makes a difference of a few."""


def _bounds(old: Figures) -> list[tuple[int, int]]:
    return [(0, was + int(was * TOLERANCE)) for was in old]


KEPT = Kept(
    Path(__file__).with_name("registers.json"),
    "jax",
    ("registers", "bytes of shared memory"),
    _bounds,
)


def holds(kept: Kept = KEPT) -> bool:
    """Whether the file is of the compiler at hand."""
    return kept.made_by() == jax.__version__


def grown(name: str, taken: Resources, kept: Kept = KEPT) -> list[str]:
    """What a kernel takes more of than the file says; nothing if it does not hold."""
    return kept.told(name, _figures(taken)) if holds(kept) else []


def write(found: Mapping[str, Resources], *, whole: bool, kept: Kept = KEPT) -> None:
    """Keep what was found; ``ValueError`` as of ``Kept.write``."""
    figures = {name: _figures(taken) for name, taken in found.items()}
    kept.write(jax.__version__, figures, whole=whole)


def _figures(taken: Resources) -> Figures:
    return taken.registers, taken.shared or 0
