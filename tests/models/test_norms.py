"""The norm against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.norms import GroupedRMSNorm, RMSNorm


def test_it_divides_by_the_root_of_the_mean_square():
    x = np.random.default_rng(0).normal(size=(2, 3, 7))
    weight = np.linspace(-2, 2, 7)
    with jax.enable_x64(True):
        got = RMSNorm(weight=jnp.asarray(weight), eps=0.1)(jnp.asarray(x))
        assert got.dtype == jnp.float64
    wanted = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1) * weight
    np.testing.assert_allclose(got, wanted, rtol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_statistics_are_float32_and_so_is_the_result(dtype):
    # in float16 the squares would overflow, in bfloat16 the mean would be coarse
    x = jnp.asarray([[300.0, 400.0] * 50], dtype)
    got = RMSNorm(weight=jnp.ones((100,), jnp.float32), eps=1e-6)(x)
    assert got.dtype == jnp.float32
    rms = np.sqrt((np.asarray(x, np.float64) ** 2).mean())
    np.testing.assert_allclose(got, np.asarray(x, np.float64) / rms, rtol=1e-6)


def test_a_row_of_zeros_stays_zero_and_a_row_of_nan_stays_alone():
    x = jnp.asarray([[0.0, 0.0], [jnp.nan, 1.0], [3.0, 4.0]], jnp.float32)
    got = RMSNorm(weight=jnp.ones((2,), jnp.float32), eps=1e-6)(x)
    assert got[0].tolist() == [0.0, 0.0]
    assert np.isnan(got[1]).all() and np.isfinite(got[2]).all()


def test_groups_are_normed_each_by_itself():
    x = np.random.default_rng(1).normal(size=(2, 3, 8)) * np.repeat([1, 1e3], 4)
    weight = np.linspace(-2, 2, 8)
    with jax.enable_x64(True):
        norm = GroupedRMSNorm(weight=jnp.asarray(weight), eps=0.1, groups=2)
        got = norm(jnp.asarray(x))
    halves = [
        h / np.sqrt((h**2).mean(axis=-1, keepdims=True) + 0.1)
        for h in (x[..., :4], x[..., 4:])
    ]
    np.testing.assert_allclose(got, np.concatenate(halves, -1) * weight, rtol=1e-13)
