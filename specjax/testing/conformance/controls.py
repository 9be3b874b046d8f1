"""Cases to put mistakes into, for negative controls: what the suite must catch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from specjax.acceptance.coupled import Coupled
from specjax.acceptance.greedy import Greedy
from specjax.testing.conformance.case import Case, Unsuitable
from specjax.testing.conformance.matrix import toy
from specjax.testing.conformance.suite import OF_ONE_RUN, Check, uneven_requests
from specjax.testing.forced import accept_pattern, plant, trees_of

NODES = 4


@cache
def sound(target: str, sampled: bool) -> Case:
    """A case without a mistake: small trees with siblings, every accept count."""
    made = toy(target)
    vocab = made.decoder.vocab_size
    return Case.plant(
        lambda outputs: plant(
            outputs, accept_pattern(40, len(outputs), NODES), trees_of(NODES), vocab
        ),
        target=made.decoder,
        rule=Coupled() if sampled else Greedy(),
        requests=uneven_requests(vocab, sampled=sampled, max_tokens=24),
        toy=made,
        widths=(NODES + 1,),
    )


def broken(case: Case, **changes: Any) -> Case:
    """The case with a mistake in it, beside plain decoding without the mistake."""
    faulty = case.but(**changes)
    faulty.__dict__["plain"] = case.plain
    return faulty


def caught(case: Case, checks: Sequence[Check] = OF_ONE_RUN) -> set[str]:
    """The contracts that a case is found to break: what the messages begin with."""
    found = set()
    for check in checks:
        try:
            check(case)
        except AssertionError as error:
            found.add(str(error).split(":")[0])
        except Unsuitable:
            continue
    return found
