"""C5: rows that are not finished go on, and finished ones stand still."""

from __future__ import annotations

from itertools import pairwise

import jax
import numpy as np

from specjax.decoding.types import FinishReason
from specjax.testing.conformance.case import Case, Snapshot, same_bits


def every_round_commits(case: Case) -> str:
    """At least one token a round for every row that is neither finished nor NaN."""
    count = 0
    for number, (before, after) in enumerate(_pairs(case), start=1):
        running = ~before.done & (after.finish_reason != int(FinishReason.NAN))
        committed = after.lengths - before.lengths
        stuck = np.flatnonzero(running & (committed < 1))
        if stuck.size:
            raise AssertionError(
                f"C5: round {number}: row {stuck[0]} is not finished and committed "
                f"{committed[stuck[0]]} tokens"
            )
        count += int(running.sum())
    return f"{count} rounds of rows"


def finished_rows_are_frozen(case: Case) -> str:
    """Tokens, states, counters and ends of finished rows stay to the bit."""
    count = 0
    for number, (before, after) in enumerate(_pairs(case), start=1):
        for row in np.flatnonzero(before.done).tolist():
            old, new = before.row(row), after.row(row)
            old["drafter state"] = _drafter_row(before, row)
            new["drafter state"] = _drafter_row(after, row)
            for part in old:
                if not all(map(same_bits, old[part], new[part])):
                    raise AssertionError(
                        f"C5: round {number}: row {row} is finished, but its {part} "
                        "changed"
                    )
            assert after.log is not None
            logged = [after.log.drafted, after.log.accepted, after.log.committed]
            if any(int(entry[row]) for entry in logged):
                raise AssertionError(
                    f"C5: round {number}: row {row} is finished, but the log counts "
                    f"{[int(entry[row]) for entry in logged]} drafted, accepted and "
                    "committed"
                )
            count += 1
    return f"{count} rounds of finished rows"


def _pairs(case: Case) -> list[tuple[Snapshot, Snapshot]]:
    snapshots = case.trace.snapshots
    return list(pairwise(snapshots))


def _drafter_row(snapshot: Snapshot, row: int) -> list[np.ndarray]:
    """What the drafter holds for a row: the arrays whose first axis is the batch."""
    batch = snapshot.lengths.shape[0]
    leaves = jax.tree.leaves(snapshot.drafter)
    return [np.array(x[row]) for x in leaves if x.ndim and x.shape[0] == batch]
