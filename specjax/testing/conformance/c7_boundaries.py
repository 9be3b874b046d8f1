"""C7: where a row ends, everything ends: ids, text, log-probabilities and counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.decoding.generate import Completion, generate
from specjax.decoding.types import NO_TOKEN, FinishReason
from specjax.testing.conformance.case import Case, Trace, Unsuitable
from specjax.testing.reference import logits
from specjax.testing.reference.model import softmax

CALL = 4
"""Rounds a call when whole generations are made."""


def eos_ends_rows(case: Case) -> str:
    """End-of-sequence ids inside a round's path and at its end: rows end at the first.

    What was accepted behind such an id falls away.
    """
    truth = case.plain.outputs
    ids, inside = eos_of(case.trace)
    ended = case.but(eos_ids=ids)
    wanted = [until(output, ids) for output in truth]
    reasons = [
        FinishReason.STOP if output and output[-1] in ids else case.plain.reason(row)
        for row, output in enumerate(wanted)
    ]
    expect(ended.trace, wanted, reasons, f"end-of-sequence ids {ids}")
    stopped = sum(reason is FinishReason.STOP for reason in reasons)
    told = "one of them" if inside else "none of them"
    return f"ids {ids}, {told} inside a round, {stopped} of {case.batch} rows stopped"


def eos_of(trace: Trace) -> tuple[tuple[int, int], bool]:
    """Two ids that end rows, the first inside a round if any round accepted a draft."""
    inside, last = _new_tokens(trace)
    if not inside and not last:
        raise Unsuitable("the outputs are too short to stop inside them")
    for row, index, token in sorted(inside, key=lambda found: -found[1]):
        for other_row, _, other in sorted(last, key=lambda found: -found[1]):
            # neither may hide the other
            if row != other_row and other not in trace.outputs[row][: index + 1]:
                return (token, other), True
    found = [token for _, _, token in [*inside, *last]]
    return (found[0], found[-1]), bool(inside)


def _new_tokens(trace: Trace) -> tuple[list[tuple[int, int, int]], ...]:
    """``(row, index, token)`` of tokens that their row has not had before, apart: not
    the last of their round, and the last. The very first tokens are left out.
    """
    inside, last = [], []
    for row, output in enumerate(trace.outputs):
        start = 0
        for snapshot in trace.rounds:
            assert snapshot.log is not None
            stop = start + int(snapshot.log.committed[row])
            for index in range(max(start, 2), stop):
                if output[index] not in output[:index]:
                    found = (row, index, output[index])
                    (last if index == stop - 1 else inside).append(found)
            start = stop
    return inside, last


def until(output: Sequence[int], ids: Sequence[int]) -> tuple[int, ...]:
    """The output up to and with its first end-of-sequence id."""
    for index, token in enumerate(output):
        if token in ids:
            return tuple(output[: index + 1])
    return tuple(output)


def budgets_end_rows(case: Case) -> str:
    """Budgets of 0, 1, K and K + 1 tokens: as many tokens, the same ones."""
    depth = case.drafter.max_depth
    budgets = sorted({0, 1, depth, depth + 1})
    truth = case.plain.outputs
    for start in range(len(budgets)):
        given = [budgets[(start + row) % len(budgets)] for row in range(case.batch)]
        requests = tuple(
            dataclasses.replace(request, max_tokens=min(budget, len(output)))
            for request, budget, output in zip(case.requests, given, truth, strict=True)
        )
        cut = case.but(requests=requests)
        wanted = [
            output[: request.max_tokens]
            for output, request in zip(truth, requests, strict=True)
        ]
        reasons = [FinishReason.LENGTH] * case.batch
        expect(cut.trace, wanted, reasons, f"budgets {given}")
    return f"budgets {budgets}"


def capacity_ends_rows(case: Case) -> str:
    """No budget: rows end where the capacity does, and nothing is written beyond it.

    Once with a capacity inside the arrays, once with the arrays' own end.
    """
    told = []
    longest = max(len(request.prompt_ids) for request in case.requests)
    for capacity in (longest + case.drafter.max_depth + 2, 128):
        requests = tuple(
            dataclasses.replace(
                request,
                max_tokens=None,
                prompt_ids=_stretched(request.prompt_ids, capacity - 6 - 3 * row),
            )
            for row, request in enumerate(case.requests)
        )
        full = case.ask(requests, max_capacity=capacity)
        wanted = full.plain.outputs
        for row, request in enumerate(requests):
            if len(wanted[row]) != capacity - len(request.prompt_ids):
                raise AssertionError(
                    f"C7: row {row}: without drafts {len(wanted[row])} tokens behind "
                    f"a prompt of {len(request.prompt_ids)} in a capacity of {capacity}"
                )
        reasons = [FinishReason.CAPACITY] * case.batch
        expect(full.trace, wanted, reasons, f"capacity {capacity}")
        beyond = full.trace.last.tokens[:, capacity:]
        if (beyond != NO_TOKEN).any():
            raise AssertionError(f"C7: tokens were written beyond capacity {capacity}")
        told.append(str(capacity))
    return f"capacities {' and '.join(told)}"


def _stretched(prompt: Sequence[int], length: int) -> tuple[int, ...]:
    """The prompt, repeated or cut to ``length`` tokens (at least one)."""
    return tuple(np.resize(np.array(prompt, np.int64), max(length, 1)).tolist())


def expect(
    trace: Trace,
    wanted: Sequence[Sequence[int]],
    reasons: Sequence[FinishReason],
    told: str,
) -> None:
    """Outputs, ends and counters of a run, and no token behind the end."""
    for row, (output, reason) in enumerate(zip(wanted, reasons, strict=True)):
        if trace.outputs[row] != tuple(output):
            raise AssertionError(
                f"C7: {told}: row {row} emits {list(trace.outputs[row])}, it should "
                f"have ended with {list(output)}"
            )
        if trace.reason(row) is not reason:
            raise AssertionError(
                f"C7: {told}: row {row} ends with {trace.reason(row).name}, not with "
                f"{reason.name}"
            )
        if int(trace.last.stats.committed[row]) != len(output):
            raise AssertionError(
                f"C7: {told}: row {row} counts {int(trace.last.stats.committed[row])} "
                f"tokens and emits {len(output)}"
            )
        if (trace.last.tokens[row, trace.last.lengths[row] :] != NO_TOKEN).any():
            raise AssertionError(f"C7: {told}: row {row} wrote behind its end")


def stop_strings_cut_all_alike(case: Case) -> str:
    """Stop strings inside, across and at the end of tokens.

    Ids, text, log-probabilities and counters are cut at one place.
    """
    truth = case.plain.outputs
    if min(map(len, truth)) < 3:
        raise Unsuitable("the outputs are too short to stop inside them")
    engine = case.engine(rounds_per_call=CALL, top_logprobs=2, widths=case.widths)
    count = 0
    for place in (0, 1, 3, 6):
        stops = []
        for output in truth:
            text = spell(output)
            at = min(WORD * place + 1, len(text) - WORD)
            stops.append((text[at : at + WORD], "never"))
        requests = [
            dataclasses.replace(request, stop=stop)
            for request, stop in zip(case.requests, stops, strict=True)
        ]
        completions = generate(engine, requests, detokenize=spell)
        for row, completion in enumerate(completions):
            _check_stop(case, row, completion, stops[row][0])
            count += 1
    return f"{count} rows stopped"


WORD = 4
"""Letters of a token's text."""


def spell(ids: Sequence[int]) -> str:
    """A text of four letters for every id, none of which is a repetition."""
    letters = "abcdefghijklmnop"
    words = []
    for token in ids:
        mixed = (int(token) * 40503 + 12345) % 16**WORD
        words.append("".join(letters[(mixed >> 4 * i) % 16] for i in range(WORD)))
    return "".join(words)


def _check_stop(case: Case, row: int, completion: Completion, stop: str) -> None:
    truth = case.plain.outputs[row]
    keep = next(n for n in range(len(truth) + 1) if stop in spell(truth[:n]))
    told = f"C7: row {row}, stop string {stop!r}: "
    if completion.ids != truth[:keep]:
        raise AssertionError(
            f"{told}ids {list(completion.ids)}, wanted {list(truth[:keep])}"
        )
    text = spell(truth[:keep])
    if completion.text != text[: text.index(stop)]:
        raise AssertionError(f"{told}the text is {completion.text!r}")
    if completion.finish_reason is not FinishReason.STOP_STRING:
        raise AssertionError(f"{told}it ends with {completion.finish_reason.name}")
    if completion.logprobs is None or len(completion.logprobs) != keep:
        raise AssertionError(f"{told}not one log-probability for each of {keep} ids")
    said = [(r.drafted, r.accepted, r.committed) for r in completion.rounds]
    wanted = _cut_log(case.trace, row, keep)
    if said != wanted:
        raise AssertionError(
            f"{told}rounds (drafted, accepted, committed) are {said}, wanted {wanted}"
        )
    if len(completion.from_draft) != keep:
        raise AssertionError(f"{told}{len(completion.from_draft)} flags for {keep} ids")
    _check_logprobs(case, row, completion, told)


def _cut_log(trace: Trace, row: int, keep: int) -> list[tuple[int, int, int]]:
    """The rounds of a run, cut behind the first ``keep`` tokens."""
    rounds: list[tuple[int, int, int]] = []
    for snapshot in trace.rounds:
        log, left = snapshot.log, keep - sum(r[2] for r in rounds)
        if log is None or left <= 0 or not log.committed[row]:
            break
        committed = min(int(log.committed[row]), left)
        accepted = min(int(log.accepted[row]), committed)
        rounds.append((int(log.drafted[row]), accepted, committed))
    return rounds


def _check_logprobs(case: Case, row: int, completion: Completion, told: str) -> None:
    """The reference's log-probabilities of the same tokens."""
    if case.toy is None or completion.logprobs is None:
        return
    ids = [*completion.prompt_ids, *completion.ids]
    rows = logits(case.toy.tensors, case.toy.config, ids, last=len(completion.ids) + 1)
    for index, (token, said) in enumerate(
        zip(completion.ids, completion.logprobs, strict=True)
    ):
        wanted = float(np.log(softmax(rows[index])[token]))
        if not abs(said.logprob - wanted) < 1e-3:
            raise AssertionError(
                f"{told}token {index} has log-probability {said.logprob}, the "
                f"reference says {wanted}"
            )
