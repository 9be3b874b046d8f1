"""Recurrent windows in closed form against the recurrence, one path at a time."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_window import api
from pallas_kernels.delta_window.api import Records

B, G, H, DK, DV = 2, 2, 4, 5, 3
EXACT = {"rtol": 0, "atol": 1e-12}
KINDS = ["head", "channel", "plain"]  # decay by head, by channel; without a delta

window = jax.jit(api.delta_window)
commit = jax.jit(api.delta_commit)
step = jax.jit(api.delta_step)

# all of nine rows, the last of them padding where there are fewer
TREES = {
    "one row": [],
    "chain": [0, 1, 2, 3, 4, 5, 6, 7],
    "star": [0, 0, 0, 0, 0, 0, 0],
    "tree": [0, 0, 1, 1, 2, 3, 6, 6],
    "two chains": [0, 0, 1, 2, 3, 4, 5, 6],
}
SHORT, LONG = 9, 128


class Inputs(NamedTuple):
    """What every row of the window brings, in float64."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray | None
    state: np.ndarray


def path_to(parents: list[int], row: int) -> list[int]:
    return [0] if row == 0 else [*path_to(parents, parents[row - 1]), row]


def mask_of(parents: list[int], width: int = SHORT) -> np.ndarray:
    mask = np.eye(width, dtype=bool)
    for row in range(len(parents) + 1):
        mask[row, path_to(parents, row)] = True
    return np.broadcast_to(mask, (B, width, width))


def inputs(kind: str, width: int = SHORT, seed: int = 0) -> Inputs:
    draw = np.random.default_rng(seed)
    decays = (B, width, H, DK) if kind == "channel" else (B, width, H)
    k = draw.normal(size=(B, width, G, DK))
    return Inputs(
        q=draw.normal(size=(B, width, G, DK)),
        k=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v=draw.normal(size=(B, width, H, DV)),
        log_decay=-draw.exponential(size=decays),
        beta=None if kind == "plain" else draw.uniform(size=(B, width, H)),
        state=draw.normal(size=(B, H, DK, DV)),
    )


def serial(x: Inputs, parents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs ``[B, W, H, dv]`` and states ``[B, W, H, dk, dv]``, row after row."""
    width = len(parents) + 1
    out, states = np.zeros((B, width, H, DV)), np.zeros((B, width, H, DK, DV))
    for row, parent in enumerate([-1, *parents]):
        for b, h in np.ndindex(B, H):
            q, k = x.q[b, row, h // (H // G)], x.k[b, row, h // (H // G)]
            before = x.state[b, h] if parent < 0 else states[b, parent, h]
            decay = np.broadcast_to(x.log_decay[b, row, h], DK)
            s = before * np.exp(decay)[:, None]
            u = x.v[b, row, h]
            if x.beta is not None:
                u = x.beta[b, row, h] * (u - s.T @ k)
            s = s + np.outer(k, u)
            states[b, row, h], out[b, row, h] = s, s.T @ q
    return out, states


def run(x: Inputs, mask: np.ndarray) -> tuple[jax.Array, Records]:
    """Outputs and what the rows write, in the default precision of the moment."""
    arrays = [None if a is None else jnp.asarray(a, float) for a in x]
    out, updates = window(*arrays, jnp.asarray(mask))
    return out, Records(arrays[1], updates, arrays[3])


def check_every_path(x: Inputs, parents: list[int]) -> None:
    """Outputs of every row, and the state after every row's path."""
    wanted, states = serial(x, parents)
    width = len(parents) + 1
    with jax.enable_x64(True):
        out, rows = run(x, mask_of(parents, x.q.shape[1]))
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out[:, :width], wanted, **EXACT)
        for row in range(width) if width <= SHORT else (3, width - 1):
            path = np.zeros((B, x.q.shape[1]), np.int32)
            steps = path_to(parents, row)
            path[:, : len(steps)] = steps
            got = commit(
                jnp.asarray(x.state),
                rows,
                jnp.asarray(path),
                jnp.full((B,), len(steps), jnp.int32),
            )
            np.testing.assert_allclose(got, states[:, row], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TREES)
def test_every_path_of_a_window_is_the_serial_recurrence(name, kind):
    check_every_path(inputs(kind, seed=len(TREES[name])), TREES[name])


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_of_huge_norm_stay_on_their_own_paths(kind):
    parents = TREES["tree"]
    x = inputs(kind)
    loud = [4, 5, 8]  # on nobody else's path; row 7's path is 0, 1, 3, 6, 7
    for row in loud:
        x.k[:, row] *= 1e3
        x.v[:, row] *= 1e6
        x.log_decay[:, row] = -50.0
    quiet = [0, 1, 2, 3, 6, 7]
    wanted, _ = serial(x, parents)
    with jax.enable_x64(True):
        out, _ = run(x, mask_of(parents))
    np.testing.assert_allclose(out[:, quiet], wanted[:, quiet], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_decays_far_apart_on_different_branches_do_not_overflow(kind):
    x = inputs(kind)
    x.log_decay[:, 1], x.log_decay[:, 2] = -2000.0, -1e-3
    check_every_path(x, [0, 0])


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_equal_keys_and_full_updates_stay_exact(kind):
    # powers of the mixing matrix would grow like binomials here
    x = inputs(kind, LONG)
    x.k[:] = x.k[:, :1]
    x.beta[:], x.log_decay[:] = 1.0, -1e-9
    check_every_path(x, list(range(LONG - 1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [LONG, 100])
def test_a_long_chain_is_the_serial_recurrence(kind, rows):
    check_every_path(inputs(kind, LONG, seed=2), list(range(rows - 1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strongest", [0.1, 60.0])
def test_a_wide_tree_is_the_serial_recurrence(kind, strongest):
    # strong decays differ too much between branches to be split between blocks
    draw = np.random.default_rng(5)
    parents = [int(draw.integers(max(0, i - 20), i + 1)) for i in range(LONG - 1)]
    x = inputs(kind, LONG, seed=1)
    x.log_decay[:] *= strongest
    check_every_path(x, parents)


def test_what_a_batch_row_gets_does_not_depend_on_how_its_neighbour_is_computed():
    x = inputs("channel", LONG)
    x.log_decay[1] *= 60.0
    alike = mask_of(list(range(LONG - 1)), LONG).copy()
    other = alike.copy()
    other[1] = mask_of([0] * (LONG - 1), LONG)[1]
    other[1, -1, 40:50] = True  # they have forgotten far more than its neighbours have
    with jax.enable_x64(True):
        outputs = [run(x, mask)[0] for mask in (alike, other)]
    np.testing.assert_array_equal(outputs[0][0], outputs[1][0])


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_what_was_forgotten_costs_no_precision_later(kind):
    # sums of log decays in one float32 would be off by 1e-4 after the first rows
    x = inputs(kind)
    x.log_decay[:, :3] = -700.0 - x.log_decay[:, :3]
    x.log_decay[:, 3:] *= 0.1
    parents = TREES["chain"]
    wanted, _ = serial(x, parents)
    out, _ = run(x, mask_of(parents))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6)


def test_commit_of_no_rows_changes_no_bit_and_other_rows_are_not_looked_at():
    parents = TREES["tree"]
    x = inputs("head")
    x.state[1, 0, 0, 0] = -0.0  # a sum with 0 would lose the sign
    paths = [path_to(parents, 7), []]
    rows = np.full((B, SHORT), 8, np.int32)  # beyond the count: anything
    rows[0, : len(paths[0])] = paths[0]
    num = jnp.asarray([len(path) for path in paths], jnp.int32)
    _, states = serial(x, parents)
    with jax.enable_x64(True):
        _, written = run(x, mask_of(parents))
        spoilt = jax.tree.map(
            lambda y: y.at[:, jnp.array([2, 4, 5, 8])].set(jnp.nan), written
        )
        got = [
            commit(jnp.asarray(x.state), r, jnp.asarray(rows), num)
            for r in (written, spoilt)
        ]
        np.testing.assert_array_equal(*got)
        np.testing.assert_allclose(got[0][0], states[0, 7], **EXACT)
        assert np.asarray(got[0][1]).tobytes() == x.state[1].tobytes()


@pytest.mark.parametrize("kind", ["channel", "plain"])
def test_rows_before_the_window_are_read_as_if_they_were_folded(kind):
    first, second, parents = inputs(kind), inputs(kind, seed=1), TREES["tree"]
    _, states = serial(first, TREES["chain"])
    wanted, _ = serial(second._replace(state=states[:, 3]), parents)
    with jax.enable_x64(True):
        _, rows = run(first, mask_of(TREES["chain"]))
        past = jax.tree.map(lambda y: y[:, :4], rows)
        arrays = [None if a is None else jnp.asarray(a) for a in second]
        arrays[5] = jnp.asarray(first.state)
        out, _ = window(*arrays, jnp.asarray(mask_of(parents)), past)
    np.testing.assert_allclose(out, wanted, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_is_one_row(kind):
    x = inputs(kind)
    wanted, states = serial(x, [])
    with jax.enable_x64(True):
        mine = [None if a is None else jnp.asarray(a[:, 0]) for a in x[:5]]
        out, state = step(*mine, jnp.asarray(x.state))
    np.testing.assert_allclose(out, wanted[:, 0], **EXACT)
    np.testing.assert_allclose(state, states[:, 0], **EXACT)


def largest_array(jaxpr: Any) -> int:
    """Numbers in the largest value that a program makes, loops included."""
    largest = 0
    for equation in jaxpr.eqns:
        sizes = [math.prod(out.aval.shape) for out in equation.outvars]
        for part in jax.tree.leaves(equation.params, is_leaf=is_program):
            if is_program(part):
                sizes.append(largest_array(getattr(part, "jaxpr", part)))
        largest = max(largest, *sizes)
    return largest


def is_program(part: Any) -> bool:
    return hasattr(part, "eqns") or hasattr(part, "jaxpr")


def test_decays_by_channel_are_never_held_for_all_pairs_of_a_long_window():
    heads, dim = 4, 64

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    keys, mask = shape(1, LONG, heads, dim), jax.ShapeDtypeStruct((1, LONG, LONG), bool)
    program = jax.make_jaxpr(api.delta_window)(
        keys, keys, keys, keys, shape(1, LONG, heads), shape(1, heads, dim, dim), mask
    )
    assert largest_array(program.jaxpr) < LONG * LONG * heads * dim / 8
