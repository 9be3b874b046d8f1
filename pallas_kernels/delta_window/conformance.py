"""Hold a kernel to the reference in float64, for tests of every platform's.

A kernel is a module with the operations of ``reference.py``. Rows that must not be
looked at are NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_window import reference
from pallas_kernels.delta_window.problems import Problem, spoilt

CLOSE = {"rtol": 0, "atol": 4e-6}
"""Outputs and states are of the order of 1, and up to about 5."""


def exactly(function: Any, *arguments: Any) -> Any:
    """The reference's results in float64."""

    def widen(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    with jax.enable_x64(True):
        wide = jax.tree.map(widen, arguments)
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))


def as_array(x: Any) -> Any:
    """Of numpy's, or of nothing."""
    return None if x is None else jnp.asarray(x)


def compare(got: Any, wanted: Any) -> None:
    """Two trees; raises ``AssertionError`` where they differ."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(ours), theirs, **CLOSE)


def check_verify(kernel: Any, case: Problem, interpret: Any = True) -> None:
    """A window alone."""
    q, k, v, decay, beta, mask = case.window
    arguments = (q, k, v, decay, beta, case.state, mask)
    got = kernel.delta_window(*map(as_array, arguments), interpret=interpret)
    compare(got, exactly(reference.delta_window, *arguments))


def check_commit(kernel: Any, case: Problem, interpret: Any = True) -> None:
    """Paths of a chain and of trees, and one of no row, which changes no bit."""
    records, (path, num) = case.records(case.width), case.paths(case.width)
    wanted = exactly(reference.delta_commit, case.state, records, path, num)
    poisoned = spoilt(records, path, num)
    untouched = np.flatnonzero(num == 0)
    case.state[untouched, 0, 0, 0] = -0.0
    got = kernel.delta_commit(
        jnp.asarray(case.state),
        poisoned,
        jnp.asarray(path),
        jnp.asarray(num),
        interpret=interpret,
    )
    some = np.flatnonzero(num)
    compare(got[some], wanted[some])
    for row in untouched:
        assert np.asarray(got[row]).tobytes() == case.state[row].tobytes()


def check_both(
    kernel: Any, case: Problem, interpret: Any = True, rows: int = 9
) -> None:
    """The last round's commit and this round's window."""
    records, (path, num) = case.records(rows), case.paths(rows)
    rest = (path, num, *case.window)
    wanted = exactly(reference.delta_commit_window, case.state, records, *rest)
    got = kernel.delta_commit_window(
        jnp.asarray(case.state),
        spoilt(records, path, num),
        *map(as_array, rest),
        interpret=interpret,
    )
    compare(got, wanted)


def check_ring(
    kernel: Any, case: Problem, interpret: Any = True, slots: int = 16
) -> None:
    """A window behind recorded rows, in bfloat16, of which some count; and folding."""
    records = case.records(slots, jnp.bfloat16)
    path = np.broadcast_to(np.arange(slots, dtype=np.int32), (case.batch, slots))
    num = np.asarray([slots, slots - 3, 0], np.int32)[: case.batch]
    q, k, v, decay, beta, mask = case.window
    arguments = (q, k, v, decay, beta, case.state, mask)
    wanted = exactly(reference.delta_window, *arguments, records, num)
    poisoned = spoilt(records, path, num)
    got = kernel.delta_window(
        *map(as_array, arguments), poisoned, jnp.asarray(num), interpret=interpret
    )
    compare(got, wanted)
    wanted = exactly(reference.delta_fold, case.state, records, num)
    got = kernel.delta_fold(
        jnp.asarray(case.state), poisoned, jnp.asarray(num), interpret=interpret
    )
    compare(got, wanted)


CHECKS = {
    "verify": check_verify,
    "commit": check_commit,
    "both": check_both,
    "ring": check_ring,
}
