"""The text of a compiled program, taken apart."""

from __future__ import annotations

import dataclasses
import re
from functools import cached_property

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$"
)
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    name: str
    type: str
    """Of the result: an array, or several in brackets, with their layouts."""
    op: str
    rest: str
    """Operands and attributes, behind the opening bracket."""
    is_root: bool

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of all arrays in the result."""
        return tuple(
            tuple(int(n) for n in dims.split(",") if n)
            for _, dims in _SHAPE.findall(self.type)
        )

    @property
    def inside(self) -> str:
        """What stands in the brackets: operands, or a parameter's number."""
        return self.rest.split(")")[0]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of other instructions."""
        return tuple(re.findall(r"%([^\s,]+)", self.inside))

    @property
    def called(self) -> list[str]:
        """Computations that it calls."""
        names = []
        for one, many in _CALLED.findall(self.rest):
            names += [one] if one else [x.strip(" %") for x in many.split(",")]
        return names


Program = dict[str, list[Instruction]]


def parse(text: str) -> Program:
    """Instructions by computation, from ``compiled.as_text()``."""
    program: Program = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = program.setdefault(found[1], [])
        elif found := _INSTRUCTION.match(line):
            root, name, kind, op, rest = found.groups()
            current.append(Instruction(name, kind, op, rest, bool(root)))
    return program
