"""Rows in one byte a number: what is rounded, and that nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.mixers.codecs import CODECS, decode
from specjax.testing.reference.model import stored


@pytest.fixture(params=list(CODECS))
def name(request) -> str:
    return request.param


def rows_of_all_sizes(count: int = 2000, dim: int = 16) -> np.ndarray:
    draw = np.random.default_rng(0)
    sizes = np.ldexp(1.0, draw.integers(-20, 20, (count, 1)))
    return (draw.standard_normal((count, dim)) * sizes).astype(np.float32)


def through(name: str, rows: np.ndarray, dtype=jnp.float32) -> np.ndarray:
    codes = jax.jit(CODECS[name].encode)(jnp.asarray(rows))
    return np.asarray(decode(codes.codes, codes.scale, dtype), np.float32)


def test_it_is_what_the_independent_reference_says(name):
    rows = rows_of_all_sizes()
    wanted = stored(rows.astype(np.float64), {"cache_dtype": name})
    np.testing.assert_array_equal(through(name, rows), wanted)
    assert (through(name, rows) != rows).mean() > 0.9  # else nothing was rounded


def test_codes_lie_in_their_range_and_scales_are_powers_of_two(name):
    codec = CODECS[name]
    codes = codec.encode(jnp.asarray(rows_of_all_sizes()))
    largest = np.abs(np.asarray(codes.codes, np.float32)).max(axis=-1)
    assert (largest >= 2 ** (codec.bits - 1)).all()
    assert (largest <= codec.most).all()
    assert codes.codes.dtype == codec.dtype and codes.scale.dtype == jnp.float32
    mantissa, _ = np.frexp(np.asarray(codes.scale))
    np.testing.assert_array_equal(mantissa, 0.5)


def test_errors_are_half_a_step_at_most():
    rows = rows_of_all_sizes()
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    error = np.abs(through("int8", rows) - rows) / largest
    # 127.9 steps are cut to 127; all else is half of a 64th at most
    assert 0.5 / 128 < error.max() < 1 / 64
    assert (error[np.abs(rows) < 0.99 * largest[:, :1]] <= 0.5 / 64).all()
    sure = np.abs(rows) > largest / 2**12  # above what is subnormal
    error = np.abs(through("fp8", rows) - rows) / np.abs(rows)
    assert 0.9 / 16 < error[sure].max() <= 1 / 16


def test_a_row_that_went_through_goes_through_as_it_is(name):
    once = through(name, rows_of_all_sizes())
    np.testing.assert_array_equal(through(name, once), once)


def test_numbers_are_exact_in_bfloat16_so_a_kernel_may_scale_behind_its_product(name):
    rows = rows_of_all_sizes()
    exact = through(name, rows)
    np.testing.assert_array_equal(through(name, rows, jnp.bfloat16), exact)
    codes = CODECS[name].encode(jnp.asarray(rows))
    q = jnp.asarray(np.random.default_rng(1).standard_normal(16), jnp.float32)
    behind = jnp.einsum("nd,d->n", codes.codes.astype(jnp.float32), q) * codes.scale
    before = jnp.einsum("nd,d->n", jnp.asarray(exact), q)
    np.testing.assert_array_equal(np.asarray(behind), np.asarray(before))


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 2.0**-101, 1e37, 3e38])
def test_rows_at_the_ends_of_float32_stay_finite(name, size):
    got = through(name, np.full((1, 4), size, np.float32))
    assert np.isfinite(got).all()
    assert (np.abs(got - size) <= max(size / 16, 2.0**-100)).all()


def test_rows_of_float64_have_the_same_codes(name):
    rows = rows_of_all_sizes(200)
    narrow = CODECS[name].encode(jnp.asarray(rows))
    with jax.enable_x64(True):
        wide = CODECS[name].encode(jnp.asarray(rows, jnp.float64))
        assert decode(wide.codes, wide.scale, jnp.float64).dtype == jnp.float64
        np.testing.assert_array_equal(*map(np.asarray, (narrow.codes, wide.codes)))
        np.testing.assert_array_equal(*map(np.asarray, (narrow.scale, wide.scale)))
