"""Gated delta windows on TPU: one pass over the state for all that a round does.

One kernel has three parts, each of which a call may leave out. **Advance**: fold past
rows into the state, those of the last round's accepted path or of a ring. **Write** the
state so made. **Window**: outputs and updates of all rows from it. So to verify is the
third, to commit the first two, to read through a ring the first and the third, and a
commit of the last round in one pass with this round's verify is all three.

A step of the grid takes some heads of one batch row.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat
from pallas_kernels.delta_window import kernel
from pallas_kernels.delta_window.calls import (
    Operations,
    Past,
    Window,
    refused_dtypes,
)
from pallas_kernels.delta_window.plan import Plan, plan_of
from pallas_kernels.delta_window.reference import Records

Operand = tuple[jax.Array, pl.BlockSpec]


def refusal(
    state: Any, window: Window | None, past: Records | None, *, writes: bool = False
) -> str | None:
    """Why the kernel does not take these arrays, or ``None``: it does."""
    told = refused_dtypes(state, window, past)
    return told or plan_of(state, window, past, writes=writes).refusal()


@functools.partial(jax.jit, static_argnames=("writes", "interpret"))
def call(
    state: Float[Array, "B H dk dv"],
    window: Window | None = None,
    past: Past | None = None,
    *,
    writes: bool = False,
    interpret: compat.Interpret = False,
) -> tuple[jax.Array, ...]:
    """Outputs and updates ``[B, W, H, dv]`` if there is a window, and the state behind
    the past rows if it is to be written, in the place of the old one.

    Of past rows that do not count, nothing is looked at.
    """
    plan = plan_of(state, window, past and past.rows, writes=writes)
    operands = dict[str, Operand]()
    if window is not None:
        operands |= _window_operands(plan, window)
    if past is not None:
        operands |= _past_operands(plan, past.rows)
    turned = state.swapaxes(2, 3) if plan.flipped else state
    operands["state"] = (turned, _state_spec(plan))
    outputs = _outputs(plan)
    taken = jnp.zeros((plan.batch, 1), jnp.int32) if past is None else _taken(past)
    kept = {"advanced": _kept(plan)} if plan.keeps else {}
    found = pl.pallas_call(
        functools.partial(kernel.run, plan, (*operands, *outputs, *kept)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.batch, plan.steps),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(kept.values()),
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases={len(operands): len(outputs) - 1} if writes else {},
        compiler_params=compat.tpu_params(("parallel", "parallel")),
        cost_estimate=_cost(plan, operands, outputs),
        interpret=interpret,
        name="delta_window",
    )(taken, *(x for x, _ in operands.values()))
    split = (plan.batch, plan.rows, plan.heads, plan.value_dim)
    named = dict(zip(outputs, found, strict=True))
    if plan.flipped and writes:
        named["written"] = named["written"].swapaxes(2, 3)
    return tuple(
        x if name == "written" else x.reshape(split) for name, x in named.items()
    )


_OPERATIONS = Operations(call)
delta_window = _OPERATIONS.delta_window
delta_fold = _OPERATIONS.delta_fold
delta_commit = _OPERATIONS.delta_commit
delta_commit_window = _OPERATIONS.delta_commit_window


def _taken(past: Past) -> Int[Array, "B words"]:
    """Which of the past rows count: bit ``j`` of all words, for row ``j``."""
    batch, count = past.rows.k.shape[:2]
    num = jnp.full((batch,), count, jnp.int32) if past.num is None else past.num
    words = jnp.arange(-(-count // 32), dtype=jnp.int32)
    if past.path is None:
        bits = jnp.clip(num[:, None] - 32 * words, 0, 32)
        # a shift by 32 is not defined
        taken = jnp.where(bits == 32, -1, (1 << jnp.minimum(bits, 31)) - 1)
        return taken.astype(jnp.int32)
    # a path's rows go up
    path = past.path[:, :, None]
    counted = jnp.arange(path.shape[1], dtype=jnp.int32) < num[:, None]
    here = (path // 32 == words) & counted[:, :, None]
    bits = jnp.where(here, 1 << (path % 32), 0)
    return jnp.sum(bits, axis=1, dtype=jnp.int32)


def _window_operands(plan: Plan, window: Window) -> dict[str, Operand]:
    rows = plan.rows
    found = {
        "ancestors": (
            window.ancestors.astype(jnp.float32),
            pl.BlockSpec((1, rows, rows), lambda b, i, _: (b, 0, 0)),
        ),
        "q": _side_by_side(plan, window.q),
        "k": _side_by_side(plan, window.k),
        "v": _side_by_side(plan, window.v),
        "log_decay": _decays(plan, window.log_decay),
    }
    if window.beta is not None:
        found["beta"] = _by_head(plan, window.beta)
    return found


def _past_operands(plan: Plan, past: Records) -> dict[str, Operand]:
    return {
        "past_k": _side_by_side(plan, past.k),
        "past_u": _side_by_side(plan, past.updates),
        "past_decay": _decays(plan, past.log_decay),
    }


def _decays(plan: Plan, x: jax.Array) -> Operand:
    return _side_by_side(plan, x) if plan.channel_decay else _by_head(plan, x)


def _side_by_side(plan: Plan, x: Float[Array, "B n heads dim"]) -> Operand:
    """Heads in the lanes, and those of one step."""
    batch, rows, heads, dim = x.shape
    lanes = heads * dim
    spec = pl.BlockSpec((1, rows, lanes // plan.steps), lambda b, i, _: (b, 0, i))
    return x.reshape(batch, rows, lanes), spec


def _by_head(plan: Plan, x: Float[Array, "B n H"]) -> Operand:
    """One number a head: the rows in the lanes."""
    batch, rows, heads = x.shape
    per_step = heads // plan.steps
    x = x.swapaxes(1, 2).reshape(batch, plan.steps, per_step, rows)
    return x, pl.BlockSpec((1, 1, per_step, rows), lambda b, i, _: (b, i, 0, 0))


def _kept(plan: Plan) -> Any:
    """Where the states of one step stand that are advanced and not written."""
    sizes = (1, plan.heads_per_step, *plan.matrix)
    return pltpu.VMEM(sizes, jnp.float32)


def _state_spec(plan: Plan) -> pl.BlockSpec:
    block = (1, plan.heads_per_step, *plan.matrix)
    return pl.BlockSpec(block, lambda b, i, _: (b, i, 0, 0))


def _outputs(plan: Plan) -> dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]:
    found = {}
    if plan.rows:
        lanes = plan.heads * plan.value_dim
        shape = jax.ShapeDtypeStruct((plan.batch, plan.rows, lanes), jnp.float32)
        block = (1, plan.rows, lanes // plan.steps)
        for name in ("out", "updates"):
            found[name] = (shape, pl.BlockSpec(block, lambda b, i, _: (b, 0, i)))
    if plan.writes:
        sizes = (plan.batch, plan.heads, *plan.matrix)
        found["written"] = (
            jax.ShapeDtypeStruct(sizes, jnp.float32),
            _state_spec(plan),
        )
    return found


def _cost(plan: Plan, operands: Any, outputs: Any) -> pl.CostEstimate:
    """Everything is read once and written once."""
    arrays = [x for x, _ in (*operands.values(), *outputs.values())]
    reads = plan.rows * (1 + plan.delta) + plan.past
    matrices = plan.batch * plan.heads * plan.key_dim * plan.value_dim
    return pl.CostEstimate(
        flops=2 * reads * matrices,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        transcendentals=plan.batch * plan.heads * plan.rows * (plan.rows + 1),
    )
