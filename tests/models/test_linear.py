"""Linear layers: float products, int8 rounding and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.models.linear import (
    Linear,
    StackedLinear,
    accumulator,
    fewest_rows,
    quantize_linear,
    quantize_rows,
)

OUT, IN = 6, 16
DRAW = np.random.default_rng(0)
WEIGHT = DRAW.normal(size=(OUT, IN)).astype(np.float32)
X = DRAW.normal(size=(2, 3, IN)).astype(np.float32)
BIAS = DRAW.normal(size=OUT).astype(np.float32)

quantize = jax.jit(quantize_rows)
apply = jax.jit(lambda layer, x: layer(x))


@pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_float_product_is_exact_for_its_rounded_operands(dtype, bias):
    weight, x = jnp.asarray(WEIGHT, dtype), jnp.asarray(X, jnp.float32)
    offset = None if bias is None else jnp.asarray(bias)
    got = apply(Linear(weight=weight, bias=offset), x)
    assert got.dtype == jnp.float32 and got.shape == (2, 3, OUT)
    rounded = np.asarray(x.astype(dtype), np.float64)
    wanted = rounded @ np.asarray(weight, np.float64).T
    wanted = wanted + (0 if bias is None else bias)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_float64_weights_multiply_in_float64():
    with jax.enable_x64(True):
        layer = Linear(weight=jnp.asarray(WEIGHT, jnp.float64))
        got = layer(jnp.asarray(X, jnp.float64))
        assert got.dtype == jnp.float64
    wanted = X.astype(np.float64) @ WEIGHT.astype(np.float64).T
    np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("int8", "int32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_products_are_summed_in_a_wider_type(dtype, wide):
    assert accumulator(jnp.dtype(dtype)) == np.dtype(wide)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=12, max_size=12))
@settings(max_examples=60)
def test_quantised_rows_are_off_by_at_most_half_a_step(values):
    x = np.array(values, np.float32).reshape(3, 4)
    codes, scale = (np.asarray(y) for y in quantize(jnp.asarray(x)))
    assert codes.dtype == np.int8 and np.abs(codes.astype(int)).max() <= 127
    back = codes.astype(np.float64) * scale[:, None]
    # (subnormal numbers are flushed to zero)
    assert (np.abs(back - x) <= scale[:, None] * 0.5001 + 1e-37).all()
    for row in range(3):
        largest = np.abs(x[row]).max()
        if largest > 1e-30:
            assert np.abs(codes[row].astype(int)).max() == 127
            assert scale[row] == pytest.approx(largest / 127, rel=1e-6)


def test_a_row_of_zeros_has_scale_1_and_codes_0():
    codes, scale = quantize(jnp.zeros((2, 4), jnp.float32))
    assert scale.tolist() == [1.0, 1.0] and not codes.any()


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3])
def test_a_row_that_is_not_finite_flags_itself_and_no_other(rubbish, place):
    x = DRAW.normal(size=(3, 4)).astype(np.float32)
    clean = quantize(jnp.asarray(x))
    x[1, place] = rubbish
    codes, scale = quantize(jnp.asarray(x))
    assert not np.isfinite(scale[1])
    for got, wanted in zip((codes, scale), clean, strict=True):
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[2], wanted[2])


def test_an_int8_product_is_exact_for_its_codes():
    layer = quantize_linear(
        Linear(weight=jnp.asarray(WEIGHT), bias=jnp.asarray(BIAS), axes=("o", "i"))
    )
    assert layer.weight.dtype == jnp.int8 and layer.axes == ("o", "i")
    got = apply(layer, jnp.asarray(X))
    assert got.dtype == jnp.float32
    assert layer.scale is not None
    codes, scale = quantize(jnp.asarray(X.reshape(-1, IN)))
    products = np.asarray(codes, np.int64) @ np.asarray(layer.weight, np.int64).T
    wanted = products * np.asarray(scale, np.float64)[:, None] * layer.scale + BIAS
    np.testing.assert_allclose(got.reshape(-1, OUT), wanted, rtol=1e-5, atol=1e-5)
    # and near the float product: each factor is within half a step of its own
    exact = X.reshape(-1, IN) @ WEIGHT.T + BIAS
    steps = np.asarray(scale)[:, None] * np.abs(WEIGHT).sum(axis=1)
    steps = steps + np.abs(X.reshape(-1, IN)).sum(axis=1)[:, None] * layer.scale
    assert (np.abs(wanted - exact) <= 0.51 * steps + 1e-3).all()


def test_an_int8_product_of_a_nan_row_is_nan_there_and_only_there():
    layer = quantize_linear(Linear(weight=jnp.asarray(WEIGHT)))
    x = X.copy()
    clean = apply(layer, jnp.asarray(x))
    x[1, 1, 3] = np.nan
    got = np.array(apply(layer, jnp.asarray(x)))
    assert np.isnan(got[1, 1]).all()
    got[1, 1] = clean[1, 1]
    np.testing.assert_array_equal(got, clean)


def test_rows_wanted_by_the_fast_products():
    wanted = {"float32": 1, "bfloat16": 3, "int8": 2, "float64": 1}
    assert {name: fewest_rows(jnp.dtype(name)) for name in wanted} == wanted


def stack_of(dtype, *, bias):
    """Three experts, and their layers one by one."""
    draw = np.random.default_rng(1)
    layers = []
    for _ in range(3):
        offset = jnp.asarray(draw.normal(size=OUT), jnp.float32) if bias else None
        weight = jnp.asarray(draw.normal(size=(OUT, IN)), jnp.float32)
        layer = Linear(weight=weight, bias=offset, axes=("o", "i"))
        typed = layer.replace(weight=weight.astype(dtype))
        layers.append(quantize_linear(layer) if dtype == jnp.int8 else typed)
    leaves = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    axes = ("expert", "o", "i")
    return StackedLinear(leaves.weight, leaves.scale, leaves.bias, axes=axes), layers


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_stack_is_its_layers_one_by_one(dtype, bias):
    stack, layers = stack_of(dtype, bias=bias)
    assert stack.result_dtype == jnp.float32
    experts = np.array([0, 0, 2, 2, 2, 2], np.int32)
    x = jnp.asarray(X.reshape(-1, IN))
    each = jax.jit(StackedLinear.each)(stack, x, jnp.asarray(experts))
    grouped = jax.jit(StackedLinear.grouped)(stack, x, jnp.asarray(experts))
    assert each.dtype == grouped.dtype == jnp.float32
    for expert, layer in enumerate(layers):
        alone = jax.jit(lambda s, e: s.at(e))(stack, jnp.int32(expert))
        assert alone.axes == ("o", "i")
        jax.tree.map(np.testing.assert_array_equal, alone, layer)
        own = experts == expert
        wanted = np.asarray(apply(layer, x))[own]
        np.testing.assert_allclose(each[own], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grouped[own], wanted, rtol=1e-5, atol=1e-5)


def test_experts_out_of_range_are_brought_into_it_or_left_out():
    stack, layers = stack_of(jnp.float32, bias=False)
    x = jnp.asarray(X.reshape(-1, IN))
    beyond = jnp.asarray([0, 1, 2, 3, 3, 3], jnp.int32)
    for product in (StackedLinear.each, StackedLinear.grouped):
        y = np.asarray(jax.jit(product)(stack, x, beyond))
        for row, layer in enumerate(layers):
            np.testing.assert_allclose(y[row], apply(layer, x)[row], rtol=1e-5)
    np.testing.assert_array_equal(stack.at(jnp.int32(7)).weight, layers[2].weight)


def test_a_stack_of_float64_multiplies_in_float64():
    with jax.enable_x64(True):
        stack = StackedLinear(weight=jnp.asarray(WEIGHT[None], jnp.float64))
        assert stack.result_dtype == jnp.float64
        x = jnp.asarray(X.reshape(-1, IN), jnp.float64)
        zeros = jnp.zeros((6,), jnp.int32)
        for product in (stack.each, stack.grouped):
            y = product(x, zeros)
            assert y.dtype == jnp.float64
            wanted = x @ WEIGHT.astype(np.float64).T
            np.testing.assert_allclose(y, wanted, rtol=1e-13, atol=1e-13)
