"""C6: what is not in use may hold anything, and a NaN row harms only itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.types import DecodeState, FinishReason
from specjax.testing.conformance.case import (
    Case,
    Touch,
    Unsuitable,
    needs_canonical,
    record,
    same_bits,
)

HUGE = 1e30


def unused_slots_change_nothing(case: Case) -> str:
    """NaN, or huge numbers, in unused slots before every round: the same bits.

    The unused slots are those that the canonical form sets to zero. If the drafter is
    a model with a state of its own, its unused slots are filled as well.
    """
    needs_canonical(case)
    base = case.trace
    for value in (np.nan, HUGE):
        touch, filled = _filler(case, value)
        other = record(case.engine(), case.requests, touch)
        for number, (a, b) in enumerate(
            zip(base.snapshots, other.snapshots, strict=False)
        ):
            for row in range(case.batch):
                ours, theirs = a.row(row), b.row(row)
                for part in ours:
                    if not all(map(same_bits, ours[part], theirs[part])):
                        raise AssertionError(
                            f"C6: round {number}, row {row}: the {part} depends on "
                            f"unused slots: not the same with {value} in them"
                        )
        if len(base.snapshots) != len(other.snapshots):
            raise AssertionError(
                f"C6: {len(other.rounds)} rounds with {value} in unused slots, "
                f"{len(base.rounds)} without"
            )
    return f"{len(base.rounds)} rounds, up to {max(filled, default=0)} numbers poisoned"


def a_nan_row_flags_itself(case: Case) -> str:
    """A row whose state turns NaN ends with that reason; other rows do not notice."""
    needs_canonical(case)
    at = 2
    tried = 0
    for row in range(case.batch):
        if case.trace.snapshots[min(at, len(case.trace.rounds))].done[row]:
            continue
        other = record(case.engine(), case.requests, _poison_row(case.target, row, at))
        if other.reason(row) is not FinishReason.NAN:
            raise AssertionError(
                f"C6: row {row}: its state is NaN from round {at + 1} on, but it ends "
                f"with {other.reason(row).name}"
            )
        ids = np.array(other.outputs[row], np.int64)
        wanted = case.trace.outputs[row][: len(ids)]
        if tuple(ids) != wanted:
            raise AssertionError(
                f"C6: row {row}: tokens {tuple(ids)} were emitted, the last of them "
                f"from a NaN state; without it {wanted}"
            )
        for neighbour in set(range(case.batch)) - {row}:
            if other.outputs[neighbour] != case.trace.outputs[neighbour]:
                raise AssertionError(
                    f"C6: row {neighbour} emits other tokens beside a NaN row {row}"
                )
        everything = np.concatenate([*other.outputs, [0]])
        if everything.min() < 0 or everything.max() >= case.target.vocab_size:
            raise AssertionError(f"C6: a NaN row {row}: an id is out of range")
        tried += 1
    if not tried:
        raise Unsuitable(f"no row runs for more than {at} rounds")
    return f"{tried} rows poisoned in turn"


def _filler(case: Case, value: float) -> tuple[Touch, list[int]]:
    """Fills unused slots of the target's state, and of a draft model's."""
    filled: list[int] = []
    model = getattr(case.drafter, "model", None)

    def touch(state: DecodeState) -> DecodeState:
        target, count = fill_unused(case.target, state.target, value)
        drafter = state.drafter
        if hasattr(model, "canonical"):
            own, more = fill_unused(model, drafter.model, value)
            drafter, count = drafter.replace(model=own), count + more
        filled.append(int(count))
        return state.replace(target=target, drafter=drafter)

    return touch, filled


@jax.jit
def fill_unused(target: Any, state: Any, value: jax.Array | float) -> Any:
    """The state with ``value`` wherever it holds nothing that was committed.

    A target may say where that is (``blank``); else it is where the canonical form,
    which then has the state's own structure, has zeros.
    """
    if hasattr(target, "blank"):
        filled = target.blank(state, value)
        marked = target.blank(jax.tree.map(_zeros, state), 1.0)
        counts = [
            jnp.sum(x != 0, dtype=jnp.int32)
            for x in jax.tree.leaves(marked)
            if _floats(x)
        ]
        return filled, sum(counts, jnp.int32(0))
    ones = jax.tree.map(lambda x: jnp.ones_like(x) if _floats(x) else x, state)
    shown = target.canonical(ones)

    def fill(x: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen == 0, jnp.asarray(value, x.dtype), x) if _floats(x) else x

    counts = [
        jnp.sum(seen == 0, dtype=jnp.int32)
        for x, seen in zip(jax.tree.leaves(state), jax.tree.leaves(shown), strict=True)
        if _floats(x)
    ]
    return jax.tree.map(fill, state, shown), sum(counts, jnp.int32(0))


def _zeros(x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x) if _floats(x) else x


def _poison_row(target: Any, row: int, after: int) -> Touch:
    """NaN in all that the target holds for a row, once, after some rounds."""
    rounds = 0

    def touch(state: DecodeState) -> DecodeState:
        nonlocal rounds
        rounds += 1
        if rounds != after + 1:
            return state
        return state.replace(target=spoil(target, state.target, row))

    return touch


def spoil(target: Any, state: Any, row: int) -> Any:
    """The state with NaN in all that it holds for a row: the target's word for it, or
    else row ``row`` of every array.
    """
    if hasattr(target, "spoil"):
        return target.spoil(state, row)
    return jax.tree.map(lambda x: x.at[row].set(jnp.nan) if _floats(x) else x, state)


def _floats(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
