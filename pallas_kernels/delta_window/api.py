"""Gated delta windows, as the decoder calls them.

On a TPU a kernel runs where ``tpu.refusal`` has nothing against it, on a Hopper GPU one
where ``gpu_plan.refusal`` has not, and elsewhere the reference; ``platforms.choices``
says which. All functions are those of ``reference.py``, with ``implementation`` as
``platforms.choose`` takes it, and ``spread`` for how batch rows lie on several devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import compat
from pallas_kernels.delta_window import gpu, gpu_plan, reference, tpu
from pallas_kernels.delta_window.calls import Window
from pallas_kernels.delta_window.reference import Records, delta_step, take_rows
from pallas_kernels.mesh import Spread
from pallas_kernels.platforms import Implementation, Kernel, Platform, choose

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
        (state, Window(q, k, v, log_decay, beta, ancestors), past),
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
        (state, None, rows),
        spread,
        implementation,
        writes=True,
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
        (state, None, rows),
        spread,
        implementation,
        writes=True,
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
    window = Window(q, k, v, log_decay, beta, ancestors)
    return _choose(
        "delta_commit_window",
        (state, rows, path, num, *window),
        (state, window, rows),
        spread,
        implementation,
        writes=True,
    )


def _choose(
    operation: str,
    arguments: tuple[Any, ...],
    call: tuple[Any, Window | None, Records | None],
    spread: Spread | None,
    implementation: Implementation,
    *,
    writes: bool = False,
) -> Any:
    """By the operation's name; ``call`` is state, window and past rows."""

    def kernel(run: Callable[..., Any], against: str | None) -> Kernel:
        if spread is not None:
            run = _on_each_device(run, spread, batch=arguments[0].shape[0])
        return Kernel(run, against)

    against_tpu = tpu.refusal(*call, writes=writes)
    against_gpu = gpu_plan.refusal(*call, writes=writes)
    kernels: dict[Platform, Kernel] = {
        "tpu": kernel(getattr(tpu, operation), against_tpu),
        "cuda": kernel(getattr(gpu, operation), against_gpu),
    }
    return choose(
        operation,
        arguments,
        reference=getattr(reference, operation),
        kernels=kernels,
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
