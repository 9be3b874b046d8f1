"""Registers and shared memory of the GPU's kernels, kept in a file.

``python -m pallas_kernels.aot --device h100 --write`` makes it anew; without
``--write`` a kernel that takes more than it says fails. More registers are fewer blocks
of threads side by side, and the next step is spilling. Another JAX makes other code:
the file holds for the one that made it.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax

from pallas_kernels.aot.cuda import Resources

BASELINE = Path(__file__).with_name("registers.json")
TOLERANCE = 0.1
"""So much more of either is told: another ptxas makes a difference of a few."""


def read() -> dict[str, tuple[int, int]] | None:
    """Registers of a thread and bytes of shared memory, by the case's name.

    ``None`` if another JAX made the file.
    """
    kept = json.loads(BASELINE.read_text())
    if kept["jax"] != jax.__version__:
        return None
    return {name: (count, size) for name, (count, size) in kept["figures"].items()}


def grown(name: str, taken: Resources) -> list[str]:
    """What a kernel takes more of than the file says; nothing if it does not hold."""
    kept = read()
    if kept is None:
        return []
    if name not in kept:
        return [f"not in {BASELINE.name}: --write adds it"]
    now = (taken.registers, taken.shared or 0)
    words = ("registers", "bytes of shared memory")
    return [
        f"{new} {word}, were {old}"
        for new, old, word in zip(now, kept[name], words, strict=True)
        if new > old * (1 + TOLERANCE)
    ]


def write(found: dict[str, Resources]) -> None:
    """Keep what was found, and of the file what it says of others, if it holds."""
    figures = (BASELINE.exists() and read()) or {}
    figures |= {name: (x.registers, x.shared or 0) for name, x in found.items()}
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(figures[name])}" for name in sorted(figures)
    )
    text = f'{{"jax": {json.dumps(jax.__version__)},\n "figures": {{\n{lines}\n}}}}\n'
    BASELINE.write_text(text)
