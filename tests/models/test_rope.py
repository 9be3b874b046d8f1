"""Rotary positions against their definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.rope import Llama3Scaling, Rope, rotate

LLAMA3 = Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def test_frequencies_are_powers_of_theta():
    got = Rope(theta=100.0, dims=6).frequencies()
    np.testing.assert_allclose(got, [1.0, 100.0 ** (-1 / 3), 100.0 ** (-2 / 3)])
    assert got.dtype == np.float64


def test_llama3_scaling_pair_by_pair():
    """Published form: by wavelength kept, divided, or blended between."""
    dims, theta = 128, 500000.0
    got = Rope(theta, dims, LLAMA3).frequencies()
    kinds = set()
    for i, frequency in enumerate(got):
        plain = theta ** (-2 * i / dims)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4.0:
            kind, wanted = "kept", plain
        elif wavelength > 8192 / 1.0:
            kind, wanted = "divided", plain / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            kind, wanted = "blended", (1 - smooth) * plain / 8.0 + smooth * plain
        kinds.add(kind)
        assert frequency == pytest.approx(wanted, rel=1e-14)
    assert kinds == {"kept", "divided", "blended"}


@pytest.mark.parametrize("dims", [8, 4, 2])
def test_pairs_turn_by_position_and_the_rest_stays(dims):
    rope, positions = Rope(theta=50.0, dims=dims), np.array([[0, 1, 7], [5, 5, 300]])
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 8))
    with jax.enable_x64(True):
        cos, sin = rope.tables(jnp.asarray(positions, jnp.int32), jnp.dtype("float64"))
        got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    half = dims // 2
    for i in range(half):
        angle = positions * 50.0 ** (-2 * i / dims)
        pair = x[..., i] + 1j * x[..., i + half]
        turned = pair * np.exp(1j * angle)[:, :, None]
        np.testing.assert_allclose(got[..., i], turned.real, atol=1e-12)
        np.testing.assert_allclose(got[..., i + half], turned.imag, atol=1e-12)
    np.testing.assert_array_equal(got[..., dims:], x[..., dims:])


def test_products_of_rotated_rows_depend_on_the_distance_alone():
    rope = Rope(theta=10000.0, dims=8)
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8))

    def score(at: int, other: int) -> float:
        tables = [
            rope.tables(jnp.full((1, 1), p, jnp.int32), jnp.dtype("float64"))
            for p in (at, other)
        ]
        a, b = (
            rotate(jnp.asarray(x), *table)
            for x, table in zip((q, k), tables, strict=True)
        )
        return float((a * b).sum())

    with jax.enable_x64(True):
        assert score(3, 0) == pytest.approx(score(103, 100), rel=1e-12)
        assert score(3, 0) != pytest.approx(score(0, 3), rel=1e-3)
