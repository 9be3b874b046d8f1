"""What is odd about a machine: where its curve is not what the law leads to expect."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from specjax.analysis.costs.calibrated import Calibrated, Curve

JUMP, DIP, SLOW, NOISE, BUSY, FEW = 1.25, 0.93, 0.5, 0.10, 0.5, 5


@dataclasses.dataclass(frozen=True)
class Oddity:
    """Something to know before one builds on a prediction."""

    kind: str
    """``"busy"``, ``"jump"``, ``"dip"``, ``"not memory"``, ``"no fast type"``,
    ``"few turns"`` or ``"noise"``."""
    text: str


def oddities(found: Calibrated) -> list[Oddity]:
    """All that are seen, in the order in which they matter."""
    told = _busy(found)
    for curve in found.curves:
        where = ""
        if len(found.curves) > 1:
            where = f"batch {curve.batch}, context {curve.context}: "
        seen = [*_steps(found, curve), *_rates(found, curve), *_noise(curve)]
        told += [Oddity(each.kind, where + each.text) for each in seen]
    return told


def _busy(found: Calibrated) -> list[Oddity]:
    """Other work, by what the system said before anything was timed."""
    load = found.about.get("load_per_core")
    if load is None or load <= BUSY:
        return []
    text = (
        f"{load:.1f} programs a core were running before this began: measure again "
        "when it is quiet, times may be several times too long"
    )
    return [Oddity("busy", text)]


def _steps(found: Calibrated, curve: Curve) -> list[Oddity]:
    """Widths where the cost jumps, and where more rows cost less."""
    told = []
    for low, high in itertools.pairwise(curve.widths):
        ratio = np.asarray(curve.rounds[high]) / np.asarray(curve.rounds[low])
        middle = float(np.median(ratio))
        where = f"from {low} to {high} rows a round costs {middle:.2f} times as much"
        if middle > JUMP and np.quantile(ratio, 0.25) > 1 + (JUMP - 1) / 2:
            told.append(Oddity("jump", f"the cost jumps: {where}"))
        if middle < DIP and np.quantile(ratio, 0.75) < 1 - (1 - DIP) / 2:
            why = f": {found.dtype} may be off its fast path below {high} rows"
            told.append(Oddity("dip", where + why))
    return told


def _rates(found: Calibrated, curve: Curve) -> list[Oddity]:
    """Plain steps that are not bound by memory, and types that gain nothing."""
    told = []
    # the best of both, for other work slows one and the other
    rate = found.weight_bytes / min(curve.rounds[1])
    share = rate / found.machine.bandwidth
    if share < SLOW:
        text = (
            f"a plain step reads its {found.dtype} weights at {rate / 1e9:.1f} GB/s, "
            f"{share:.0%} of what the memory gives: it is not bound by memory, so "
            "rows are free only as far as the curve says"
        )
        told.append(Oddity("not memory", text))
    rates = found.machine.matrix_flops
    mine, base = rates.get(found.dtype), rates.get("float32")
    if mine and base and found.dtype != "float32" and mine < 1.2 * base:
        text = (
            f"{found.dtype} products run at {mine / 1e9:.0f} GFLOP/s and float32 ones "
            f"at {base / 1e9:.0f}: this device has no fast {found.dtype}"
        )
        told.append(Oddity("no fast type", text))
    return told


def _noise(curve: Curve) -> list[Oddity]:
    """Few turns, and turns that differ: something else runs."""
    plain = np.asarray(curve.rounds[1])
    if len(plain) < FEW:
        text = (
            f"{len(plain)} turns only were timed: intervals tell little, give "
            "--seconds more"
        )
        return [Oddity("few turns", text)]
    low, high = np.quantile(plain, [0.25, 0.75])
    spread = float((high - low) / np.median(plain))
    if spread <= NOISE:
        return []
    text = (
        f"plain steps differ by {spread:.0%} between turns (middle half): other work "
        "runs here, so measure again when it is quiet"
    )
    return [Oddity("noise", text)]
