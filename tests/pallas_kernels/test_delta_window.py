"""The gated delta rule in closed form against the recurrence, one path at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_window import api
from pallas_kernels.delta_window.api import Records

B, H, DK, DV = 3, 2, 5, 4
EXACT = {"rtol": 0, "atol": 1e-12}

window = jax.jit(api.delta_window)
commit = jax.jit(api.delta_commit)

TREES = {
    "one row": [],
    "chain": [0, 1, 2, 3, 4, 5, 6],
    "star": [0, 0, 0, 0, 0, 0, 0],
    "tree": [0, 0, 1, 1, 2, 3, 6, 6],
    "two chains": [0, 0, 1, 2, 3, 4, 5, 6],
}


class Inputs(NamedTuple):
    """What every row of the window brings, in float64."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    state: np.ndarray


def path_to(parents: list[int], row: int) -> list[int]:
    return [0] if row == 0 else [*path_to(parents, parents[row - 1]), row]


def mask_of(parents: list[int]) -> np.ndarray:
    width = len(parents) + 1
    mask = np.zeros((width, width), bool)
    for row in range(width):
        mask[row, path_to(parents, row)] = True
    return np.broadcast_to(mask, (B, width, width))


def inputs(width: int, seed: int = 0) -> Inputs:
    draw = np.random.default_rng(seed)
    k = draw.normal(size=(B, width, H, DK))
    return Inputs(
        q=draw.normal(size=(B, width, H, DK)),
        k=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v=draw.normal(size=(B, width, H, DV)),
        log_decay=-draw.exponential(size=(B, width, H)),
        beta=draw.uniform(size=(B, width, H)),
        state=draw.normal(size=(B, H, DK, DV)),
    )


def serial(x: Inputs, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The state after each row of a path, and the output of its last row."""
    state, out = x.state.copy(), np.zeros((B, H, DV))
    for row in path:
        for b, h in np.ndindex(B, H):
            s = state[b, h] * np.exp(x.log_decay[b, row, h])
            u = x.beta[b, row, h] * (x.v[b, row, h] - s.T @ x.k[b, row, h])
            s = s + np.outer(x.k[b, row, h], u)
            state[b, h], out[b, h] = s, s.T @ x.q[b, row, h]
    return state, out


def check_every_path(x: Inputs, parents: list[int]) -> None:
    """Outputs of every row, and the state after every row's path."""
    width = len(parents) + 1
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a) for a in x]
        out, updates = window(*arrays, jnp.asarray(mask_of(parents)))
        assert out.dtype == jnp.float64
        for row in range(width):
            path = path_to(parents, row)
            state, wanted = serial(x, path)
            np.testing.assert_allclose(out[:, row], wanted, **EXACT)
            rows = np.zeros((B, width), np.int32)
            rows[:, : len(path)] = path
            got = commit(
                arrays[5],
                Records(arrays[1], updates, arrays[3]),
                jnp.asarray(rows),
                jnp.full((B,), len(path), jnp.int32),
            )
            np.testing.assert_allclose(got, state, **EXACT)


@pytest.mark.parametrize("name", TREES)
def test_every_path_of_a_window_is_the_serial_recurrence(name):
    parents = TREES[name]
    check_every_path(inputs(len(parents) + 1, seed=len(parents)), parents)


def test_a_random_tree_of_sixteen_rows_is_the_serial_recurrence():
    draw = np.random.default_rng(5)
    parents = [int(draw.integers(0, i + 1)) for i in range(15)]
    check_every_path(inputs(16, seed=1), parents)


def test_siblings_of_huge_norm_stay_on_their_own_paths():
    parents = TREES["tree"]
    x = inputs(len(parents) + 1)
    loud = [4, 5, 8]  # on nobody else's path; row 7's path is 0, 1, 3, 6, 7
    for row in loud:
        x.k[:, row] *= 1e3
        x.v[:, row] *= 1e6
        x.log_decay[:, row] = -50.0
    with jax.enable_x64(True):
        out, _ = window(*[jnp.asarray(a) for a in x], jnp.asarray(mask_of(parents)))
    for row in (0, 1, 2, 3, 6, 7):
        _, wanted = serial(x, path_to(parents, row))
        np.testing.assert_allclose(out[:, row], wanted, **EXACT)


def test_decays_far_apart_on_different_branches_do_not_overflow():
    parents = [0, 0]
    x = inputs(3)
    x.log_decay[:, 1], x.log_decay[:, 2] = -2000.0, -1e-3
    check_every_path(x, parents)


def test_equal_keys_and_full_updates_stay_exact():
    # powers of the mixing matrix would grow like binomials here
    parents = list(range(23))
    x = inputs(24)
    x.k[:] = x.k[:, :1]
    x.beta[:], x.log_decay[:] = 1.0, -1e-9
    check_every_path(x, parents)


def test_commit_of_no_rows_changes_no_bit():
    x = inputs(4)
    arrays = [jnp.asarray(a, jnp.float32) for a in x]
    _, updates = window(*arrays, jnp.asarray(mask_of([0, 1, 2])))
    path = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (B, 4))
    num = jnp.array([0, 2, 0], jnp.int32)
    got = commit(arrays[5], Records(arrays[1], updates, arrays[3]), path, num)
    np.testing.assert_array_equal(got[0], arrays[5][0])
    np.testing.assert_array_equal(got[2], arrays[5][2])
    assert not np.array_equal(got[1], arrays[5][1])


def test_rows_of_a_batch_commit_paths_of_their_own():
    parents = TREES["tree"]
    x = inputs(len(parents) + 1)
    paths = [path_to(parents, row) for row in (7, 2, 5)]
    rows = np.zeros((B, 9), np.int32)
    for b, path in enumerate(paths):
        rows[b, : len(path)] = path
        rows[b, len(path) :] = 8  # beyond the count: anything
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a) for a in x]
        _, updates = window(*arrays, jnp.asarray(mask_of(parents)))
        num = jnp.asarray([len(path) for path in paths], jnp.int32)
        got = commit(
            arrays[5], Records(arrays[1], updates, arrays[3]), jnp.asarray(rows), num
        )
        for b, path in enumerate(paths):
            np.testing.assert_allclose(got[b], serial(x, path)[0][b], **EXACT)


def test_committing_in_two_windows_is_committing_in_one():
    x = inputs(6)
    first = Inputs(*[a[:, :2] for a in x[:5]], x.state)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a) for a in first]
        _, updates = window(*arrays, jnp.asarray(mask_of([0])))
        path = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (B, 2))
        num = jnp.full((B,), 2, jnp.int32)
        between = commit(arrays[5], Records(arrays[1], updates, arrays[3]), path, num)
        rest = [jnp.asarray(a[:, 2:]) for a in x[:5]]
        out, _ = window(*rest, between, jnp.asarray(mask_of([0, 1, 2])))
    _, wanted = serial(x, list(range(6)))
    np.testing.assert_allclose(out[:, -1], wanted, **EXACT)
