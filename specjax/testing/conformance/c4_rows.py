"""C4: a row depends on itself alone."""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.decoding.requests import Request
from specjax.testing.conformance.case import (
    Case,
    Trace,
    Unsuitable,
    needs_canonical,
    record,
    same_bits,
)


def rows_do_not_know_their_place(case: Case) -> str:
    """Rows in another order: each has the same bits after every round."""
    needs_canonical(case)
    case = _one_width(case)
    if case.batch < 2:
        raise Unsuitable("one row has no place to change")
    for shift in range(1, case.batch):
        order = np.roll(np.arange(case.batch), shift).tolist()
        moved = case.for_rows(order).trace
        for place, row in enumerate(order):
            same_row(case.trace, row, moved, place, f"at place {place}")
    return f"{case.batch - 1} other orders"


def rows_do_not_know_their_neighbours(case: Case) -> str:
    """Other neighbours, or finished ones: each row has the same bits."""
    needs_canonical(case)
    case = _one_width(case)
    if case.batch < 2:
        raise Unsuitable("one row has no neighbours")
    for row in range(case.batch):
        for told, change in (("other", _other), ("finished", _finished)):
            requests = tuple(
                request if i == row else change(request, case.target.vocab_size)
                for i, request in enumerate(case.requests)
            )
            trace = record(case.but(requests=requests).engine(), requests)
            same_row(case.trace, row, trace, row, f"beside {told} rows")
    return f"{2 * case.batch} other batches"


def rows_alone_emit_the_same(case: Case) -> str:
    """A row in a batch of its own has the same tokens, and as many of them accepted."""
    if case.batch < 2:
        raise Unsuitable("the row is alone")
    for row in range(case.batch):
        alone = case.for_rows([row]).trace
        same_tokens(case, row, alone, 0, "alone")
    return f"{case.batch} rows alone"


def same_tokens(case: Case, row: int, other: Trace, place: int, told: str) -> None:
    """The row's tokens, end and counters are those of another batch."""
    pairs = {
        "output": (case.trace.outputs[row], other.outputs[place]),
        "finish reason": (case.trace.reason(row), other.reason(place)),
        "accepted drafts": (
            int(case.trace.last.stats.accepted[row]),
            int(other.last.stats.accepted[place]),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise AssertionError(
                f"C4: row {row}: {name} is {ours} in a batch of {case.batch}, "
                f"{theirs} {told}"
            )


def same_row(a: Trace, row: int, b: Trace, place: int, told: str) -> None:
    """A row of one run and a row of another, to the last bit after every round."""
    for number, (left, right) in enumerate(zip(a.snapshots, b.snapshots, strict=False)):
        ours, theirs = left.row(row), right.row(place)
        for part in ours:
            for x, y in zip(ours[part], theirs[part], strict=True):
                if not same_bits(x, y):
                    raise AssertionError(
                        f"C4: round {number}, row {row}: its {part} has other bits "
                        f"{told}: {_first_difference(x, y)}"
                    )
        if left.done[row]:
            return
    raise AssertionError(f"C4: row {row} takes another number of rounds {told}")


def _one_width(case: Case) -> Case:
    """With several widths the widest neighbour chooses, and widths round otherwise."""
    widths = (case.drafter.max_nodes + 1,)
    return case if case.widths == widths else case.but(widths=widths)


def _other(request: Request, vocab_size: int) -> Request:
    prompt = [(token + 1) % vocab_size for token in reversed(request.prompt_ids)]
    seed = request.seed ^ 12345
    return dataclasses.replace(request, prompt_ids=prompt, seed=seed)


def _finished(request: Request, vocab_size: int) -> Request:
    return dataclasses.replace(request, max_tokens=0)


def _first_difference(x: np.ndarray, y: np.ndarray) -> str:
    if x.shape != y.shape:
        return f"shape {x.shape} and {y.shape}"
    different = np.flatnonzero(x.ravel() != y.ravel())
    if different.size == 0:
        return "only in the sign of a zero or the bits of a NaN"
    at = different[0]
    return f"{x.ravel()[at]} and {y.ravel()[at]} at {np.unravel_index(at, x.shape)}"
