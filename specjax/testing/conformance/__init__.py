"""The conformance suite: contracts C1-C9 of decoding, for any drafter.

``check_drafter(MyDrafter(), toy_llama()).assert_ok()`` makes all of them; each check
is also a function of a ``Case``, to be used in a test of its own.
"""

from specjax.testing.conformance.case import Case, Trace, Unsuitable, record
from specjax.testing.conformance.suite import (
    CHECKS,
    OF_ANY_TOKENS,
    OF_MORE_RUNS,
    OF_ONE_RUN,
    Check,
    Finding,
    Report,
    check_drafter,
    contract,
    find,
    uneven_requests,
)

__all__ = [
    "CHECKS",
    "OF_ANY_TOKENS",
    "OF_MORE_RUNS",
    "OF_ONE_RUN",
    "Case",
    "Check",
    "Finding",
    "Report",
    "Trace",
    "Unsuitable",
    "check_drafter",
    "contract",
    "find",
    "record",
    "uneven_requests",
]
