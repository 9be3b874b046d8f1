"""C9: counters are exact, and every figure follows from them."""

from __future__ import annotations

import numpy as np

from specjax.decoding.stats import alpha, tau
from specjax.testing.conformance.case import Case


def counters_follow_from_the_log(case: Case) -> str:
    """The counters are the sums of the log, and the log is what the tokens show."""
    trace, depth = case.trace, case.drafter.max_depth
    for row in range(case.batch):
        rounds = [s.log for s in trace.rounds if s.log is not None]
        committed = [int(log.committed[row]) for log in rounds]
        accepted = [int(log.accepted[row]) for log in rounds]
        drafted = [int(log.drafted[row]) for log in rounds]
        grown = np.diff([int(s.lengths[row]) for s in trace.snapshots]).tolist()
        _equal(row, "committed tokens by round", committed, grown)
        ran = [c > 0 for c in committed]
        stats = trace.last.stats
        sums = {
            "rounds": (stats.rounds, sum(ran)),
            "drafted": (stats.drafted, sum(drafted)),
            "accepted": (stats.accepted, sum(accepted)),
            "committed": (stats.committed, sum(committed)),
        }
        for name, (counter, counted) in sums.items():
            _equal(row, name, int(counter[row]), counted)
        _equal(row, "output length", len(trace.outputs[row]), sum(committed))
        _equal(
            row,
            "accepted by position",
            stats.accepted_by_position[row].tolist(),
            [sum(a > i for a in accepted) for i in range(depth)],
        )
        if (stats.accepted_by_position[row] > stats.drafted_by_position[row]).any():
            raise AssertionError(
                f"C9: row {row}: more accepted than drafted at a depth"
            )
    return f"{len(trace.rounds)} rounds of {case.batch} rows"


def accepted_drafts_are_counted_without_the_bonus(case: Case) -> str:
    """A round commits its accepted drafts and one token of the target's own.

    A round that an end cut short may end with an accepted draft.
    """
    for number, snapshot in enumerate(case.trace.rounds, start=1):
        log = snapshot.log
        assert log is not None
        for row in range(case.batch):
            drafted, accepted = int(log.drafted[row]), int(log.accepted[row])
            committed = int(log.committed[row])
            told = (
                f"C9: round {number}, row {row}: {drafted} drafted, {accepted} "
                f"accepted, {committed} committed"
            )
            cut_short = bool(snapshot.done[row])
            sound = 0 <= accepted <= min(drafted, case.drafter.max_depth)
            exact = accepted in (committed - 1, committed) and (
                cut_short or committed == 0 or accepted == committed - 1
            )
            if not (sound and exact and (committed > 0 or drafted == 0)):
                raise AssertionError(told)
    return f"{len(case.trace.rounds)} rounds"


def figures_follow_from_the_counters(case: Case) -> str:
    """tau lies in 1 .. K + 1, alpha in 0 .. 1, and no token came from nowhere."""
    stats = case.trace.last.stats
    committed, rounds = int(stats.committed.sum()), int(stats.rounds.sum())
    accepted = int(stats.accepted.sum())
    t, a = tau(committed, rounds), alpha(accepted, int(stats.drafted.sum()))
    if rounds and not 1 <= t <= case.drafter.max_depth + 1:
        raise AssertionError(
            f"C9: tau = {t} is outside 1 .. K + 1 = {case.drafter.max_depth + 1}"
        )
    if not 0 <= a <= 1:
        raise AssertionError(f"C9: alpha = {a} is outside 0 .. 1")
    if accepted + rounds < committed:
        raise AssertionError(
            f"C9: {committed} tokens from {rounds} rounds with {accepted} "
            "accepted drafts: some came from nowhere"
        )
    return f"tau {t:.2f}, alpha {a:.2f}"


def _equal(row: int, name: str, said: object, counted: object) -> None:
    if said != counted:
        raise AssertionError(f"C9: row {row}: {name} is {said}, counted {counted}")
