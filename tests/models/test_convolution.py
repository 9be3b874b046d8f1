"""The short convolution over trees, against one path at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance, Window
from specjax.models.mixers import convolution
from specjax.models.mixers.convolution import (
    flag_rows,
    parent_rows,
    silent_rows,
    usable_rows,
)

B, C = 2, 3
TREES = {
    "one row": [],
    "chain": [0, 1, 2, 3, 4],
    "star": [0, 0, 0, 0],
    "tree": [0, 0, 1, 1, 2, 3, 6],
}

convolve = jax.jit(convolution.convolve)
advance = jax.jit(convolution.advance)


def path_to(parents: list[int], row: int) -> list[int]:
    return [0] if row == 0 else [*path_to(parents, parents[row - 1]), row]


def window_of(parents: list[int]) -> Window:
    width = len(parents) + 1
    mask = np.zeros((B, width, width), bool)
    for row in range(width):
        mask[:, row, path_to(parents, row)] = True
    return Window(
        tokens=jnp.zeros((B, width), jnp.int32),
        positions=jnp.zeros((B, width), jnp.int32),
        ancestors=jnp.asarray(mask),
        valid=jnp.ones((B, width), bool),
    )


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("name", TREES)
def test_a_row_is_convolved_with_its_own_path_and_the_history(name, width):
    parents = TREES[name]
    rows = len(parents) + 1
    draw = np.random.default_rng(width)
    inputs, history, taps = (
        draw.normal(size=shape)
        for shape in [(B, rows, C), (B, width - 1, C), (C, width)]
    )
    with jax.enable_x64(True):
        x, past, kernel = (jnp.asarray(a) for a in (inputs, history, taps))
        got = convolve(x, window_of(parents), past, kernel)
        for row in range(rows):
            path = path_to(parents, row)
            line = np.concatenate([history, inputs[:, path]], axis=1)
            wanted = np.einsum("bwc,cw->bc", line[:, -width:], taps)
            np.testing.assert_allclose(got[:, row], wanted, rtol=0, atol=1e-13)
            # the history after this path is the end of that line
            padded = np.zeros((B, rows), np.int32)
            padded[:, : len(path)] = path
            accepted = Acceptance(
                path=jnp.asarray(padded),
                tokens=jnp.asarray(padded),
                num_tokens=jnp.asarray([len(path), 0], jnp.int32),
            )
            after = advance(past, x, accepted)
            np.testing.assert_array_equal(after[0], line[0, -(width - 1) :])
            np.testing.assert_array_equal(after[1], history[1])


def test_silent_rows_are_zero_even_where_they_were_nan():
    x = jnp.asarray([[[1.0, 2.0], [jnp.nan, jnp.inf]]], jnp.float32)
    got = silent_rows(x, jnp.array([[True, False]]))
    assert got.tolist() == [[[1.0, 2.0], [0.0, 0.0]]]
    flat = silent_rows(x[..., 0], jnp.array([[True, False]]))
    assert flat.tolist() == [[1.0, 0.0]]


def test_a_bias_is_added_to_every_row():
    with jax.enable_x64(True):
        x, past, taps = jnp.ones((B, 3, C)), jnp.ones((B, 1, C)), jnp.ones((C, 2))
        args = (x, window_of([0, 0]), past, taps)
        bias = jnp.asarray([1.0, 2.0, 3.0])
        np.testing.assert_array_equal(convolve(*args, bias), convolve(*args) + bias)


def test_parents_are_the_nearest_ancestors():
    window = window_of(TREES["tree"])
    assert parent_rows(window.ancestors)[0].tolist() == [-1, *TREES["tree"]]


def test_rows_that_could_spoil_their_neighbours_are_found_and_flagged():
    x = jnp.asarray([[[1.0, 2.0], [jnp.nan, 0.0], [3.0, 4.0], [0.0, -1e17]]])
    flat = jnp.asarray([[1e16, 2.0, -jnp.inf, 0.0]])
    usable = usable_rows(x, flat)
    assert usable.tolist() == [[True, False, False, False]]
    flagged = flag_rows(jnp.ones_like(x), ~usable)
    assert np.isnan(flagged[0]).tolist() == [[False] * 2] + [[True] * 2] * 3
