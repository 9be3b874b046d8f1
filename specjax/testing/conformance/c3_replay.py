"""C3: the state after any rounds is that of a serial decode of the same tokens."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.interfaces import Target
from specjax.decoding.kinds import kinds
from specjax.decoding.types import Acceptance
from specjax.decoding.windows import chunk_window
from specjax.testing.conformance.case import (
    Case,
    Trace,
    Unsuitable,
    canonical,
    needs_canonical,
)


def state_is_a_replay(case: Case) -> str:
    """The target's canonical state after every round, to rounding; it does not drift.

    The bound is the same after every round, however many there have been.
    """
    needs_canonical(case)
    # the state holds every committed token but the last, the anchor
    held = [_held(s.lengths - 1, s) for s in case.trace.snapshots]
    states = [snapshot.target for snapshot in case.trace.snapshots]
    return _compare(case, case.target, "target", states, held)


def draft_model_is_a_replay(case: Case) -> str:
    """The same for a drafter that is a model with a state of its own.

    Such a drafter has ``model``, a target, and its state ``model`` and ``lengths``.
    """
    model: Any = getattr(case.drafter, "model", None)
    first = case.trace.last.drafter
    if not hasattr(model, "canonical") or not hasattr(first, "lengths"):
        raise Unsuitable("the drafter is not a model with a state of its own")
    states, held = [], []
    for snapshot in case.trace.snapshots:
        states.append(canonical(model, snapshot.drafter.model))
        held.append(np.array(snapshot.drafter.lengths))
    return _compare(case, model, "draft model", states, held)


def _held(lengths: np.ndarray, snapshot: Any) -> np.ndarray:
    """Tokens in each row's state. A row that was never to run has not been read."""
    never = snapshot.done & (snapshot.stats.rounds == 0)
    return np.where(never, 0, lengths)


def _compare(
    case: Case, model: Target, name: str, states: list[Any], held: list[np.ndarray]
) -> str:
    wanted = {int(n) for lengths in held for n in lengths}
    serial = replay(model, case.trace, wanted)
    worst = 0.0
    for number, (state, lengths) in enumerate(zip(states, held, strict=True)):
        for row, length in enumerate(lengths.tolist()):
            if case.trace.reason(row).name == "NAN":
                continue
            error, leaf = _distance(state, serial[length], row)
            worst = max(worst, error)
            if not error <= case.rounding:
                raise AssertionError(
                    f"C3: round {number}, row {row}: {leaf} of the {name}'s state is "
                    f"not that of a serial decode of its {length} tokens: relative "
                    f"difference {error:.3g}, bound {case.rounding:g}"
                )
    return f"{len(states) - 1} rounds, largest relative difference {worst:.2g}"


def replay(model: Target, trace: Trace, lengths: set[int]) -> dict[int, Any]:
    """Canonical states of a serial decode, at these numbers of tokens.

    Every row is read to the same length; what lies beyond a row's own tokens is
    whatever it is, and is not looked at.
    """
    tokens = jnp.asarray(np.maximum(trace.last.tokens, 0))
    state = model.init(*tokens.shape)
    found = {}
    for length in range(max(lengths) + 1):
        if length in lengths:
            found[length] = canonical(model, state)
        if length < tokens.shape[1]:
            state = _read_one(
                model, state, tokens, jnp.int32(length), kinds=kinds(model)
            )
    return found


@partial(jax.jit, static_argnames="kinds")
def _read_one(
    model: Any, state: Any, tokens: jax.Array, at: jax.Array, *, kinds: Hashable
) -> Any:
    """Verify a window of one token and commit it."""
    batch = tokens.shape[0]
    start = jnp.broadcast_to(at, (batch,))
    verdict = model.verify(state, chunk_window(tokens, start, start + 1, 1))
    ones = jnp.ones((batch,), jnp.int32)
    path = jnp.zeros((batch, 1), jnp.int32)
    return model.commit(state, verdict.pending, Acceptance(path, path, ones))


def _distance(state: Any, serial: Any, row: int) -> tuple[float, str]:
    """The largest difference relative to an array's largest value, and where."""
    worst, where = 0.0, "nothing"
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, ours), theirs in zip(leaves, jax.tree.leaves(serial), strict=True):
        a, b = (np.asarray(x)[row].astype(np.float64) for x in (ours, theirs))
        scale = max(float(np.abs(b).max(initial=0.0)), 1e-30)
        error = float(np.abs(a - b).max(initial=0.0)) / scale
        if np.isnan(error):
            error = np.inf
        if error > worst:
            worst, where = error, jax.tree_util.keystr(path)
    return worst, where
