"""What the kernels are called with, the same on every platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.delta_window.reference import Records

MOST_ROWS = 64
"""Rows of the widest window, and of the longest past."""


class Window(NamedTuple):
    """The window's own arguments of ``reference.delta_window``."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None
    ancestors: jax.Array


class Past(NamedTuple):
    """Rows behind the state, and which of them count, in their order."""

    rows: Records
    path: jax.Array | None = None  # [B, P] int32; None: one after another
    num: jax.Array | None = None  # [B] int32, the first so many; None: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one call, and which of its parts a kernel has to do."""

    batch: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    rows: int = 0
    """Of the window; 0: there is none, and the state is only advanced."""
    past: int = 0
    """Rows between the state and the window; 0: there are none."""
    channel_decay: bool = False
    delta: bool = True
    """Whether updates are what the state does not foretell, or the values."""
    writes: bool = False
    """The state after the past rows is written."""

    @property
    def share(self) -> int:
        """Heads of the state that one key head serves."""
        return self.heads // self.key_heads

    def too_many_rows(self) -> str | None:
        """Why no kernel takes so many rows; ``None``: they are not."""
        most = max(self.rows, self.past)
        return f"more than {MOST_ROWS} rows: {most}" if most > MOST_ROWS else None


def sizes_of(state: Any, window: Window | None, past: Records | None) -> dict[str, Any]:
    """Those of a call with these arrays, of which only shapes are looked at."""
    batch, heads, key_dim, value_dim = state.shape
    some = window or past
    assert some is not None, "neither a window nor past rows: there is nothing to do"
    return {
        "batch": batch,
        "heads": heads,
        "key_heads": some.k.shape[2],
        "key_dim": key_dim,
        "value_dim": value_dim,
        "rows": 0 if window is None else window.k.shape[1],
        "past": 0 if past is None else past.k.shape[1],
        "channel_decay": some.log_decay.ndim == 4,
        "delta": window is not None and window.beta is not None,
    }


def refused_dtypes(
    state: Any, window: Window | None, past: Records | None
) -> str | None:
    """Why no kernel takes arrays of these types; ``None``: they are known."""
    for name, x in {"state": state, **(window._asdict() if window else {})}.items():
        if x is not None and x.dtype != jnp.float32 and name != "ancestors":
            return f"{name} is {x.dtype}, and the kernel's arithmetic float32"
    for x in jax.tree.leaves(past):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"records are {x.dtype}, not float32 or bfloat16"
    return None


@dataclasses.dataclass(frozen=True)
class Operations:
    """Those of ``reference.py``, by one kernel that has all their parts.

    It advances the state by past rows, writes it, and works out a window, and gives
    outputs and updates if there is a window, and the state if it ``writes``.
    """

    call: Callable[..., tuple[jax.Array, ...]]
    """Of the state, a ``Window`` or ``None``, and a ``Past`` or ``None``."""

    def delta_window(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array | None,
        state: jax.Array,
        ancestors: jax.Array,
        past: Records | None = None,
        num_past: jax.Array | None = None,
        *,
        interpret: compat.Interpret = False,
    ) -> tuple[jax.Array, jax.Array]:
        """``reference.delta_window``."""
        window = Window(q, k, v, log_decay, beta, ancestors)
        behind = None if past is None else Past(past, num=num_past)
        out, updates = self.call(state, window, behind, interpret=interpret)
        return out, updates

    def delta_fold(
        self,
        state: jax.Array,
        rows: Records,
        num: jax.Array,
        *,
        interpret: compat.Interpret = False,
    ) -> jax.Array:
        """``reference.delta_fold``, in the place of the state."""
        past = Past(rows, num=num)
        (state,) = self.call(state, None, past, writes=True, interpret=interpret)
        return state

    def delta_commit(
        self,
        state: jax.Array,
        rows: Records,
        path: jax.Array,
        num: jax.Array,
        *,
        interpret: compat.Interpret = False,
    ) -> jax.Array:
        """``reference.delta_commit``, in the place of the state."""
        past = Past(rows, path, num)
        (state,) = self.call(state, None, past, writes=True, interpret=interpret)
        return state

    def delta_commit_window(
        self,
        state: jax.Array,
        rows: Records,
        path: jax.Array,
        num: jax.Array,
        *window: Any,
        interpret: compat.Interpret = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``reference.delta_commit_window``, in the place of the state."""
        past = Past(rows, path, num)
        out, updates, state = self.call(
            state, Window(*window), past, writes=True, interpret=interpret
        )
        return out, updates, state
