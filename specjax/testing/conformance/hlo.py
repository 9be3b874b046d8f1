"""Reading compiled programs: does a loop copy a large array, or call the host?"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pallas_kernels.aot.hlo import Instruction, Program, parse

PASSED_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "opt-barrier"}
CALLS = {"while", "conditional", "call", "async-start", "async-update", "async-done"}
IN_PLACE = PASSED_ON | CALLS | {"scatter", "dynamic-update-slice"}
"""Operations whose result may be the operand's own memory, or that only pass it on."""
COPIES = {"copy", "copy-start", "transpose"}
ONE_BYTE = re.compile(r"\b(?:[su]8|f8\w+|pred)\[")
HOST = {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}
HOST_TARGETS = ("callback", "host", "py_")


def loop_instructions(program: Program, *, rare: bool = True) -> list[Instruction]:
    """All that runs inside some loop; without ``rare``, not what a conditional does
    whose other branch hands on what it is given.

    What a fusion computes inside is not stored, so only the fusion itself is given.
    """
    seen: set[str] = set()
    todo = [
        name
        for instructions in program.values()
        for instruction in instructions
        if instruction.op == "while"
        for name in instruction.called
    ]
    found = []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for instruction in program.get(name, []):
            found.append(instruction)
            if instruction.op == "fusion":
                continue
            called = instruction.called
            if instruction.op == "conditional" and not rare:
                called = [] if any(_idle(program, c) for c in called) else called
            todo += called
    return found


def _idle(program: Program, name: str) -> bool:
    """A computation that only hands on (copies of) what it is given."""
    return all(x.op in PASSED_ON | {"copy"} for x in program.get(name, []))


def rewrites(
    text: str,
    shapes: Iterable[tuple[int, ...]],
    codes: Iterable[tuple[int, ...]] = (),
) -> list[str]:
    """Instructions in a loop that write a whole array of one of these shapes anew.

    Copies in any layout, transposes, and whatever else makes such an array without
    updating it in place; of rare branches only the copies. ``codes`` are those of the
    shapes that arrays of one byte a number have: to convert these to a wider type is
    to read them.
    """
    program = parse(text)
    large = set(shapes)
    permuted = {tuple(sorted(shape)) for shape in shapes}
    of_codes = set(codes)
    common = {x.name for x in loop_instructions(program, rare=False)}
    found = []
    for instruction in loop_instructions(program):
        op = instruction.op
        if op == "fusion":
            op = _root_op(program, instruction)
        same = any(shape in large for shape in instruction.shapes)
        moved = any(tuple(sorted(shape)) in permuted for shape in instruction.shapes)
        if not same and not (moved and op == "transpose"):
            continue
        if op == "convert" and _widens(instruction, of_codes):
            continue
        if op in COPIES or (op not in IN_PLACE and instruction.name in common):
            found.append(f"{instruction.name} ({instruction.op}, {op})")
    return found


def _widens(conversion: Instruction, codes: set[tuple[int, ...]]) -> bool:
    narrow = ONE_BYTE.search(conversion.type) is not None
    return not narrow and all(shape in codes for shape in conversion.shapes)


def host_calls(text: str) -> list[str]:
    """Instructions that move data to or from the host, anywhere in the program."""
    found = []
    for instructions in parse(text).values():
        for instruction in instructions:
            target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
            calls = target is not None and any(
                word in target[1].lower() for word in HOST_TARGETS
            )
            if instruction.op in HOST or calls:
                found.append(f"{instruction.name} ({instruction.op})")
    return found


def _root_op(program: Program, fusion: Instruction) -> str:
    """The operation that writes a fusion's result, seen through bitcasts."""
    body = program.get(fusion.called[0], []) if fusion.called else []
    by_name = {instruction.name: instruction for instruction in body}
    root = next((x for x in body if x.is_root), None)
    while root is not None and root.op == "bitcast":
        operand = re.match(r"%?([\w.\-]+)", root.rest)
        root = by_name.get(operand[1]) if operand else None
    return "unknown" if root is None else root.op
