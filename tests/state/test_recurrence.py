"""Every strategy against the serial recurrence: rounds of trees, exact to the last bit
where nothing may change.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance
from specjax.models.recurrence import (
    MatrixShape,
    Recurrence,
    Replay,
    Ring,
    Snapshot,
)

B, W, DK, DV = 2, 6, 4, 3
EXACT = {"rtol": 0, "atol": 1e-11}
STRATEGIES = [Replay(), Snapshot(), Ring(16), Ring(3)]
IDS = ["replay", "snapshot", "ring", "small ring"]
SHAPES = {
    "head": MatrixShape(heads=4, key_heads=2, key_dim=DK, value_dim=DV),
    "channel": MatrixShape(
        heads=2, key_heads=2, key_dim=DK, value_dim=DV, channel_decay=True
    ),
}
CHAIN = [0, 1, 2, 3, 4]


@functools.partial(jax.jit, static_argnums=0)
def read(strategy: Recurrence, state: Any, *inputs: Any) -> Any:
    return strategy.read(state, *inputs)


@functools.partial(jax.jit, static_argnums=0)
def commit(strategy: Recurrence, state: Any, pending: Any, path: Any, num: Any) -> Any:
    accepted = Acceptance(path=path, tokens=path, num_tokens=num)
    return strategy.commit(state, pending, accepted)


@functools.partial(jax.jit, static_argnums=0)
def canonical(strategy: Recurrence, state: Any) -> jax.Array:
    return strategy.canonical(state)


class Rows(NamedTuple):
    """A window's inputs in numpy; ``beta`` is ``None`` without a delta."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray | None

    def arrays(self, parents: list[int]) -> list[Any]:
        mask = np.eye(self.q.shape[1], dtype=bool)
        for row in range(len(parents) + 1):
            mask[row, path_to(parents, row)] = True
        mask = np.broadcast_to(mask, (B, *mask.shape))
        floats = [None if a is None else jnp.asarray(a, float) for a in self]
        return [*floats, jnp.asarray(mask)]


def path_to(parents: list[int], row: int) -> list[int]:
    return [0] if row == 0 else [*path_to(parents, parents[row - 1]), row]


def rows(draw: np.random.Generator, shape: MatrixShape, delta: bool = True) -> Rows:
    k = draw.normal(size=(B, W, shape.key_heads, DK))
    return Rows(
        q=draw.normal(size=k.shape),
        k=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v=draw.normal(size=(B, W, shape.heads, DV)),
        log_decay=-0.3 * draw.exponential(size=(B, W, *shape.decays)),
        beta=draw.uniform(size=(B, W, shape.heads)) if delta else None,
    )


def advance(
    state: np.ndarray, x: Rows, b: int, path: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """One row of the batch down a path: its state, and the last row's output."""
    state, share = state.copy(), x.v.shape[2] // x.k.shape[2]
    out = np.zeros((x.v.shape[2], DV))
    for row in path:
        for h in range(len(state)):
            q, k = x.q[b, row, h // share], x.k[b, row, h // share]
            s = state[h] * np.exp(np.broadcast_to(x.log_decay[b, row, h], DK))[:, None]
            u = x.v[b, row, h]
            if x.beta is not None:
                u = x.beta[b, row, h] * (u - s.T @ k)
            state[h] = s + np.outer(k, u)
            out[h] = state[h].T @ q
    return state, out


def padded(paths: list[list[int]], length: int = W) -> tuple[jax.Array, jax.Array]:
    table = np.zeros((B, length), np.int32)
    for b, path in enumerate(paths):
        table[b, : len(path)] = path
    return jnp.asarray(table), jnp.asarray([len(p) for p in paths], jnp.int32)


def fresh(strategy: Recurrence, shape: MatrixShape) -> tuple[Any, np.ndarray]:
    """The first state, here and in numpy."""
    state = strategy.init(B, shape, jnp.asarray(0.0).dtype)
    return state, np.zeros((B, shape.heads, DK, DV))


def assert_same_bits(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(strategy, "head") for strategy in STRATEGIES]
    + [(Ring(3), "channel"), (Ring(16), "plain"), (Snapshot(), "channel")],
)
def test_rounds_of_trees_are_the_serial_recurrence(strategy, kind):
    """Two rejects in a row, nothing at all, full accepts: every output and state."""
    # other kinds differ inside the kernel, and are tested there and with the mixers
    shape, delta = SHAPES.get(kind, SHAPES["head"]), kind != "plain"
    draw = np.random.default_rng(3)
    trees = [CHAIN, [0, 0, 1, 1, 2], [0, 0, 0, 0, 0], [0, 0, 1, 3, 2]]
    ends = [(5, 2), (0, 0), (0, 0), (None, 4), (3, None), (None, None), (5, 5), (1, 0)]
    with jax.enable_x64(True):
        state, serial = fresh(strategy, shape)
        for turn, last in enumerate(ends):
            parents = trees[turn % len(trees)]
            x = rows(draw, shape, delta)
            x.v[:, 4] *= 1e5  # a loud row, mostly on nobody's path
            out, pending = read(strategy, state, *x.arrays(parents))
            for b, row in np.ndindex(B, W):
                _, wanted = advance(serial[b], x, b, path_to(parents, row))
                scale = max(1.0, np.abs(wanted).max())
                np.testing.assert_allclose(out[b, row] / scale, wanted / scale, **EXACT)
            paths = [[] if row is None else path_to(parents, row) for row in last]
            state = commit(strategy, state, pending, *padded(paths))
            for b, path in enumerate(paths):
                serial[b], _ = advance(serial[b], x, b, path)
            got = canonical(strategy, state)
            scale = max(1.0, np.abs(serial).max())
            np.testing.assert_allclose(got / scale, serial / scale, **EXACT)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=IDS)
def test_no_trace_of_rejected_rows_and_no_change_of_finished_ones(strategy):
    shape, draw = SHAPES["head"], np.random.default_rng(4)
    with jax.enable_x64(True):
        state, _ = fresh(strategy, shape)
        off_path = jnp.array([2, 4, 5])
        accepted = padded([[0, 1, 3], []])
        for _ in range(4):
            x = rows(draw, shape).arrays([0, 0, 1, 1, 2])
            _, pending = read(strategy, state, *x)
            spoilt = jax.tree.map(lambda y: y.at[:, off_path].set(jnp.nan), pending)
            before, state = state, commit(strategy, state, pending, *accepted)
            assert_same_bits(state, commit(strategy, before, spoilt, *accepted))
            assert_same_bits(
                *(jax.tree.map(lambda y: y[1], s) for s in (state, before))
            )


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_ring_folded_at_any_cursor_reads_and_folds_alike(dtype):
    """What is read from records is what is folded from them, rounded or not."""
    shape, draw, ring = SHAPES["head"], np.random.default_rng(5), Ring(16, dtype)
    x = rows(draw, shape)
    with jax.enable_x64(True):
        probe = rows(draw, shape).arrays(CHAIN)
        empty, _ = fresh(ring, shape)
        empty = empty.replace(matrix=jnp.asarray(draw.normal(size=empty.matrix.shape)))
        _, pending = read(ring, empty, *x.arrays(CHAIN))
        whole = commit(ring, empty, pending, *padded([list(range(W))] * B))
        assert whole.count.tolist() == [W] * B
        for cursor in range(W + 1):
            part = commit(ring, empty, pending, *padded([list(range(cursor))] * B))
            folded = part.replace(
                matrix=canonical(ring, part), count=jnp.zeros_like(part.count)
            )
            ahead, _ = read(ring, part, *probe)
            behind, _ = read(ring, folded, *probe)
            # a key is rounded alike on both sides, so only the sums' order differs
            np.testing.assert_allclose(ahead, behind, **EXACT)
            rest = list(range(cursor, W))
            ends = [
                canonical(ring, commit(ring, s, pending, *padded([rest] * B)))
                for s in (part, folded)
            ]
            np.testing.assert_allclose(ends[0], canonical(ring, whole), **EXACT)
            np.testing.assert_allclose(ends[1], ends[0], **EXACT)


def test_what_stands_in_a_rings_free_slots_is_not_looked_at():
    shape, draw, ring = SHAPES["head"], np.random.default_rng(6), Ring(16)
    with jax.enable_x64(True):
        x = rows(draw, shape).arrays(CHAIN)
        state, _ = fresh(ring, shape)
        _, pending = read(ring, state, *x)
        state = commit(ring, state, pending, *padded([[0, 1], [0]]))
        live = np.arange(16)[None] < np.asarray(state.count)[:, None]
        records = jax.tree.map(
            lambda y: jnp.where(live.reshape(B, 16, *[1] * (y.ndim - 2)), y, jnp.nan),
            state.records,
        )
        poisoned = state.replace(records=records)
        assert_same_bits(read(ring, state, *x), read(ring, poisoned, *x))
        assert_same_bits(canonical(ring, state), canonical(ring, poisoned))


def test_a_ring_writes_its_matrix_only_when_it_is_full():
    shape, draw, ring = SHAPES["head"], np.random.default_rng(7), Ring(16)
    with jax.enable_x64(True):
        state, _ = fresh(ring, shape)
        x = rows(draw, shape).arrays(CHAIN)
        counts, written = [], []
        for turn in range(8):
            _, pending = read(ring, state, *x)
            before = state.matrix
            state = commit(ring, state, pending, *padded([[0, 1, 2, 3], [0]]))
            counts.append(state.count.tolist())
            changed = np.any(np.asarray(state.matrix != before), axis=(1, 2, 3))
            written += [(turn, b) for b in np.flatnonzero(changed).tolist()]
        assert [c[0] for c in counts] == [4, 8, 12, 16, 4, 8, 12, 16]
        assert [c[1] for c in counts] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert written == [(4, 0)]


def test_a_window_too_wide_for_snapshots_is_replayed():
    shape, draw = SHAPES["head"], np.random.default_rng(8)
    accepted = padded([[0, 1, 2], []])
    with jax.enable_x64(True):
        x = rows(draw, shape).arrays(CHAIN)
        state, _ = fresh(Snapshot(W - 1), shape)
        wanted = read(Replay(), state, *x)
        got = read(Snapshot(W - 1), state, *x)
        assert_same_bits(got, wanted)
        assert_same_bits(
            commit(Snapshot(W - 1), state, got[1], *accepted),
            commit(Replay(), state, wanted[1], *accepted),
        )


def test_a_snapshots_numbers_do_not_depend_on_the_window():
    shape, draw, strategy = SHAPES["head"], np.random.default_rng(9), Snapshot()
    with jax.enable_x64(True):
        x = rows(draw, shape).arrays(CHAIN)
        state, _ = fresh(strategy, shape)
        whole, pending = read(strategy, state, *x)
        at_once = commit(strategy, state, pending, *padded([list(range(W))] * B))
        for row in range(W):
            one = [y[:, row : row + 1] for y in x[:5]]
            out, pending = read(strategy, state, *one, jnp.ones((B, 1, 1), bool))
            np.testing.assert_array_equal(out[:, 0], whole[:, row])
            state = commit(strategy, state, pending, *padded([[0]] * B, 1))
        assert_same_bits(state, at_once)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("strategy", [*STRATEGIES, Ring(5, "bfloat16"), Snapshot(2)])
def test_scratch_bytes_are_what_is_allocated(strategy, kind):
    shape, draw = SHAPES[kind], np.random.default_rng(0)
    state, _ = fresh(strategy, shape)
    pending = jax.eval_shape(strategy.read, state, *rows(draw, shape).arrays(CHAIN))[1]
    held = [x.size * x.dtype.itemsize for x in jax.tree.leaves((state, pending))]
    matrix = shape.matrix * 4
    assert strategy.scratch_bytes(shape, W, jnp.float32) == sum(held) // B - matrix
    assert all(x.shape[:2] == (B, W) for x in jax.tree.leaves(pending))


def test_eight_drafts_take_a_fortieth_of_what_snapshots_take():
    head = MatrixShape(heads=1, key_heads=1, key_dim=128, value_dim=128)
    anchor_and_drafts, kibi = 9, 1024

    def size(strategy: Recurrence, rows: int = anchor_and_drafts) -> int:
        return strategy.scratch_bytes(head, rows, jnp.float32)

    assert size(Snapshot(), 8) == 512 * kibi
    assert size(Snapshot()) == 576 * kibi
    assert size(Ring(6)) == (9 + 6) * 1028 + 4 <= 16 * kibi < size(Ring(7))
    assert size(Ring(16, "bfloat16")) == (9 + 16) * 516 + 4 <= 16 * kibi
    assert size(Replay()) == 9 * 1028


def test_settings_that_hold_nothing_are_refused():
    with pytest.raises(ValueError, match=r"Ring\(slots=0\)"):
        Ring(0)
    with pytest.raises(ValueError, match=r"Snapshot\(rows=0\)"):
        Snapshot(0)


def drift(strategy: Recurrence, rounds: int) -> float:
    """The error of the state in float32 after many rounds, against float64."""
    shape, draw = SHAPES["head"], np.random.default_rng(10)
    pool = [rows(draw, shape) for _ in range(8)]
    for x in pool:
        x.log_decay[:] *= 0.01  # so that errors would last
    stacked = [
        jnp.stack(parts) for parts in zip(*(x.arrays(CHAIN) for x in pool), strict=True)
    ]
    takes = draw.integers(0, W + 1, size=(rounds, B)).astype(np.int32)
    path = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))

    def one(state: Any, turn: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        which, num = turn
        _, pending = strategy.read(state, *(y[which] for y in stacked))
        taken = jnp.where(path < num[:, None], path, 0)
        accepted = Acceptance(path=taken, tokens=taken, num_tokens=num)
        return strategy.commit(state, pending, accepted), None

    which = jnp.arange(rounds, dtype=jnp.int32) % len(pool)
    state, serial = fresh(strategy, shape)
    state, _ = jax.jit(lambda s: jax.lax.scan(one, s, (which, jnp.asarray(takes))))(
        state
    )
    for turn in range(max(0, rounds - 200), rounds):  # what was before is forgotten
        for b in range(B):
            steps = list(range(takes[turn, b]))
            serial[b], _ = advance(serial[b], pool[turn % len(pool)], b, steps)
    got = np.asarray(strategy.canonical(state), np.float64)
    return float(np.abs(got - serial).max() / np.abs(serial).max())


@pytest.mark.parametrize("strategy", [Replay(), Ring(3)], ids=["replay", "ring"])
def test_the_state_does_not_drift(strategy):
    assert drift(strategy, 300) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES, ids=IDS)
def test_the_state_does_not_drift_in_ten_thousand_rounds(strategy):
    assert drift(strategy, 10_000) < 2e-6
