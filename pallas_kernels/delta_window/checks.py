"""Gated delta windows to check and to time: models, batches and widths."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

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


def make_checks(*, quick: bool, seed: int) -> Iterator[Planned]:
    """Quick: every model once, with the two parts that go through all of the kernel."""
    parts = ("ring", "both") if quick else tuple(PARTS)
    for name, part in itertools.product(MODELS, parts):
        for batch, width in ((3, 3),) if quick else TIMED:
            make = functools.partial(_check, name, part, batch, width, seed)
            yield Planned(f"{name}/{part}-B{batch}-W{width}", make)


def _check(name: str, part: str, batch: int, width: int, seed: int) -> Check:
    problem = Problem(MODELS[name], width, batch, seed)
    function, rest, passes = PARTS[part](problem)
    return Check(
        operation="delta_window",
        name=f"{name}/{part}-B{batch}-W{width}",
        run=functools.partial(_run, function),
        arguments=jax.tree.map(jnp.asarray, (problem.state, *rest)),
        tolerance=TOLERANCE,
        bytes=passes * nbytes(problem.state) + nbytes(rest),
        family=f"{name}/{part}-B{batch}",
        width=width,
    )


def _run(function: Callable[..., Any], by: Implementation, *arguments: Any) -> Any:
    return function(*arguments, implementation=by)


def _window(state: jax.Array, window: Any, *past: Any, implementation: Any) -> Any:
    q, k, v, decay, beta, mask = window
    return api.delta_window(
        q, k, v, decay, beta, state, mask, *past, implementation=implementation
    )


def _verify(problem: Problem) -> tuple[Any, tuple[Any, ...], int]:
    return _window, (problem.window,), 1


def _ring(problem: Problem) -> tuple[Any, tuple[Any, ...], int]:
    num = np.asarray([SLOTS - 5 * (b % 4) for b in range(problem.batch)], np.int32)
    path = np.broadcast_to(np.arange(SLOTS, dtype=np.int32), (problem.batch, SLOTS))
    records = spoilt(problem.records(SLOTS, jnp.bfloat16), path, num)
    return _window, (problem.window, records, num), 1


def _commit(problem: Problem) -> tuple[Any, tuple[Any, ...], int]:
    path, num = problem.paths(problem.width)
    return (
        api.delta_commit,
        (spoilt(problem.records(problem.width), path, num), path, num),
        2,
    )


def _both(problem: Problem) -> tuple[Any, tuple[Any, ...], int]:
    path, num = problem.paths(problem.width)
    records = spoilt(problem.records(problem.width), path, num)

    def run(state: jax.Array, *rest: Any, implementation: Any) -> Any:
        *before, window = rest
        return api.delta_commit_window(
            state, *before, *window, implementation=implementation
        )

    return run, (records, path, num, problem.window), 2


PARTS = {"verify": _verify, "ring": _ring, "commit": _commit, "both": _both}
