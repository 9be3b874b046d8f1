"""Gated delta windows, as the decoder calls them.

On TPU a kernel runs where ``tpu.refusal`` has nothing against it; everywhere else the
reference does. ``platforms.choices`` says which. All functions are those of
``reference.py``, with ``implementation`` as ``platforms.choose`` takes it, and
``spread`` for how batch rows lie on several devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import compat
from pallas_kernels.delta_window import reference, tpu
from pallas_kernels.delta_window.reference import Records, delta_step, take_rows
from pallas_kernels.mesh import Spread
from pallas_kernels.platforms import Implementation, Kernel, choose

__all__ = [
    "Records",
    "delta_commit",
    "delta_commit_window",
    "delta_fold",
    "delta_step",
    "delta_window",
    "take_rows",
]


def delta_window(
    q: Float[Array, "B W G dk"],
    k: Float[Array, "B W G dk"],
    v: Float[Array, "B W H dv"],
    log_decay: Float[Array, "B W H *dk"],
    beta: Float[Array, "B W H"] | None,
    state: Float[Array, "B H dk dv"],
    ancestors: Bool[Array, "B W W"],
    past: Records | None = None,
    num_past: Int[Array, " B"] | None = None,
    *,
    spread: Spread | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B W H dv"], Float[Array, "B W H dv"]]:
    """Outputs and updates of every row; the state is read once and not written."""
    return _choose(
        "delta_window",
        (q, k, v, log_decay, beta, state, ancestors, past, num_past),
        reference.delta_window,
        tpu.delta_window,
        tpu.refusal(state, tpu.Window(q, k, v, log_decay, beta, ancestors), past),
        spread,
        implementation,
    )


def delta_fold(
    state: Float[Array, "B H dk dv"],
    rows: Records,
    num: Int[Array, " B"],
    *,
    spread: Spread | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B H dk dv"]:
    """The state after the first ``num`` rows; its bits stay where ``num`` is 0."""
    return _choose(
        "delta_fold",
        (state, rows, num),
        reference.delta_fold,
        tpu.delta_fold,
        tpu.refusal(state, None, rows, writes=True),
        spread,
        implementation,
    )


def delta_commit(
    state: Float[Array, "B H dk dv"],
    rows: Records,
    path: Int[Array, "B P"],
    num: Int[Array, " B"],
    *,
    spread: Spread | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B H dk dv"]:
    """The state after the first ``num`` rows of ``path``, whose numbers go up."""
    return _choose(
        "delta_commit",
        (state, rows, path, num),
        reference.delta_commit,
        tpu.delta_commit,
        tpu.refusal(state, None, rows, writes=True),
        spread,
        implementation,
    )


def delta_commit_window(
    state: Float[Array, "B H dk dv"],
    rows: Records,
    path: Int[Array, "B P"],
    num: Int[Array, " B"],
    q: Float[Array, "B W G dk"],
    k: Float[Array, "B W G dk"],
    v: Float[Array, "B W H dv"],
    log_decay: Float[Array, "B W H *dk"],
    beta: Float[Array, "B W H"] | None,
    ancestors: Bool[Array, "B W W"],
    *,
    spread: Spread | None = None,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Array, "B W H dv"], Float[Array, "B W H dv"], Float[Array, "B H dk dv"]
]:
    """The commit of one round and the window of the next: outputs, updates, state."""
    window = tpu.Window(q, k, v, log_decay, beta, ancestors)
    return _choose(
        "delta_commit_window",
        (state, rows, path, num, *window),
        reference.delta_commit_window,
        tpu.delta_commit_window,
        tpu.refusal(state, window, rows, writes=True),
        spread,
        implementation,
    )


def _choose(
    operation: str,
    arguments: tuple[Any, ...],
    by_reference: Callable[..., Any],
    kernel: Callable[..., Any],
    refusal: str | None,
    spread: Spread | None,
    implementation: Implementation,
) -> Any:
    if spread is not None:
        kernel = _on_each_device(kernel, spread, batch=arguments[0].shape[0])
    return choose(
        operation,
        arguments,
        reference=by_reference,
        kernels={"tpu": Kernel(kernel, refusal)},
        implementation=implementation,
    )


def _on_each_device(
    kernel: Callable[..., Any], spread: Spread, batch: int
) -> Callable[..., Any]:
    """The kernel on the batch rows of each device; heads are whole everywhere."""

    def run(*arguments: Any, interpret: compat.Interpret = False) -> Any:
        local = functools.partial(kernel, interpret=interpret)
        return spread.by_rows(local, batch)(*arguments)

    return run
