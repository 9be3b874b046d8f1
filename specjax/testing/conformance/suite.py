"""Check your own drafter: all contracts, one call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.acceptance.coupled import Coupled
from specjax.acceptance.greedy import Greedy
from specjax.decoding.engine import check_pair
from specjax.decoding.interfaces import AcceptanceRule, Drafter, Target
from specjax.decoding.requests import Request
from specjax.testing.conformance import c1_exactness as c1
from specjax.testing.conformance import c2_no_trace as c2
from specjax.testing.conformance import c3_replay as c3
from specjax.testing.conformance import c4_rows as c4
from specjax.testing.conformance import c5_progress as c5
from specjax.testing.conformance import c6_poison as c6
from specjax.testing.conformance import c7_boundaries as c7
from specjax.testing.conformance import c8_compile as c8
from specjax.testing.conformance import c9_honesty as c9
from specjax.testing.conformance import c9_proposals as proposals
from specjax.testing.conformance.case import Case, Unsuitable
from specjax.testing.toys import Toy

Check = Callable[[Case], str]
"""Raises ``AssertionError`` where a contract is broken; says what it looked at."""

OF_ONE_RUN: tuple[Check, ...] = (
    proposals.the_drafters_state_keeps_its_shape,
    proposals.proposals_are_well_formed,
    proposals.some_drafts_are_accepted,
    c1.tokens_are_plain,
    c1.tokens_are_the_references,
    c3.state_is_a_replay,
    c3.draft_model_is_a_replay,
    c5.every_round_commits,
    c5.finished_rows_are_frozen,
    c9.counters_follow_from_the_log,
    c9.accepted_drafts_are_counted_without_the_bonus,
    c9.figures_follow_from_the_counters,
)
"""These look at one run, and cost little once it is made."""

OF_MORE_RUNS: tuple[Check, ...] = (
    c2.verify_changes_nothing,
    c2.rejected_tokens_leave_no_trace,
    c2.rejected_nan_leaves_no_trace,
    c4.rows_do_not_know_their_place,
    c4.rows_do_not_know_their_neighbours,
    c4.rows_alone_emit_the_same,
    c6.unused_slots_change_nothing,
    c6.a_nan_row_flags_itself,
    c7.eos_ends_rows,
    c7.budgets_end_rows,
    c7.capacity_ends_rows,
    c7.stop_strings_cut_all_alike,
    c8.nothing_is_traced_after_warm_up,
    c8.the_state_is_donated,
    c8.the_loop_copies_no_state,
)
"""These make runs of their own, some of them programs of their own."""

CHECKS = OF_ONE_RUN + OF_MORE_RUNS

OF_ANY_TOKENS: tuple[Check, ...] = (
    c3.state_is_a_replay,
    c3.draft_model_is_a_replay,
    c4.rows_do_not_know_their_place,
    c4.rows_do_not_know_their_neighbours,
    c4.rows_alone_emit_the_same,
    c5.every_round_commits,
    c5.finished_rows_are_frozen,
    c6.unused_slots_change_nothing,
    c9.counters_follow_from_the_log,
    c9.accepted_drafts_are_counted_without_the_bonus,
    c9.figures_follow_from_the_counters,
)
"""What holds of a sampled run that need not have plain decoding's tokens."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check said about one case."""

    contract: str
    check: str
    case: str
    verdict: str  # "ok", "FAILED" or "not made"
    told: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of a suite; ``str`` makes a table of them."""

    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What does not hold."""
        return tuple(f for f in self.findings if f.verdict == "FAILED")

    @property
    def ok(self) -> bool:
        """Whether everything that could be checked holds, and something could."""
        return not self.failures and any(f.verdict == "ok" for f in self.findings)

    def assert_ok(self) -> Report:
        """Raise an ``AssertionError`` with all failures; return the report if none."""
        if not self.ok:
            told = "\n".join(f"{f.case}: {f.told}" for f in self.failures)
            raise AssertionError(told or "nothing could be checked")
        return self

    def __str__(self) -> str:
        lines = [
            f"{f.verdict:8} {f.contract}  {f.case:16} {f.check.replace('_', ' ')}: "
            f"{f.told}"
            for f in self.findings
        ]
        return "\n".join(lines)


def check_drafter(
    drafter: Drafter,
    target: Target | Toy,
    rule: AcceptanceRule | None = None,
    *,
    vocab_size: int | None = None,
    requests: Sequence[Request] | None = None,
    full: bool = False,
    **fields: Any,
) -> Report:
    """Check a drafter against the contracts C1-C9 of decoding.

    ``target`` is what it drafts for: a small one will do, best a ``Toy``, for which
    there is an independent reference. Without ``rule`` the drafter is checked under
    ``Greedy`` and ``Coupled``. ``requests`` default to three rows of uneven prompts
    (ids below ``vocab_size``), greedy, and under ``Coupled`` with every sampling
    setting in use. By default the checks that need many programs are made under the
    last rule alone; ``full`` makes them under each. ``fields`` go to ``Case``.

    A rule that keeps the law and not the tokens is held to the tokens at temperature 0;
    sampled, it is held to what does not depend on them. Its law is the business of
    ``specjax.testing.enumeration``.

    Nothing is raised: read the report, or call its ``assert_ok``. A pair that cannot be
    put together is a ``PairError``.
    """
    if isinstance(target, Toy):
        fields.setdefault("toy", target)
        target = target.decoder
    rules = [rule] if rule is not None else [Greedy(), Coupled()]
    findings = []
    for index, chosen in enumerate(rules):
        check_pair(target, drafter, chosen)
        name = getattr(chosen, "name", type(chosen).__name__)
        same, samples = same_tokens(chosen), getattr(chosen, "samples", True)
        vocab = vocab_size or target.vocab_size
        last = index == len(rules) - 1
        checks = CHECKS if full or last else OF_ONE_RUN
        parts = [(checks, same and samples, name)]
        if not same:
            parts.append((OF_ANY_TOKENS, True, f"{name}, sampled"))
        for made, sampled, told in parts:
            case = Case(
                target=target,
                drafter=drafter,
                rule=chosen,
                requests=tuple(requests or uneven_requests(vocab, sampled=sampled)),
                **fields,
            )
            findings += [find(check, case, told) for check in made]
    return Report(tuple(findings))


def find(check: Check, case: Case, name: str) -> Finding:
    """Make one check and write down what came of it."""
    start = time.perf_counter()
    try:
        verdict, told = "ok", check(case)
    except AssertionError as error:
        verdict, told = "FAILED", str(error)
    except Unsuitable as reason:
        verdict, told = "not made", str(reason)
    except Exception as error:  # a drafter may fail in any way, and the rest be told
        verdict, told = "FAILED", f"raised {type(error).__name__}: {error}"
    return Finding(
        contract=contract(check),
        check=getattr(check, "__name__", str(check)),
        case=name,
        verdict=verdict,
        told=told,
        seconds=time.perf_counter() - start,
    )


def same_tokens(rule: AcceptanceRule) -> bool:
    """Whether, with a seed, the rule emits plain decoding's very tokens."""
    return getattr(rule, "same_tokens", True)


def contract(check: Check) -> str:
    """``C1`` .. ``C9``: the file a check stands in."""
    return check.__module__.rsplit(".", 1)[-1].split("_")[0].upper()


def uneven_requests(
    vocab_size: int,
    *,
    sampled: bool,
    batch: int = 3,
    max_tokens: int = 32,
    seed: int = 0,
) -> tuple[Request, ...]:
    """Rows of different lengths and budgets, the second with a prompt of one token.

    ``sampled``: rows differ in temperature, one of them 0, and together use every
    cut-off and penalty. Prompts repeat themselves, so that look-up drafters find some.
    """
    draw = np.random.default_rng(seed)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.2},
        {"repetition_penalty": 1.2, "logit_bias": {vocab_size // 3: 1.5}},
        {"temperature": 1.1, "top_k": 12, "min_p": 0.02, "presence_penalty": 0.3},
    ]
    requests = []
    for row in range(batch):
        phrase = draw.integers(0, vocab_size, 1 if row == 1 else 5 + row)
        prompt = np.tile(phrase, 1 if row == 1 else 2)
        requests.append(
            Request(
                prompt_ids=tuple(prompt.tolist()),
                max_tokens=max_tokens - 7 * (row % 3),
                seed=1000 + row,
                **(settings[row % len(settings)] if sampled else {}),
            )
        )
    return tuple(requests)
