"""The speed-up law: tau over what a round costs, in plain steps.

speed-up = tau / (c_verify + c_draft + c_rest)

where ``c_verify`` is T(W) / T(plain step), ``c_draft`` the seconds of drafting over
those of a plain step, and ``c_rest`` all else that a round does beyond a plain one.
The lecture's form, tau / (1 + c_draft), is this one with free verification; Leviathan
et al. 2023 (2211.17192, theorem 3.8) has it for k drafts of cost c each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from specjax.analysis.law.acceptance_length import bisect, chain_tau
from specjax.analysis.law.sizes import Device, Model, Number, at_least, positive
from specjax.analysis.law.verification import pass_seconds

Cost = Callable[[int], float]
"""From ``k`` to what a round of ``k`` drafts costs, in plain steps."""


def speedup(
    tau: Number, c_draft: Number = 0.0, c_verify: Number = 1.0, c_rest: Number = 0.0
) -> float:
    """Tokens a second over plain decoding's; of arrays, number by number."""
    return tau / positive("the cost of a round", c_verify + c_draft + c_rest)


def break_even_alpha(k: int, cost: Number) -> float | None:
    """The alpha at which chains of ``k`` drafts gain nothing; ``None``: none does.

    ``cost`` is that of a round in plain steps. For one draft it is ``cost - 1``.
    """
    at_least("k", k, 1)
    positive("cost", cost)
    if cost > k + 1:
        return None
    if cost <= 1:
        return 0.0
    return bisect(lambda alpha: chain_tau(alpha, k) - cost, 0.0, 1.0)


def best_k(alpha: Number, cost: Cost, ks: Iterable[int]) -> int:
    """Of these ``k`` the fastest, the smallest of equals; 0 is plain decoding."""
    gains = {k: chain_tau(alpha, k) / cost(k) if k else 1.0 for k in sorted({0, *ks})}
    return max(gains, key=lambda k: (gains[k], -k))


def round_cost(
    model: Model,
    device: Device,
    *,
    rows: Number,
    c_draft: Number = 0.0,
    batch: Number = 1,
    context: Number = 0,
) -> float:
    """What a round of ``rows`` window rows costs in plain steps, by the roofline.

    ``c_draft`` is drafting's cost in plain steps of this batch.
    """
    at_least("c_draft", c_draft, 0)
    step = pass_seconds(model, device, batch=batch, context=context)
    wide = pass_seconds(model, device, rows=rows, batch=batch, context=context)
    return wide / step + c_draft


def break_even_batch(
    model: Model,
    device: Device,
    *,
    tau: Number,
    rows: Number,
    c_draft: Number = 0.0,
    context: Number = 0,
    most: Number = 1e6,
) -> float:
    """The batch beyond which rounds of ``rows`` rows lose; inf: never, 0: at any batch.

    While a step is bound by memory a round costs about one; once ``B rows`` are bound
    by arithmetic its cost grows, to ``rows`` at most. Long contexts push the batch up:
    keys and values are read once for all rows, and may bind a step at any batch.
    Raises ``ValueError`` for a tau or a cost that cannot be.
    """
    at_least("tau", tau, 0)
    at_least("most", most, 1)

    def loss(batch: Number) -> float:
        cost = round_cost(
            model, device, rows=rows, c_draft=c_draft, batch=batch, context=context
        )
        return cost - tau

    if loss(1.0) > 0:
        return 0.0
    if loss(most) <= 0:
        return math.inf
    return bisect(loss, 1.0, most)


@dataclasses.dataclass(frozen=True)
class Limit:
    """What stands between a drafter and a higher speed-up."""

    name: str
    """``"verification"``, ``"draft"`` or ``"acceptance"``."""
    speedup_without: float
    """What it would be without that: verifying for one plain step, drafting for
    nothing, or having every draft accepted."""


def limits(
    tau: Number,
    k: int,
    c_draft: Number,
    c_verify: Number,
    c_full: Number | None = None,
) -> list[Limit]:
    """The three, the one that holds back most first.

    ``k`` is the longest draft. ``c_verify`` counts all that is not drafting, over
    rounds as they come; ``c_full`` is that of rounds that draft all they can, which
    they would if every draft were accepted (``None``: the same).
    """
    full = c_verify if c_full is None else c_full
    found = [
        Limit("verification", speedup(tau, c_draft, min(1.0, c_verify))),
        Limit("draft", speedup(tau, 0.0, c_verify)),
        Limit("acceptance", speedup(k + 1, c_draft, full)),
    ]
    return sorted(found, key=lambda limit: -limit.speedup_without)
