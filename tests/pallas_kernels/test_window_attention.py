"""Window attention against a softmax written out for each row and head."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.window_attention import api

B, HQ, H, D, T = 4, 6, 2, 5, 12
SCALE = 0.37
LENGTHS = (0, 1, 7, T)

attend = jax.jit(api.window_attention, static_argnames="scale")


def trees(width: int, seed: int = 0) -> np.ndarray:
    """A chain, a star, and random trees; the last one has padding rows."""
    draw = np.random.default_rng(seed)
    masks = np.zeros((B, width, width), bool)
    for b in range(B):
        for row in range(width):
            parent = [row - 1, 0, int(draw.integers(0, max(row, 1)))][min(b, 2)]
            if row > 0:
                masks[b, row] = masks[b, parent]
            masks[b, row, row] = True
    padding = np.arange(width) >= max(1, width - 2)
    masks[3, padding] = masks[3, :, padding] = False
    masks[3] |= np.eye(width, dtype=bool)
    return masks


def inputs(width: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = {
        "q": (B, width, HQ, D),
        "k": (B, width, H, D),
        "v": (B, width, H, D),
        "k_cache": (B, H, T, D),
        "v_cache": (B, H, T, D),
    }
    return {name: draw.normal(size=shape) for name, shape in shapes.items()}


def naive(x: dict[str, np.ndarray], lengths: Any, ancestors: np.ndarray) -> np.ndarray:
    """One row and one head at a time, in float64."""
    out = np.zeros(x["q"].shape)
    for b, row, head in np.ndindex(*out.shape[:3]):
        kv = head // (HQ // H)
        seen = np.flatnonzero(ancestors[b, row])
        n = lengths[b]
        keys = np.concatenate([x["k_cache"][b, kv, :n], x["k"][b, seen, kv]])
        values = np.concatenate([x["v_cache"][b, kv, :n], x["v"][b, seen, kv]])
        scores = keys @ x["q"][b, row, head] * SCALE
        weight = np.exp(scores - scores.max())
        out[b, row, head] = weight @ values / weight.sum()
    return out


def run(
    x: dict[str, np.ndarray],
    lengths: Any,
    ancestors: np.ndarray,
    dtype: Any = jnp.float32,
) -> np.ndarray:
    arrays = {name: jnp.asarray(value, dtype) for name, value in x.items()}
    out = attend(
        **arrays,
        lengths=jnp.asarray(lengths, jnp.int32),
        ancestors=jnp.asarray(ancestors),
        scale=SCALE,
    )
    return np.asarray(out)


@pytest.mark.parametrize("width", range(1, 10))
def test_it_is_the_softmax_over_committed_slots_and_ancestors(width):
    x, masks = inputs(width, seed=width), trees(width, seed=width)
    got = run(x, LENGTHS, masks)
    np.testing.assert_allclose(got, naive(x, LENGTHS, masks), rtol=1e-5, atol=1e-5)


def test_every_length_of_the_cache_is_exact_in_float64():
    x, masks = inputs(5), trees(5)
    with jax.enable_x64(True):
        for length in range(T + 1):
            lengths = [length, T - length, length, 0]
            got = run(x, lengths, masks, jnp.float64)
            wanted = naive(x, lengths, masks)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_what_stands_in_unused_slots_changes_no_bit(rubbish):
    x, masks = inputs(5), trees(5)
    clean = run(x, LENGTHS, masks)
    dirty = {name: value.copy() for name, value in x.items()}
    for b, length in enumerate(LENGTHS):
        dirty["k_cache"][b, :, length:] = rubbish
        dirty["v_cache"][b, :, length:] = rubbish
    np.testing.assert_array_equal(run(dirty, LENGTHS, masks), clean)


def test_a_row_that_is_not_finite_leaves_the_other_rows_alone():
    x, masks = inputs(5), trees(5)
    clean = run(x, LENGTHS, masks)
    broken = {name: value.copy() for name, value in x.items()}
    broken["v_cache"][2, 0, 3] = np.nan  # committed: it must show
    broken["q"][1, 4] = np.nan
    got = run(broken, LENGTHS, masks)
    np.testing.assert_array_equal(got[[0, 3]], clean[[0, 3]])
    np.testing.assert_array_equal(got[1, :4], clean[1, :4])
    assert np.isnan(got[1, 4]).all()
    group = HQ // H
    assert np.isnan(got[2, :, :group, :]).all()
    np.testing.assert_array_equal(got[2, :, group:], clean[2, :, group:])


def test_a_sibling_of_huge_norm_changes_no_bit():
    x, masks = inputs(5), trees(5)
    clean = run(x, LENGTHS, masks)
    loud = {name: value.copy() for name, value in x.items()}
    loud["k"][1, 3] = 1e6  # row 3 of the star: nobody's ancestor
    loud["v"][1, 3] = 1e6
    got = run(loud, LENGTHS, masks)
    others = [0, 1, 2, 4]
    np.testing.assert_array_equal(got[1, others], clean[1, others])
    assert not np.array_equal(got[1, 3], clean[1, 3])


def test_scores_far_apart_do_not_overflow():
    x, masks = inputs(3), trees(3)
    x["k"] *= 1e3
    got = run(x, LENGTHS, masks)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, naive(x, LENGTHS, masks), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_softmax_is_float32_whatever_the_inputs_are(dtype):
    x, masks = inputs(4), trees(4)
    rounded = {k: np.asarray(jnp.asarray(v, dtype), np.float64) for k, v in x.items()}
    got = run(x, LENGTHS, masks, dtype)
    assert got.dtype == np.float32
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    wanted = naive(rounded, LENGTHS, masks)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)


def softmax_with(
    x: dict[str, np.ndarray],
    positions: np.ndarray,
    ancestors: np.ndarray,
    slots: np.ndarray,
    *,
    reach: int | None = None,
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
    chosen: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Every option written out, one row and one head at a time, in float64."""
    out = np.zeros(x["q"].shape)
    for b, row, head in np.ndindex(*out.shape[:3]):
        kv = head // (HQ // H)
        at = positions[b, row]
        old = (slots[b] >= 0) & (slots[b] < LENGTHS[b])
        new = ancestors[b, row].copy()
        if reach is not None:
            old &= at - slots[b] < reach
            new &= at - positions[b] < reach
        if chosen is not None:
            old, new = old & chosen[0][b, row], new & chosen[1][b, row]
        keys = np.concatenate([x["k_cache"][b, kv, old], x["k"][b, new, kv]])
        values = np.concatenate([x["v_cache"][b, kv, old], x["v"][b, new, kv]])
        scores = keys @ x["q"][b, row, head] * SCALE
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if sinks is not None:
            scores = np.append(scores, sinks[head])
            values = np.append(values, np.zeros((1, values.shape[1])), axis=0)
        weight = np.exp(scores - scores.max())
        out[b, row, head] = weight @ values / weight.sum()
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"reach": 1},
        {"reach": 3},
        {"reach": 9, "sinks": True},
        {"sinks": True},
        {"softcap": 1.5},
        {"chosen": True, "sinks": True, "softcap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("ring", [False, True], ids=["stretch", "ring"])
def test_every_option_against_the_softmax_written_out(options, ring):
    width = 6
    draw = np.random.default_rng(len(str(options)))
    x, ancestors = inputs(width, seed=5), trees(width, seed=5)
    depth = ancestors.sum(-1) - 1
    positions = np.asarray(LENGTHS)[:, None] + depth
    # a ring's slots hold any positions, and some hold none
    slots = np.stack([np.arange(T)] * B)
    if ring:
        slots = np.stack([draw.permutation(T) for _ in range(B)])
        slots[draw.random((B, T)) < 0.2] = -1
    names = dict(options)
    if "sinks" in names:
        names["sinks"] = draw.normal(size=HQ)
    if "chosen" in names:
        own = np.eye(width, dtype=bool)
        names["chosen"] = (
            draw.random((B, width, T)) < 0.6,
            (draw.random((B, width, width)) < 0.6) | own,
        )
    # NaN in slots that hold nothing must not show
    unheld = (slots < 0) | (slots >= np.asarray(LENGTHS)[:, None])
    poisoned = dict(x)
    for name in ("k_cache", "v_cache"):
        poisoned[name] = np.where(unheld[:, None, :, None], np.nan, x[name])
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in poisoned.items()}
    traced = {
        name: jax.tree.map(
            lambda y: jnp.asarray(y, bool if y.dtype == bool else jnp.float32), value
        )
        for name, value in names.items()
        if name in ("sinks", "chosen")
    }
    fixed = {name: names[name] for name in names if name in ("reach", "softcap")}
    got = jax.jit(lambda **more: api.window_attention(**more, scale=SCALE, **fixed))(
        **arrays,
        **traced,
        lengths=jnp.asarray(LENGTHS, jnp.int32),
        ancestors=jnp.asarray(ancestors),
        positions=jnp.asarray(positions, jnp.int32),
        slots=jnp.asarray(slots, jnp.int32) if ring else None,
    )
    wanted = softmax_with(x, positions, ancestors, slots, **names)
    np.testing.assert_allclose(np.asarray(got), wanted, atol=2e-6)
