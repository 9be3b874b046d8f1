"""Mixtures of experts: how many experts the rows of a window touch.

A dense layer is read once for any number of rows. Of experts each row picks its own, so
more rows read more weights: verification is not free there, and least so where experts
lie in slower memory. Sources: the GCN report's second row at +52 %, and for the
coverage the usual balls-in-bins count.
"""

from __future__ import annotations

from specjax.analysis.law.sizes import Number, at_least, probability


def coverage(active: int, experts: int, rows: Number) -> Number:
    """The share of experts that ``rows`` rows touch: 1 - (1 - active / experts)^rows.

    Each row picks ``active`` of ``experts``, independently of the others. Rows of one
    text do not: neighbours share experts, so this is more than is seen.
    """
    at_least("active", active, 1)
    at_least("experts", experts, active)
    at_least("rows", rows, 0)
    return 1 - (1 - active / experts) ** rows


def expert_reads(active: int, experts: int, rows: Number) -> Number:
    """Expert weights that ``rows`` rows read, over those of one row."""
    return coverage(active, experts, rows) / coverage(active, experts, 1)


def verify_cost_offloaded(
    offloaded_share: Number, active: int, experts: int, rows: Number
) -> Number:
    """``c_verify`` where a share of a plain step's time reads offloaded experts.

    The rest of a step is taken as free of rows. ``offloaded_share`` is of the time of a
    plain step: bytes of offloaded experts that one row reads, over the slow memory's
    rate, over the step.
    """
    probability("offloaded_share", offloaded_share)
    more = expert_reads(active, experts, rows) - 1
    return 1 + offloaded_share * more


def offloaded_share(
    c_verify: Number, active: int, experts: int, rows: Number
) -> Number:
    """The share at which ``rows`` rows cost ``c_verify`` plain steps.

    Raises ``ValueError`` if experts alone cannot explain so much.
    """
    more = expert_reads(active, experts, rows) - 1
    if not more > 0:
        raise ValueError(
            f"rows = {rows}, active = {active} of {experts}: no further expert is "
            "read, so no share of them explains a cost"
        )
    share = (c_verify - 1) / more
    if not 0 <= share <= 1:
        raise ValueError(
            f"c_verify = {c_verify}: {rows} rows read {1 + more:.3f} times the experts "
            f"of one, so they cost between 1 and {1 + more:.3f}"
        )
    return share
