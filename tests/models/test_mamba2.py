"""Mamba2 layers against a serial layer in numpy, under every strategy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance, Window
from specjax.models.config import Mamba2Config
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.mamba2 import Mamba2
from specjax.models.norms import GroupedRMSNorm
from specjax.models.recurrence import Replay, Ring, Snapshot

B, W, D, G, H, N, HD, TAPS = 2, 6, 7, 2, 4, 3, 5, 4
EPS = 1e-3
EXACT = {"rtol": 0, "atol": 1e-11}
CHAIN = [0, 1, 2, 3, 4]
STRATEGIES = {"replay": Replay(), "snapshot": Snapshot(), "ring": Ring(4)}
CONFIG = Mamba2Config(
    num_heads=H,
    head_dim=HD,
    state_dim=N,
    num_groups=G,
    conv_width=TAPS,
    conv_bias=True,
    bias=False,
    norm_eps=EPS,
)

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
    """A layer in numpy, a token at a time; a state is (matrix, last inputs)."""

    def __init__(self, bias: bool) -> None:
        self.config = dataclasses.replace(CONFIG, conv_bias=bias, bias=bias)
        draw = np.random.default_rng(1)

        def normal(*shape: int) -> np.ndarray:
            return draw.normal(size=shape) / np.sqrt(shape[-1])

        parts = {
            "gate": (H * HD, D),
            "inputs": (CONFIG.channels, D),
            "steps": (H, D),
            "out": (D, H * HD),
        }
        self.weights = {name: normal(*shape) for name, shape in parts.items()}
        self.biases = {
            name: 0.5 * draw.normal(size=shape[0]) * bias
            for name, shape in parts.items()
        }
        self.conv_bias = 0.5 * draw.normal(size=CONFIG.channels) * bias
        self.vectors = {
            "taps": normal(CONFIG.channels, TAPS),
            "log_rate": draw.normal(size=H),
            "step_bias": draw.normal(size=H),
            "skip": draw.normal(size=H),
        }
        self.norm = draw.normal(size=H * HD)

    def layer(self, strategy: Any) -> Mamba2:
        """The same numbers in the layer under test."""
        bias = self.config.bias
        linears = {
            name: Linear(
                weight=jnp.asarray(weight),
                bias=jnp.asarray(self.biases[name]) if bias else None,
            )
            for name, weight in self.weights.items()
        }
        return Mamba2(
            config=dataclasses.replace(self.config, recurrence=strategy),
            conv_bias=jnp.asarray(self.conv_bias) if bias else None,
            norm=GroupedRMSNorm(weight=jnp.asarray(self.norm), eps=EPS, groups=G),
            **linears,
            **{name: jnp.asarray(x) for name, x in self.vectors.items()},
        )

    def start(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((H, N, HD)), np.zeros((TAPS - 1, CONFIG.channels))

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.weights[name] @ x + self.biases[name]

    def step(self, state: Any, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """The output for one token, and the state after it."""
        matrix, past = state
        line = np.concatenate([past, self.project("inputs", x)[None]])
        mixed = np.einsum("wc,cw->c", line, self.vectors["taps"]) + self.conv_bias
        values, written, read = np.split(silu(mixed), [H * HD, H * HD + G * N])
        values, matrix = values.reshape(H, HD), matrix.copy()
        dt = np.logaddexp(0, self.project("steps", x) + self.vectors["step_bias"])
        y = np.zeros((H, HD))
        for h in range(H):
            group = slice(h // (H // G) * N, (h // (H // G) + 1) * N)
            matrix[h] *= np.exp(-dt[h] * np.exp(self.vectors["log_rate"][h]))
            matrix[h] += dt[h] * np.outer(written[group], values[h])
            y[h] = read[group] @ matrix[h] + self.vectors["skip"][h] * values[h]
        y = (y.reshape(-1) * silu(self.project("gate", x))).reshape(G, -1)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS)
        return self.project("out", y.reshape(-1) * self.norm), (matrix, line[1:])


def silu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(0.5 * x))


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


@pytest.mark.parametrize(
    ("strategy", "bias"),
    [("replay", True), ("snapshot", True), ("ring", True), ("replay", False)],
)
def test_rounds_are_the_serial_layer(strategy, bias):
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
        layer = serial.layer(STRATEGIES[strategy])
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
                np.testing.assert_allclose(got.memory[b], wanted[b][0], **EXACT)
                np.testing.assert_allclose(got.inputs[b], wanted[b][1], **EXACT)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_stood_in_rejected_rows_and_padding_leaves_no_trace(strategy):
    draw, parents, serial = np.random.default_rng(3), [0, 0, 1, 2], Serial(True)
    with jax.enable_x64(True):
        layer = serial.layer(STRATEGIES[strategy])
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


def test_heads_must_fill_their_groups():
    with pytest.raises(ValueError, match="num_heads = 4 is not a multiple"):
        dataclasses.replace(CONFIG, num_groups=3)
