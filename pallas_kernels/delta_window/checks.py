"""Gated delta windows to check and to time: models, batches and widths."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot.case import nbytes
from pallas_kernels.check import Check, Planned
from pallas_kernels.delta_window import api
from pallas_kernels.delta_window.problems import Problem, spoilt
from pallas_kernels.delta_window.specs import MODELS
from pallas_kernels.platforms import Implementation

TOLERANCE = 3e-5
"""Both work in float32; outputs and states go up to about 5."""
SLOTS = 16
"""Of a ring."""
TIMED = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 1), (8, 8), (64, 1), (64, 8))
"""Batches and widths."""
FIRST = ((1, 1), (1, 8), (64, 1), (64, 8))
"""Those of them that tell the most."""


def make_checks(*, quick: bool, seed: int) -> Iterator[Planned]:
    """Quick: every model once, with the two parts that go through all of the kernel."""
    parts = ("ring", "both") if quick else tuple(PARTS)
    for name, part in itertools.product(MODELS, parts):
        for batch, width in ((3, 3),) if quick else TIMED:
            make = functools.partial(_check, name, part, batch, width, seed)
            later = part not in ("verify", "commit") or (batch, width) not in FIRST
            yield Planned(f"{name}/{part}-B{batch}-W{width}", make, later)


class Part(NamedTuple):
    """One of the things that the kernel does."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    passes: int
    """Over the state: to read it, or to read and write it."""
    carried: Callable[[Any], jax.Array] | None = None


def _check(name: str, part: str, batch: int, width: int, seed: int) -> Check:
    problem = Problem(MODELS[name], width, batch, seed)
    made = PARTS[part](problem)
    small = nbytes(made.arguments) - nbytes(problem.state)
    return Check(
        operation="delta_window",
        name=f"{name}/{part}-B{batch}-W{width}",
        run=functools.partial(_run, made.function),
        arguments=jax.tree.map(jnp.asarray, made.arguments),
        tolerance=TOLERANCE,
        bytes=made.passes * nbytes(problem.state) + small,
        family=f"{name}/{part}-B{batch}",
        width=width,
        carried=made.carried,
    )


def _run(function: Callable[..., Any], by: Implementation, *arguments: Any) -> Any:
    return function(*arguments, implementation=by)


def _window(
    q: jax.Array, state: jax.Array, window: Any, *past: Any, implementation: Any
) -> Any:
    k, v, decay, beta, mask = window
    return api.delta_window(
        q, k, v, decay, beta, state, mask, *past, implementation=implementation
    )


def _verify(problem: Problem) -> Part:
    q, *window = problem.window
    return Part(_window, (q, problem.state, window), 1)


def _ring(problem: Problem) -> Part:
    num = np.asarray([SLOTS - 5 * (b % 4) for b in range(problem.batch)], np.int32)
    path = np.broadcast_to(np.arange(SLOTS, dtype=np.int32), (problem.batch, SLOTS))
    records = spoilt(problem.records(SLOTS, jnp.bfloat16), path, num)
    q, *window = problem.window
    return Part(_window, (q, problem.state, window, records, num), 1)


def _commit(problem: Problem) -> Part:
    path, num = problem.paths(problem.width)
    records = spoilt(problem.records(problem.width), path, num)
    arguments = (problem.state, records, path, num)
    return Part(api.delta_commit, arguments, 2, carried=lambda state: state)


def _both(problem: Problem) -> Part:
    path, num = problem.paths(problem.width)
    records = spoilt(problem.records(problem.width), path, num)

    def run(state: jax.Array, *rest: Any, implementation: Any) -> Any:
        *before, window = rest
        return api.delta_commit_window(
            state, *before, *window, implementation=implementation
        )

    arguments = (problem.state, records, path, num, problem.window)
    return Part(run, arguments, 2, carried=lambda found: found[2])


PARTS = {"verify": _verify, "ring": _ring, "commit": _commit, "both": _both}
