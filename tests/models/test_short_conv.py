"""Gated short convolutions against a serial layer in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance, Window
from specjax.models.config import ShortConvConfig
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.short_conv import ShortConv

B, W, D, TAPS = 2, 6, 7, 3
EXACT = {"rtol": 0, "atol": 1e-12}
CHAIN = [0, 1, 2, 3, 4]

mix = jax.jit(
    lambda layer, x, window, state: layer.mix(
        x, window, state, jnp.zeros((B,), jnp.int32), Aids()
    )
)
commit = jax.jit(
    lambda layer, state, pending, accepted: layer.commit(
        state, pending, accepted, jnp.zeros((B,), jnp.int32)
    )
)


class Serial:
    """A layer in numpy, a token at a time; the state is the last inputs."""

    def __init__(self, bias: bool) -> None:
        self.bias = bias
        draw = np.random.default_rng(1)
        self.inputs, self.out = draw.normal(size=(3 * D, D)), draw.normal(size=(D, D))
        self.taps = draw.normal(size=(D, TAPS))
        self.biases = [draw.normal(size=n) * bias for n in (3 * D, D, D)]

    def layer(self) -> ShortConv:
        """The same numbers in the layer under test."""
        biases = [jnp.asarray(b) if self.bias else None for b in self.biases]
        return ShortConv(
            config=ShortConvConfig(channels=D, conv_width=TAPS, bias=self.bias),
            inputs=Linear(weight=jnp.asarray(self.inputs), bias=biases[0]),
            taps=jnp.asarray(self.taps),
            conv_bias=biases[1],
            out=Linear(weight=jnp.asarray(self.out), bias=biases[2]),
        )

    def start(self) -> np.ndarray:
        return np.zeros((TAPS - 1, D))

    def step(self, past: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The output for one token, and the state after it."""
        before, after, values = np.split(self.inputs @ x + self.biases[0], 3)
        line = np.concatenate([past, (before * values)[None]])
        y = after * (np.einsum("wc,cw->c", line, self.taps) + self.biases[1])
        return self.out @ y + self.biases[2], line[1:]


def path_to(parents: list[int], row: int) -> list[int]:
    return [0] if row == 0 else [*path_to(parents, parents[row - 1]), row]


def window_of(parents: list[int]) -> Window:
    """Rows that have a parent or are row 0 are valid; those behind them are padding."""
    mask = np.eye(W, dtype=bool)
    for row in range(len(parents) + 1):
        mask[row, path_to(parents, row)] = True
    valid = np.arange(W) <= len(parents)
    return Window(
        tokens=jnp.zeros((B, W), jnp.int32),
        positions=jnp.zeros((B, W), jnp.int32),
        ancestors=jnp.broadcast_to(mask, (B, W, W)),
        valid=jnp.broadcast_to(valid, (B, W)),
    )


def accept(paths: list[list[int]]) -> Acceptance:
    table = np.zeros((B, W), np.int32)
    for b, path in enumerate(paths):
        table[b, : len(path)] = path
    num = jnp.asarray([len(path) for path in paths], jnp.int32)
    return Acceptance(
        path=jnp.asarray(table), tokens=jnp.asarray(table), num_tokens=num
    )


@pytest.mark.parametrize("bias", [False, True])
def test_rounds_are_the_serial_layer(bias):
    """A chain that is taken whole, two rejects in a row, trees, rounds without drafts
    and rows that are finished: outputs and states, token by token.
    """
    draw, serial = np.random.default_rng(2), Serial(bias)
    rounds = [  # parents, a loud row that is on no other row's path, accepted ends
        (CHAIN, [], [5, 5]),
        ([0, 0, 1, 1, 2], [3], [4, 2]),
        ([0, 0, 0, 0, 0], [5], [0, 3]),
        ([0, 0, 1, 3], [2], [0, None]),
        ([], [], [0, 0]),
        ([0, 1, 0, 3, 3], [4], [5, 2]),
    ]
    with jax.enable_x64(True):
        layer = serial.layer()
        state, wanted = layer.init_state(B, 8), [serial.start()] * B
        for parents, loud, last in rounds:
            x = draw.normal(size=(B, W, D))
            x[:, loud] *= 1e5
            x[:, len(parents) + 1 :] = np.nan
            y, pending = mix(layer, jnp.asarray(x), window_of(parents), state)
            after: dict[tuple[int, int], Any] = {}
            for b, row in np.ndindex(B, len(parents) + 1):
                above = after[b, parents[row - 1]] if row else wanted[b]
                out, after[b, row] = serial.step(above, x[b, row])
                scale = max(1.0, np.abs(out).max())
                np.testing.assert_allclose(y[b, row] / scale, out / scale, **EXACT)
            paths = [[] if row is None else path_to(parents, row) for row in last]
            state = commit(layer, state, pending, accept(paths))
            got = layer.canonical(state, jnp.zeros((B,), jnp.int32))
            for b, row in enumerate(last):
                wanted[b] = wanted[b] if row is None else after[b, row]
                np.testing.assert_allclose(got.inputs[b], wanted[b], **EXACT)


def test_what_stood_in_rejected_rows_and_padding_leaves_no_trace():
    draw, parents, serial = np.random.default_rng(3), [0, 0, 1, 2], Serial(True)
    with jax.enable_x64(True):
        layer = serial.layer()
        state = layer.init_state(B, 8)
        x = draw.normal(size=(B, W, D))
        for wild in (np.nan, np.inf, 1e300):
            spoilt = x.copy()
            spoilt[:, [2, 5]] = wild  # row 4 hangs on row 2; row 5 is padding
            (y, p), (z, s) = (
                mix(layer, jnp.asarray(rows), window_of(parents), state)
                for rows in (x, spoilt)
            )
            np.testing.assert_array_equal(y[:, [0, 1, 3]], z[:, [0, 1, 3]])
            assert not np.isfinite(z[:, 2]).all()
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(s))
            ends = [
                commit(layer, state, pending, accept([[0, 1, 3], []]))
                for pending in (p, s)
            ]
            jax.tree.map(np.testing.assert_array_equal, *ends)
            finished = jax.tree.map(lambda leaf: leaf[1], (ends[0], state))
            jax.tree.map(np.testing.assert_array_equal, *finished)
        state = ends[0]
