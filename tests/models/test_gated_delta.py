"""GDN and KDA layers against a serial layer in numpy, under every strategy."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance, Window
from specjax.models.config import GatedDeltaConfig
from specjax.models.linear import Linear
from specjax.models.mixers.base import Aids
from specjax.models.mixers.gated_delta import GatedDelta, LowRank
from specjax.models.norms import RMSNorm
from specjax.models.recurrence import Replay, Ring, Snapshot

B, W, D, G, H, DK, DV, TAPS = 2, 6, 7, 2, 4, 3, 5, 4
EPS = 1e-3
EXACT = {"rtol": 0, "atol": 1e-11}
CHAIN = [0, 1, 2, 3, 4]
STRATEGIES = {"replay": Replay(), "snapshot": Snapshot(), "ring": Ring(4)}
CONFIGS = {
    "gdn": GatedDeltaConfig(
        num_key_heads=G,
        num_value_heads=H,
        key_dim=DK,
        value_dim=DV,
        conv_width=TAPS,
        norm_eps=EPS,
    ),
    "kda": GatedDeltaConfig(
        num_key_heads=H,
        num_value_heads=H,
        key_dim=DK,
        value_dim=DV,
        conv_width=TAPS,
        norm_eps=EPS,
        channel_decay=True,
        gate_rank=2,
        gate="sigmoid",
    ),
}
CONFIGS["safe kda"] = dataclasses.replace(CONFIGS["kda"], decay_floor=-5.0)

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

    def __init__(self, kind: str) -> None:
        self.config = config = CONFIGS[kind]
        draw = np.random.default_rng(1)

        def normal(*shape: int) -> np.ndarray:
            return draw.normal(size=shape) / np.sqrt(shape[-1])

        by_channel, rank = config.channel_decay, config.gate_rank
        decays = (H, DK) if by_channel else (H,)
        sizes = {"decay": int(np.prod(decays)), "gate": H * DV}
        self.p = {
            name: normal(size, D)
            if rank is None
            else (normal(rank, D), normal(size, rank))
            for name, size in sizes.items()
        }
        self.p |= {
            "qkv": 2 * normal(config.channels, D),
            "beta": normal(H, D),
            "taps": normal(config.channels, TAPS),
            "log_rate": draw.normal(size=H),
            "decay_bias": draw.normal(size=decays),
            "norm": draw.normal(size=DV),
            "out": normal(D, H * DV),
        }

    def layer(self, strategy: Any) -> GatedDelta:
        """The same numbers in the layer under test."""
        made = {name: self._given(p) for name, p in self.p.items()}
        made["norm"] = RMSNorm(weight=made["norm"], eps=EPS)
        for name in ("qkv", "beta", "out"):
            made[name] = Linear(weight=made[name])
        for name in ("decay", "gate"):
            if not isinstance(made[name], LowRank):
                made[name] = Linear(weight=made[name])
        config = dataclasses.replace(self.config, recurrence=strategy)
        return GatedDelta(config=config, **made)

    @staticmethod
    def _given(p: Any) -> Any:
        if isinstance(p, tuple):
            return LowRank(*(Linear(weight=jnp.asarray(x)) for x in p))
        return jnp.asarray(p)

    def start(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((H, DK, DV)), np.zeros((TAPS - 1, self.config.channels))

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        p = self.p[name]
        return p[1] @ (p[0] @ x) if isinstance(p, tuple) else p @ x

    def log_decay(self, x: np.ndarray) -> np.ndarray:
        """``[H, 1]`` or ``[H, DK]``."""
        bias = self.p["decay_bias"].reshape(H, -1)
        f = self.project("decay", x).reshape(H, -1) + bias
        rate = np.exp(self.p["log_rate"])[:, None]
        if self.config.decay_floor is None:
            return -rate * np.logaddexp(0, f)
        return self.config.decay_floor * sigmoid(rate * f)

    def step(self, state: Any, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """The output for one token, and the state after it."""
        matrix, past = state
        line = np.concatenate([past, (self.p["qkv"] @ x)[None]])
        mixed = np.einsum("wc,cw->c", line, self.p["taps"])
        mixed = mixed * sigmoid(mixed)
        keys = self.config.num_key_heads
        q, k, v = np.split(mixed, [keys * DK, 2 * keys * DK])
        q, k = (
            np.repeat(y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6), H // keys, 0)
            for y in (q.reshape(keys, DK), k.reshape(keys, DK))
        )
        beta = sigmoid(self.p["beta"] @ x)
        matrix = np.exp(self.log_decay(x))[:, :, None] * matrix
        old = np.einsum("hkv,hk->hv", matrix, k)
        u = beta[:, None] * (v.reshape(H, DV) - old)
        matrix = matrix + k[:, :, None] * u[:, None, :]
        o = np.einsum("hkv,hk->hv", matrix, q * DK**-0.5)
        o = o / np.sqrt((o**2).mean(-1, keepdims=True) + EPS) * self.p["norm"]
        z = self.project("gate", x).reshape(H, DV)
        gate = sigmoid(z)
        o = o * (gate if self.config.gate == "sigmoid" else z * gate)
        return self.p["out"] @ o.reshape(-1), (matrix, line[1:])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


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
    ("kind", "strategy"),
    [*itertools.product(["gdn", "kda"], STRATEGIES), ("safe kda", "replay")],
)
def test_rounds_are_the_serial_layer(kind, strategy):
    """A chain that is taken whole, two rejects in a row, trees, rounds without drafts
    and rows that are finished: outputs and states, token by token.
    """
    draw, serial = np.random.default_rng(2), Serial(kind)
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


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_stood_in_rejected_rows_and_padding_leaves_no_trace(kind, strategy):
    draw, parents, serial = np.random.default_rng(3), [0, 0, 1, 2], Serial(kind)
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


def test_pending_has_the_window_rows_on_axis_one():
    with jax.enable_x64(True):
        layer = Serial("gdn").layer(Replay())
        state = layer.init_state(B, 8)
        _, pending = mix(layer, jnp.zeros((B, W, D)), window_of(CHAIN), state)
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(pending)} == {(B, W)}


def test_a_floor_must_be_negative():
    with pytest.raises(ValueError, match=r"decay_floor = 5\.0"):
        dataclasses.replace(CONFIGS["kda"], decay_floor=5.0)
