"""What a compiled program shows: kernels, updates in place, copies."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

from pallas_kernels.aot.case import Case, nbytes

KERNEL_CALLS = {
    "tpu": ("tpu_custom_call",),
    "cuda": ("mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call"),
}

_RESULT = re.compile(r" = (?P<result>\(.*?\)|\S+) (?P<op>[a-z-]+)\(")
_LAYOUT = re.compile(r"\{(\S*?)\}")
_SHAPE = re.compile(r"[a-z0-9]+\[([0-9,]+)\]")
MOVES = frozenset({"copy", "copy-start", "transpose", "fusion", "pad", "concatenate"})
"""What makes an array anew. An update in place is a fusion too: see ``_in_place``."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one case compiled for one device."""

    calls: int
    aliased: int
    temporary: int
    faults: tuple[str, ...]


def examine(case: Case, compiled: Any, platform: str) -> Report:
    """Hold a compiled program to what its case says."""
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    calls = sum(
        any(f'"{name}' in line for name in KERNEL_CALLS[platform])
        for line in text.splitlines()
        if "custom_call_target=" in line
    )
    faults = []
    if calls < case.calls:
        faults.append(f"{calls} kernels are called, not {case.calls}")
    donated = nbytes([case.arguments[i] for i in case.donated])
    if memory.alias_size_in_bytes < donated:
        faults.append(
            f"{memory.alias_size_in_bytes} of {donated} donated bytes are in place"
        )
    faults += [f"a copy of what is kept: {line}" for line in copies(text, case.kept)]
    return Report(
        calls=calls,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        faults=tuple(faults),
    )


def copies(
    text: str, kept: tuple[tuple[int, ...], ...], *, rewritten: bool = False
) -> list[str]:
    """Instructions that make anew an array of a kept shape, its axes in any order.

    ``rewritten``: the arrays are written whole, as states are. Then one that was
    brought near has to be taken back, and was not read twice meanwhile.
    """
    shapes = {order for shape in kept for order in itertools.permutations(shape)}
    found = []
    for line in text.splitlines():
        match = _RESULT.search(line)
        if match is None or match["op"] not in MOVES:
            continue
        if _in_place(line) or _prefetch(match):
            continue
        if rewritten and match["op"] == "copy-start" and _alike(match):
            continue
        made = {
            tuple(int(n) for n in dims.split(","))
            for dims in _SHAPE.findall(match["result"])
        }
        if made & shapes:
            found.append(line.strip()[:120])
    return found


def _prefetch(match: re.Match[str]) -> bool:
    """An array brought as it is into a faster memory (``S(n)``), where it is read.

    The way back is a copy like any other.
    """
    if match["op"] != "copy-start":
        return False
    to, origin = _LAYOUT.findall(match["result"])[:2]
    return "S(" not in origin and to != origin and _alike(match)


def _alike(match: re.Match[str]) -> bool:
    """Both sides of a copy lie in the same order, though not in the same memory."""
    to, origin = _LAYOUT.findall(match["result"])[:2]
    return re.sub(r"S\(\d\)", "", to) == re.sub(r"S\(\d\)", "", origin)


def _in_place(line: str) -> bool:
    """A fusion that ends in an update of a part is done where its operand lies."""
    name, _, rest = line.replace("_", "-").partition(" = ")
    updates = "dynamic-update-slice" in name or "scatter" in name
    return updates and " fusion(" in rest
