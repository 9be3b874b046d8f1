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
