"""Gated delta windows for NVIDIA's Hopper: one pass over the state, in a Mosaic GPU
kernel of the same three parts as the TPU's: advance, write, window (see ``tpu.py``).

What needs no state is left to XLA: sums of decays along the paths, and the products of
rows with rows, ``weigh``. As compiled for an H100, that is 2 to 6 small programs. They
read and write a tenth of the state's bytes for 8 rows of Qwen3-Next and a fifth for 16
(3 % for 8 rows of Nemotron-H), but with one decay a channel half of them for 8 and 1.1
times as many for 16: most of it in arrays that are read again at once, of 4 KiB a head
for 8 rows. The system of updates is solved in the kernel, row by row, and so is the
advance: it is the recurrence itself, over the rows that count and no others.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat
from pallas_kernels.delta_window import gpu_body
from pallas_kernels.delta_window.calls import Operations, Past, Window
from pallas_kernels.delta_window.decays import per_channel
from pallas_kernels.delta_window.gpu_plan import GROUP, Plan, plan_of
from pallas_kernels.delta_window.reference import Weights, weigh


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
    arrays = dict[str, jax.Array]()
    if window is not None:
        arrays |= _window_arrays(plan, window)
    if past is not None:
        arrays |= _past_arrays(plan, past)
    if not writes:
        return tuple(_run(plan, {"state": state, **arrays}, interpret))

    def run(refs: list[Any]) -> None:
        place, *found = refs
        done = _run(plan, {"state": place, **arrays}, interpret)
        for ref, x in zip(found, done, strict=True):
            ref[...] = x

    # what a kernel writes of a reference is written in its place
    blank = [jnp.zeros(x.shape, x.dtype) for x in _outputs(plan)]
    state, *found = pl.run_state(run)([state, *blank])
    return (*found, state)


_OPERATIONS = Operations(call)
delta_window = _OPERATIONS.delta_window
delta_fold = _OPERATIONS.delta_fold
delta_commit = _OPERATIONS.delta_commit
delta_commit_window = _OPERATIONS.delta_commit_window


def _run(plan: Plan, arrays: dict[str, Any], interpret: compat.Interpret) -> Any:
    scratch = _scratch(plan, arrays)
    outputs = _outputs(plan)

    def delta_window(*refs: Any) -> None:
        inputs = gpu_body.Inputs(**dict(zip(arrays, refs, strict=False)))
        out, updates = refs[len(arrays) :][:2] if outputs else (None, None)
        own = refs[len(arrays) + len(outputs) :]
        shared = gpu_body.Scratch(**dict(zip(scratch, own, strict=True)))
        gpu_body.run(inputs, shared, out, updates, plan)

    return compat.gpu_kernel(
        delta_window,
        out_type=outputs,
        scratch_types=list(scratch.values()),
        grid=(plan.blocks,),
        grid_names=("blocks",),
        interpret=interpret,
        in_place=plan.writes,
    )(*arrays.values())


def _outputs(plan: Plan) -> list[jax.ShapeDtypeStruct]:
    """Outputs and updates, if there is a window."""
    shape = (plan.batch, plan.rows, plan.heads, plan.value_dim)
    return [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2 if plan.rows else []


def _scratch(plan: Plan, arrays: dict[str, Any]) -> dict[str, Any]:
    """By name, as ``gpu_body.Scratch`` has them."""
    found: dict[str, Any] = {
        name: plgpu.SMEM(shape, arrays[name].dtype)
        for name, shape in plan.shared.items()
    }
    for barrier, names in (
        ("window_here", gpu_body.WINDOW),
        ("past_here", gpu_body.PAST),
    ):
        copies = sum(name in arrays for name in names)
        if copies:
            found[barrier] = plgpu.Barrier(num_arrivals=copies)
    return found


def _window_arrays(plan: Plan, window: Window) -> dict[str, jax.Array]:
    """By name, as ``gpu_body.Inputs`` has them."""
    q, k, v, log_decay, beta, ancestors = window
    rows = weigh(q, k, log_decay, beta, ancestors, fused=True)
    found = {"q": q, "v": v, "weights": _weights(plan, rows, beta)}
    if plan.delta:
        found["k"] = k
    if plan.channel_decay:
        found["power"] = rows.power
    return found


def _weights(
    plan: Plan, rows: Weights, beta: Float[Array, "B W H"] | None
) -> Float[Array, "B H n columns"]:
    """``gpu_body.Inputs.weights``."""

    def padded(x: jax.Array, count: int) -> jax.Array:
        """To so many rows, and to whole columns."""
        missing = (count - x.shape[2], plan.columns - plan.rows)
        return jnp.pad(x, [(0, 0), (0, 0), *((0, n) for n in missing)])

    by_row = [rows.shown] if rows.mix is None else [rows.mix, rows.shown]
    taken = [padded(x.swapaxes(2, 3), plan.columns) for x in by_row]
    none = jnp.zeros((plan.batch, plan.heads, plan.rows), jnp.float32)
    powers = none if plan.channel_decay else rows.power[..., 0]
    rates = none if beta is None else beta.swapaxes(1, 2)
    own = padded(jnp.stack([powers, rates], axis=2), GROUP)
    return jnp.concatenate([*taken, own], axis=2)


def _past_arrays(plan: Plan, past: Past) -> dict[str, jax.Array]:
    """By name, as ``gpu_body.Inputs`` has them."""
    rows, missing = past.rows, plan.slots - plan.past
    power = jnp.exp(per_channel(rows.log_decay.astype(jnp.float32)))
    if not plan.channel_decay:
        power = power[..., 0].swapaxes(1, 2)
        power = jnp.pad(power, [(0, 0), (0, 0), (0, missing)])
    batch, count = rows.k.shape[:2]
    order = past.path
    if order is None:
        order = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))
    # no row counts twice; and one that is none could be anywhere in shared memory
    order = jnp.clip(order[:, :count].astype(jnp.int32), 0, count - 1)
    num = jnp.full((batch,), count, jnp.int32) if past.num is None else past.num
    length = order.shape[1]
    return {
        "order": jnp.pad(order, [(0, 0), (0, plan.slots - length)]),
        "num": jnp.clip(num.astype(jnp.int32), 0, length),
        "past_power": power,
        "past_k": rows.k,
        "past_u": rows.updates,
    }
