"""What the same drafts would give on other devices, by the roofline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from specjax.analysis.law import (
    DEVICES,
    Model,
    break_even_batch,
    pass_seconds,
    speedup,
    verify_cost,
)
from specjax.analysis.law.sizes import Number


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """One device's line: bounds, not promises."""

    device: str
    chips: int
    """That hold the weights, keys and values, and share all work evenly."""
    plain_rate: float | None
    """Tokens a second of one request without drafts; ``None``: unknown."""
    c_verify: float
    speedup: float
    break_even_batch: float | None
    """Requests beyond which drafts lose; ``None``: unknown."""

    @property
    def rate(self) -> float | None:
        """Tokens a second of one request with drafts."""
        return None if self.plain_rate is None else self.plain_rate * self.speedup


def elsewhere(
    model: Model,
    *,
    tau: Number,
    rows: int,
    c_draft: Number,
    batch: int = 1,
    context: int = 0,
    memory_share: float = 1.0,
    compute_share: float = 1.0,
    names: Iterable[str] = tuple(DEVICES),
) -> list[Elsewhere]:
    """The published devices, at these shares of what their data sheets promise.

    ``c_draft`` is kept: a drafter that reads as much of its weights a plain step as
    here costs as much there while both are bound by memory.
    """
    found = []
    for name in names:
        published = DEVICES[name]
        device = published.device(
            memory_share=memory_share, compute_share=compute_share
        )
        held = model.bytes + batch * context * model.kv_bytes
        chips = math.ceil(held / published.memory)
        cost = verify_cost(model, device, rows=rows, batch=batch, context=context)
        step = pass_seconds(model, device, batch=batch, context=context)
        found.append(
            Elsewhere(
                device=name,
                chips=chips,
                plain_rate=chips / step,
                c_verify=cost,
                speedup=speedup(tau, c_draft, cost),
                break_even_batch=break_even_batch(
                    model, device, tau=tau, rows=rows, c_draft=c_draft, context=context
                ),
            )
        )
    return found
