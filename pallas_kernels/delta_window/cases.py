"""Gated delta windows that must compile: every part of the kernel, at real sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.case import Case, array
from pallas_kernels.delta_window import api
from pallas_kernels.delta_window.calls import Window
from pallas_kernels.delta_window.reference import Records
from pallas_kernels.delta_window.specs import MODELS, DeltaSpec

BATCH = 2
MANY = 72
"""So many rows' states do not fit the memory of a core, where XLA would else put them
for as long as a loop runs."""
SLOTS = 16


def _state(spec: DeltaSpec, batch: int = BATCH) -> jax.ShapeDtypeStruct:
    return _floats(batch, spec.heads, spec.key_dim, spec.value_dim)


def _window(spec: DeltaSpec, width: int, batch: int = BATCH) -> Window:
    keys = _floats(batch, width, spec.key_heads, spec.key_dim)
    return Window(
        q=keys,
        k=keys,
        v=_floats(batch, width, spec.heads, spec.value_dim),
        log_decay=_floats(batch, width, *spec.decays),
        beta=_floats(batch, width, spec.heads) if spec.delta else None,
        ancestors=array(batch, width, width, dtype=jnp.bool_),
    )


def _records(spec: DeltaSpec, rows: int, dtype: Any = jnp.float32) -> Records:
    return Records(
        k=array(BATCH, rows, spec.key_heads, spec.key_dim, dtype=dtype),
        updates=array(BATCH, rows, spec.heads, spec.value_dim, dtype=dtype),
        log_decay=_floats(BATCH, rows, *spec.decays),
    )


def _floats(*shape: int) -> Any:
    return array(*shape, dtype=jnp.float32)


def _paths(
    rows: int, batch: int = BATCH
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return array(batch, rows, dtype=jnp.int32), array(batch, dtype=jnp.int32)


def _verify(state: jax.Array, window: Window, *past: Any) -> Any:
    q, k, v, decay, beta, ancestors = window
    return api.delta_window(
        q, k, v, decay, beta, state, ancestors, *past, implementation="require"
    )


def _commit(state: Any, rows: Records, path: Any, num: Any) -> Any:
    return api.delta_commit(state, rows, path, num, implementation="require")


def _fold(state: Any, rows: Records, num: Any) -> Any:
    return api.delta_fold(state, rows, num, implementation="require")


def _both(state: Any, rows: Records, path: Any, num: Any, window: Window) -> Any:
    return api.delta_commit_window(
        state, rows, path, num, *window, implementation="require"
    )


def _rounds(state: Any, window: Window, path: Any, num: Any) -> Any:
    """Four rounds, each of which reads, and then writes what it has read."""

    def one(_: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        state, seen = carried
        out, updates = _verify(state, window)
        rows = Records(window.k, updates, window.log_decay)
        return _commit(state, rows, path, num), seen + out

    blank = jnp.zeros(window.v.shape, jnp.float32)
    return jax.lax.fori_loop(0, 4, one, (state, blank))


def _case(
    name: str,
    function: Any,
    state: Any,
    *rest: Any,
    writes: bool = False,
    calls: int = 1,
    platforms: tuple[str, ...] = ("tpu", "cuda"),
) -> Case:
    return Case(
        operation="delta_window",
        name=name,
        function=function,
        arguments=(state, *rest),
        donated=(0,) if writes else (),
        kept=(state.shape,),
        calls=calls,
        platforms=platforms,
    )


def _of(name: str, spec: DeltaSpec) -> list[Case]:
    state, eight = _state(spec), _window(spec, 8)
    rows, ring = _records(spec, 8), _records(spec, SLOTS, jnp.bfloat16)
    num = array(BATCH, dtype=jnp.int32)
    verify = [
        _case(
            f"{name}-verify-{width}",
            _verify,
            state,
            _window(spec, width),
            platforms=("tpu", "cuda") if width < 16 else ("cuda",),
        )
        for width in (1, 8, 9, 16, 64)
    ]
    many = (_state(spec, MANY), _window(spec, 8, MANY), *_paths(8, MANY))
    return [
        *verify,
        _case(f"{name}-commit", _commit, state, rows, *_paths(8), writes=True),
        _case(f"{name}-both", _both, state, rows, *_paths(8), eight, writes=True),
        _case(f"{name}-ring", _verify, state, eight, ring, num),
        _case(f"{name}-fold", _fold, state, ring, num, writes=True),
        _case(f"{name}-rounds", _rounds, *many, writes=True, calls=2),
    ]


CASES = tuple(case for name, spec in MODELS.items() for case in _of(name, spec))
