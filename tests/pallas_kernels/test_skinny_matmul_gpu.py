"""The Hopper kernel of skinny products, emulated, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.skinny_matmul import api, gpu
from pallas_kernels.skinny_matmul.reference import Weight
from pallas_kernels.skinny_matmul.specs import MODELS

pytestmark = pytest.mark.timeout(120)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)

CLOSE = {"rtol": 0, "atol": 2e-5}
"""Outputs are of the order of 1."""

KINDS = ["bfloat16", "int8"]


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    draw = np.random.default_rng(seed)
    plain = draw.normal(size=(outputs, inputs)).astype(np.float32) / inputs**0.5
    if kind == "bfloat16":
        return Weight(jnp.asarray(plain, jnp.bfloat16))
    scale = np.abs(plain).max(axis=1) / 127
    codes = np.round(plain / scale[:, None]).astype(np.int8)
    return Weight(jnp.asarray(codes), jnp.asarray(scale))


def rows_of(count: int, inputs: int, seed: int = 1) -> jax.Array:
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.normal(size=(count, inputs)), jnp.float32)


def exactly(x: jax.Array, weight: Weight) -> np.ndarray:
    """In float64, weights multiplied out."""
    values = np.asarray(weight.values.astype(jnp.float32), np.float64)
    if weight.scale is not None:
        values = values * np.asarray(weight.scale, np.float64)[:, None]
    return np.asarray(x.astype(jnp.bfloat16), np.float64) @ values.T


def by_kernel(x: jax.Array, weight: Weight) -> np.ndarray:
    out = gpu.skinny_matmul(x, weight, interpret=compat.gpu_interpret())
    assert out.dtype == jnp.float32
    return np.asarray(out)


def check(count: int, kind: str, outputs: int, inputs: int) -> None:
    x, weight = rows_of(count, inputs), weight_of(kind, outputs, inputs)
    assert gpu.refusal(count, weight) is None
    np.testing.assert_allclose(by_kernel(x, weight), exactly(x, weight), **CLOSE)


@emulated
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_multiplies_in_shares(kind):
    """The second of which has fewer steps."""
    assert gpu.cut(256, 1152) == gpu.Cut(tiles=2, shares=2, each=5, steps=9)
    check(7, kind, 256, 1152)


@emulated
def test_a_weight_may_have_fewer_steps_than_are_on_their_way():
    assert gpu.cut(128, 256) == gpu.Cut(tiles=1, shares=1, each=2, steps=2)
    check(16, "bfloat16", 128, 256)


@emulated
def test_gate_and_up_are_multiplied():
    x, gate, up = (
        rows_of(3, 256),
        weight_of("int8", 128, 256),
        weight_of("int8", 128, 256, seed=4),
    )
    got = gpu.skinny_gated(
        x, gate, up, activation="silu", interpret=compat.gpu_interpret()
    )
    inner = exactly(x, gate)
    wanted = inner / (1 + np.exp(-inner)) * exactly(x, up)
    np.testing.assert_allclose(np.asarray(got), wanted, **CLOSE)


@emulated
def test_a_rows_bits_do_not_depend_on_other_rows_or_on_how_many_there_are():
    weight = weight_of("bfloat16", 128, 1024)
    x, others = rows_of(16, 1024), rows_of(16, 1024, seed=9)
    wanted = by_kernel(x, weight)
    assert np.abs(wanted).min() > 0
    np.testing.assert_array_equal(by_kernel(x[:1], weight), wanted[:1])
    others = others.at[5].set(jnp.nan)  # not even a row that is not finite
    mixed = by_kernel(jnp.concatenate([others[:6], x[6:7], others[7:]]), weight)
    np.testing.assert_array_equal(mixed[6], wanted[6])
    assert np.isnan(mixed[5]).all()


@emulated
def test_scales_of_other_outputs_show():
    x, weight = rows_of(4, 256), weight_of("int8", 128, 256)
    assert weight.scale is not None
    wrong = by_kernel(x, Weight(weight.values, weight.scale[::-1]))
    assert np.abs(wrong - exactly(x, weight)).max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_real_models_are_taken_and_fill_the_device(name, kind):
    outputs, inputs = MODELS[name]
    scale = jax.ShapeDtypeStruct((outputs,), jnp.float32)
    values: Any = jax.ShapeDtypeStruct((outputs, inputs), jnp.dtype(kind))
    weight = Weight(values, None if kind == "bfloat16" else scale)  # pyright: ignore
    assert gpu.refusal(16, weight) is None
    how = gpu.cut(outputs, inputs)
    assert how.tiles * gpu.OUTPUTS == outputs
    assert how.steps * gpu.INPUTS == inputs
    assert 0 <= how.shares * how.each - how.steps < how.each
    assert 112 <= how.tiles * how.shares <= 264


def test_what_it_cannot_take_is_said():
    plain, coded = weight_of("bfloat16", 128, 256), weight_of("int8", 128, 256)

    def told(*weights: Weight, rows: int = 4) -> str:
        return str(gpu.refusal(rows, *weights))

    assert "17 rows" in told(plain, rows=17)
    assert "int4" in told(api.quantize_int4(jnp.ones((128, 256))))
    assert "float32" in told(Weight(jnp.ones((128, 256))))
    assert "scales" in told(Weight(coded.values))
    assert "scales" in told(Weight(coded.values, jnp.ones((2, 128))))
    assert "multiples of 128" in told(Weight(plain.values[:120]))


@emulated
@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2, 8, 15, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(128, 128), (384, 640), (256, 896), (640, 2048)])
def test_any_number_of_rows_and_weights_of_other_sizes(kind, count, size):
    check(count, kind, *size)
