"""What the loop of a compiled TPU program moves to and from the device's memory.

XLA's own count takes an update in place for a rewriting of the whole array, and does
not tell a core's own memory from the device's. This one reads the program: an
instruction reads its operands and writes its result, of which only what lies in the
device's memory counts (a type with ``S(1)`` lies in a core's own). Of an array that is
only picked from, or updated in place, the picked or updated part counts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from pallas_kernels.aot.hlo import Instruction, parse

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8} | {
    "bf16": 16,
    "f16": 16,
    "s16": 16,
    "u16": 16,
    "f32": 32,
    "s32": 32,
    "u32": 32,
}

_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\](?P<layout>\{[^}]*\})?")
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "while"}
    | {"conditional", "copy-done", "slice-done", "after-all"}
)
"""They name what is there, or end what is counted where it begins."""

_PICKS = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")


Computation = dict[str, Instruction]
"""By name."""


@dataclasses.dataclass(frozen=True)
class Move:
    """What one instruction moves, in bytes."""

    name: str
    bytes: int


def moves(text: str) -> list[Move]:
    """Of the loop body that moves the most, the largest first.

    Loops and branches within it are not looked into. Raises ``ValueError`` if there is
    no loop.
    """
    lines = parse(text)
    program = {name: {x.name: x for x in found} for name, found in lines.items()}
    loops = [x for found in lines.values() for x in found if x.op == "while"]
    if not loops:
        raise ValueError("the program has no loop")
    bodies = [
        program[name] for loop in loops for name in loop.called if name in program
    ]
    found = [_moves(body, program) for body in bodies]
    most = max(found, key=lambda each: sum(move.bytes for move in each))
    return sorted(most, key=lambda move: -move.bytes)


def _moves(body: Computation, program: Mapping[str, Computation]) -> list[Move]:
    return [
        Move(name, _moved(line, body, program))
        for name, line in body.items()
        if line.op not in _FREE and '"ConcatBitcast"' not in line.rest
    ]


def _moved(
    line: Instruction, body: Computation, program: Mapping[str, Computation]
) -> int:
    arrays = [match[0] for match in _ARRAY.finditer(line.type)]
    if line.op == "copy-start":  # its type has both sides
        return sum(map(_size, arrays))
    if line.op == "slice-start":  # its type has the whole array first
        return _size(arrays[1]) + _bytes(arrays[1])
    inside = program[line.called[0]] if line.op == "fusion" else None
    moved = sum(map(_size, arrays))
    for index, operand in enumerate(line.operands):
        if operand in body:
            array = body[operand].type
            uses = [(line, index)] if inside is None else _uses(inside, index)
            moved += _read(array, uses)
            moved += _saved(array, uses, body if inside is None else inside)
    return moved


Use = tuple[Instruction, int]
"""An instruction, and as which of its operands it takes something."""


def _uses(inside: Computation, index: int) -> list[Use]:
    """Of a fusion's parameter."""
    (name,) = (
        name
        for name, line in inside.items()
        if line.op == "parameter" and line.inside == str(index)
    )
    names, found = [name], []
    for name in names:  # grows
        for line in inside.values():
            for position, operand in enumerate(line.operands):
                if operand == name and line.op == "bitcast":
                    names.append(line.name)
                elif operand == name and line.op != "parameter":
                    found.append((line, position))
    return found


def _read(array: str, uses: list[Use]) -> int:
    """What is read of an array."""
    if _size(array) == 0:
        return 0
    picked = 0
    for use, position in uses:
        if position != 0 or use.op not in _PICKS + _UPDATES:
            return _size(array)
        if use.op in _PICKS:
            picked += _bytes(use.type)
    return min(picked, _size(array))


def _saved(array: str, uses: list[Use], inside: Computation) -> int:
    """What is not written, as it stays in place: a negative number."""
    saved = 0
    for use, position in uses:
        if position == 0 and use.op in _UPDATES and _size(array):
            update = inside[use.operands[1 if use.op == _UPDATES[0] else -1]].type
            saved += _bytes(update) - _size(array)
    return saved


def _size(arrays: str) -> int:
    """Bytes in the device's memory."""
    return sum(
        _bytes(match[0])
        for match in _ARRAY.finditer(arrays)
        if "S(" not in (match["layout"] or "")
    )


def _bytes(arrays: str) -> int:
    """Wherever they lie."""
    return sum(
        _BITS.get(match["dtype"], 0)
        * math.prod(int(n) for n in match["shape"].split(",") if n)
        // 8
        for match in _ARRAY.finditer(arrays)
    )
