"""Several things timed in turn, so that a slow moment of the machine hits them all."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

LEAST, MOST = 3, 15
"""Turns: as many as fit the time that is given, between these."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Something to time."""

    name: str
    call: Callable[[Any], int]
    """Does it, waits for the end, and says how many times it was done."""
    prepare: Callable[[], Any] = lambda: None
    """Makes what ``call`` takes; not timed."""


def once(name: str, function: Callable[[], Any]) -> Part:
    """A part that is one call of a function of JAX."""

    def call(_: Any) -> int:
        jax.block_until_ready(function())
        return 1

    return Part(name, call)


def compile_all(parts: Sequence[Part]) -> None:
    """Call each once. Two at a time: XLA's compiler uses one core."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(lambda p=p: p.call(p.prepare())) for p in parts]:
            done.result()


def in_turn(
    parts: Sequence[Part],
    seconds: float,
    step: Callable[[str], None],
    *,
    least: int = LEAST,
    most: int = MOST,
) -> dict[str, list[float]]:
    """Seconds of each part, once a turn, for about so many seconds in all.

    ``step`` is told of each turn; there are ``least`` to ``most``, as the time allows.
    The parts must be compiled. Where a turn begins moves on from turn to turn.
    """
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"parts of the same name: {sorted(names)}")
    times: dict[str, list[float]] = {name: [] for name in names}
    begun = time.perf_counter()
    for turn in range(most):
        used = time.perf_counter() - begun
        if turn >= least and used + used / turn > seconds:
            break
        step(f"timing, turn {turn + 1}")
        first = (turn * 7) % len(parts) if parts else 0
        for part in [*parts[first:], *parts[:first]]:
            times[part.name].append(_seconds(part))
    return times


def _seconds(part: Part) -> float:
    prepared = part.prepare()
    start = time.perf_counter()
    count = part.call(prepared)
    return (time.perf_counter() - start) / count
