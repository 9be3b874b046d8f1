"""What it costs to take back rejected drafts of a recurrent layer, and the memory.

    python experiments/rollback.py
    python experiments/rollback.py --quick

One layer of the gated delta rule, without projections; a window of the anchor and
k drafts, and a commit of the accepted path. Ways: a state a row (`snapshot`), the
window's records (`replay`), a checkpoint and a ring of records (`ring`), and what is
done where there is none of these (`copy`): the whole state is copied before the round,
the window advances it in place, and after a rejection the copy is put back and the
accepted rows are run again (the GCN report's way). Times are CPU time of a whole round,
state donated, the least of several; the ways take turns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import tyro

from pallas_kernels.delta_window.api import delta_step
from specjax.decoding.types import Acceptance
from specjax.models.recurrence import MatrixShape, Replay, Ring, Snapshot

RESULTS = Path(__file__).resolve().parent / "results" / "rollback"
STRATEGIES: dict[str, Any] = {
    "snapshot": Snapshot(),
    "replay": Replay(),
    "ring": Ring(slots=16),
    "ring bfloat16": Ring(slots=16, dtype="bfloat16"),
}
COPY = "copy"


@dataclasses.dataclass(frozen=True)
class Options:
    """Time rounds of one recurrent layer under every rollback strategy."""

    heads: tuple[int, ...] = (8, 32)
    dims: tuple[int, ...] = (64, 128)
    """Of keys and values alike."""
    drafts: tuple[int, ...] = (2, 4, 8)
    repeats: int = 15
    rounds: int = 8
    """Rounds a measurement; a ring folds in one of several."""
    quick: bool = False
    """One size, one number of drafts, few repeats."""
    out: Path = RESULTS


def inputs(shape: MatrixShape, width: int) -> tuple[jax.Array, ...]:
    """A window's queries, keys, values, log decays and betas."""
    draw = np.random.default_rng(0)

    def normal(*more: int) -> np.ndarray:
        return draw.normal(size=(1, width, *more)).astype(np.float32)

    keys = normal(shape.key_heads, shape.key_dim)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    arrays = (
        normal(shape.key_heads, shape.key_dim),
        keys,
        normal(shape.heads, shape.value_dim),
        -np.abs(normal(shape.heads)),
        1 / (1 + np.exp(-normal(shape.heads))),
    )
    return tuple(map(jnp.asarray, arrays))


def chain_acceptance(width: int, taken: int) -> Acceptance:
    """The first ``taken`` rows of a chain."""
    rows = jnp.arange(width, dtype=jnp.int32)[None]
    return Acceptance(rows, rows, jnp.array([taken], jnp.int32))


@partial(jax.jit, static_argnames="strategy", donate_argnames="state")
def strategy_round(
    strategy: Any, state: Any, window: tuple, acceptance: Acceptance
) -> tuple[Any, jax.Array]:
    """Read the window, commit the path."""
    width = acceptance.path.shape[1]
    ancestors = jnp.tril(jnp.ones((1, width, width), bool))
    out, pending = strategy.read(state, *window, ancestors)
    return strategy.commit(state, pending, acceptance), out


@partial(jax.jit, donate_argnames="state")
def copy_round(
    state: jax.Array, window: tuple, acceptance: Acceptance
) -> tuple[jax.Array, jax.Array]:
    """Copy, advance over the whole window, put back, advance over what was accepted."""
    width, taken = acceptance.path.shape[1], acceptance.num_tokens[0]
    # without the barrier XLA sees that the copy is not needed
    saved = jax.lax.optimization_barrier(state + 0.0)

    def advance(row: jax.Array, carry: tuple) -> tuple:
        state, out = carry
        mine = [jax.lax.dynamic_index_in_dim(x, row, 1, keepdims=False) for x in window]
        o, state = delta_step(*mine, state)
        return state, jax.lax.dynamic_update_slice_in_dim(out, o[:, None], row, axis=1)

    start, empty = jnp.int32(0), jnp.zeros_like(window[2])
    after, out = jax.lax.fori_loop(start, jnp.int32(width), advance, (state, empty))
    again = jax.lax.fori_loop(start, taken, advance, (saved, empty))[0]
    return jnp.where(taken < width, again, after), out


def bytes_of(tree: Any) -> int:
    """Of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def scratch(name: str, shape: MatrixShape, width: int) -> int:
    """Bytes a batch row beyond the one state, as they are allocated."""
    if name == COPY:
        return shape.matrix * 4
    strategy = STRATEGIES[name]
    state = strategy.init(1, shape, jnp.float32)
    ancestors = jnp.tril(jnp.ones((1, width, width), bool))
    _, pending = jax.eval_shape(strategy.read, state, *inputs(shape, width), ancestors)
    added = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pending))
    return added + bytes_of(state) - shape.matrix * 4


def timers(
    shape: MatrixShape, width: int, taken: int, rounds: int
) -> dict[str, Callable[[], float]]:
    """For each strategy: microseconds of CPU time a round, over several in a row."""
    window, acceptance = inputs(shape, width), chain_acceptance(width, taken)

    def timer(name: str) -> Callable[[], float]:
        if name == COPY:
            step = partial(copy_round, window=window, acceptance=acceptance)
            state = Replay().init(1, shape, jnp.float32)
        else:
            strategy = STRATEGIES[name]
            step = partial(
                strategy_round, strategy, window=window, acceptance=acceptance
            )
            state = strategy.init(1, shape, jnp.float32)
        held = [step(state=state)[0]]

        def once() -> float:
            start = time.process_time()
            for _ in range(rounds):
                held[0] = step(state=held[0])[0]
            jax.block_until_ready(held[0])
            return (time.process_time() - start) / rounds * 1e6

        return once

    return {name: timer(name) for name in (*STRATEGIES, COPY)}


def measure(options: Options, heads: int, dim: int, drafts: int) -> list[dict]:
    """One size: every strategy, with nothing, half and all of the drafts accepted."""
    shape = MatrixShape(heads=heads, key_heads=heads, key_dim=dim, value_dim=dim)
    rows = []
    for pattern, taken in (
        ("none", 1),
        ("half", 1 + drafts // 2),
        ("all", 1 + drafts),
    ):
        arms = timers(shape, drafts + 1, taken, options.rounds)
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(options.repeats):
            for name, once in arms.items():
                times[name].append(once())
        rows += [
            {
                "heads": heads,
                "dim": dim,
                "drafts": drafts,
                "accepted": pattern,
                "strategy": name,
                "microseconds": min(spent),
                "median_microseconds": float(np.median(spent)),
                "scratch_bytes": scratch(name, shape, drafts + 1),
            }
            for name, spent in times.items()
        ]
    return rows


HEAD = """\
| heads | K = V | k | accepted | strategy | µs | x replay | scratch KiB | a head |
| ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: |"""


def table(rows: list[dict]) -> str:
    """All rows, each beside replay of its own size and pattern."""

    def key(row: dict) -> tuple:
        return row["heads"], row["dim"], row["drafts"], row["accepted"]

    base = {key(r): r["microseconds"] for r in rows if r["strategy"] == "replay"}
    lines = [
        f"| {r['heads']} | {r['dim']} | {r['drafts']} | {r['accepted']} | "
        f"{r['strategy']} | {r['microseconds']:.0f} | "
        f"{r['microseconds'] / base[key(r)]:.2f} | {r['scratch_bytes'] / 1024:.0f} | "
        f"{r['scratch_bytes'] / 1024 / r['heads']:.1f} |"
        for r in rows
    ]
    return "\n".join([HEAD, *lines])


def plot(rows: list[dict], path: Path) -> None:
    """Time against drafts, and memory against drafts, at the largest size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    largest = max((r["heads"], r["dim"]) for r in rows)
    mine = [
        r for r in rows if (r["heads"], r["dim"]) == largest and r["accepted"] == "half"
    ]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name in dict.fromkeys(r["strategy"] for r in mine):
        points = sorted(
            (r["drafts"], r["microseconds"], r["scratch_bytes"] / 1024)
            for r in mine
            if r["strategy"] == name
        )
        drafts, times, memory = zip(*points, strict=True)
        left.plot(drafts, times, marker="o", label=name)
        right.plot(drafts, memory, marker="o", label=name)
    left.set(xlabel="drafts k", ylabel="µs a round, half of the drafts accepted")
    right.set(xlabel="drafts k", ylabel="scratch KiB a layer and row", yscale="log")
    for panel in (left, right):
        panel.set_title(f"{largest[0]} heads of {largest[1]} × {largest[1]}")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(options: Options) -> None:
    """Measure, print, write."""
    if options.quick:
        options = dataclasses.replace(
            options, heads=(8,), dims=(128,), drafts=(4, 8), repeats=5, rounds=4
        )
    rows = []
    for heads in options.heads:
        for dim in options.dims:
            for drafts in options.drafts:
                rows += measure(options, heads, dim, drafts)
                print(table(rows[-3 * (len(STRATEGIES) + 1) :]), flush=True)
    result = reporting.about(options) | {"rows": rows}
    about = (
        f"One layer, one batch row, float32 states; CPU time, least of "
        f"{options.repeats} times {options.rounds} rounds; {reporting.told(result)}"
    )
    report = f"# What rollback costs\n\n{about}\n\n{table(rows)}\n"
    reporting.write(options.out, "rollback", result, report, partial(plot, rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
