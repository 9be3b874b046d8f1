"""The Hopper kernel of skinny products, emulated, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, gpu_products
from pallas_kernels.skinny_matmul import api, gpu, gpu_body, gpu_plan, reference
from pallas_kernels.skinny_matmul.gpu_plan import Cut
from pallas_kernels.skinny_matmul.problems import KINDS, exactly, rows_of, weight_of
from pallas_kernels.skinny_matmul.reference import Weight
from pallas_kernels.skinny_matmul.specs import MODELS

pytestmark = pytest.mark.timeout(120)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)

CLOSE = {"rtol": 0, "atol": 2e-5}
"""Outputs are of the order of 1."""


def by_kernel(x: jax.Array, weight: Weight) -> np.ndarray:
    out = gpu.skinny_matmul(x, weight, interpret=compat.gpu_interpret())
    assert out.dtype == jnp.float32
    return np.asarray(out)


def check(count: int, kind: str, outputs: int, inputs: int) -> None:
    x, weight = rows_of(count, inputs), weight_of(kind, outputs, inputs)
    assert gpu_plan.refusal(count, weight) is None
    np.testing.assert_allclose(by_kernel(x, weight), exactly(x, weight), **CLOSE)


@emulated
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_multiplies_in_shares(kind):
    """The second of which has fewer steps."""
    assert gpu_plan.cut(256, 1152) == Cut(128, tiles=2, shares=2, each=5, steps=9)
    check(7, kind, 256, 1152)


@emulated
def test_a_weight_may_have_fewer_steps_than_are_on_their_way():
    assert gpu_plan.cut(128, 256) == Cut(128, tiles=1, shares=1, each=2, steps=2)
    check(16, "bfloat16", 128, 256)


@emulated
@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_a_rows_bits_do_not_depend_on_other_rows_or_on_how_many_there_are(kind):
    weight = weight_of(kind, 128, 1024)
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


def test_int4_lies_in_tiles_as_wide_as_a_step():
    """Plain rows pass every other test, and would be read from the wrong places."""
    tiling, swizzle = gpu_body._shared(jnp.int4, 3, 128, gpu_plan.INPUTS).transforms
    assert tiling.tiling == (8, gpu_plan.INPUTS)
    assert 2 * swizzle.swizzle == gpu_plan.INPUTS


@emulated
def test_every_int4_is_its_own_number():
    """All sixteen of them, which rows of one input each pick out; scales differ."""
    draw = np.random.default_rng(3)
    codes = draw.integers(-8, 8, (128, 256))
    codes[:16, 0] = np.arange(-8, 8)
    scale = draw.uniform(0.5, 2, (2, 128)).astype(np.float32)
    weight = Weight(jnp.asarray(codes, jnp.int4), jnp.asarray(scale))
    picked = [0, 1, 2, 7, 8, 9, 31, 32, 63, 64, 127, 128, 129, 191, 254, 255]
    got = by_kernel(jax.nn.one_hot(jnp.asarray(picked), 256), weight)
    wanted = codes * np.repeat(scale, 128, axis=0).T
    np.testing.assert_array_equal(got, wanted.T[picked].astype(np.float32))


@emulated
@pytest.mark.parametrize("group", [128, 384])
def test_int4_is_what_the_reference_says(group):
    """Groups of one step and of three, the second share of which begins inside one."""
    x, plain = rows_of(5, 1152), np.random.default_rng(8).normal(size=(128, 1152))
    weight = api.quantize_int4(jnp.asarray(plain / 1152**0.5), group)
    assert gpu_plan.refusal(5, weight) is None
    assert gpu_plan.cut(128, 1152).each == 5
    got = by_kernel(x, weight)
    np.testing.assert_allclose(got, reference.skinny_matmul(x, weight), **CLOSE)
    np.testing.assert_allclose(got, exactly(x, weight), **CLOSE)


@emulated
@pytest.mark.parametrize("turned", ["groups", "outputs"])
def test_int4_scales_of_other_groups_or_outputs_show(turned):
    x, weight = rows_of(4, 256), weight_of("int4", 128, 256)
    assert weight.scale is not None
    scale = weight.scale[::-1] if turned == "groups" else weight.scale[:, ::-1]
    wrong = by_kernel(x, weight._replace(scale=scale))
    assert np.abs(wrong - exactly(x, weight)).max() > 1e-2


@emulated
def test_a_group_that_is_not_finite_leaves_other_outputs_alone():
    x, weight = rows_of(4, 256), weight_of("int4", 128, 256)
    assert weight.scale is not None
    got = by_kernel(x, weight._replace(scale=weight.scale.at[1, 7].set(jnp.nan)))
    assert np.isnan(got[:, 7]).all()
    others = np.arange(128) != 7
    np.testing.assert_array_equal(got[:, others], by_kernel(x, weight)[:, others])


@emulated
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_overwritten_while_it_is_multiplied(kind):
    with gpu_products.watched():
        check(4, kind, 128, 896)


@emulated
@pytest.mark.usefixtures("refilled_too_early")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_overwritten_too_early_shows(kind):
    with (
        gpu_products.watched(),
        pytest.raises(compat.RaceError),
        compat.without_gpu_races(),
    ):
        check(4, kind, 128, 896)


@emulated
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_waited_for_shows(kind, monkeypatch):
    jax.clear_caches()  # what was traced whole would be run again
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *_: None)
    with pytest.raises(compat.RaceError), compat.without_gpu_races():
        check(4, kind, 128, 512)
    jax.clear_caches()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_real_models_are_taken_and_fill_the_device(name, kind):
    outputs, inputs = MODELS[name]
    grouped = (inputs // 128, outputs) if kind == "int4" else (outputs,)
    scale = jax.ShapeDtypeStruct(grouped, jnp.float32)
    values: Any = jax.ShapeDtypeStruct((outputs, inputs), jnp.dtype(kind))
    weight = Weight(values, None if kind == "bfloat16" else scale)  # pyright: ignore
    assert gpu_plan.refusal(16, weight) is None
    how = gpu_plan.cut(outputs, inputs)
    assert how.tiles * gpu_plan.OUTPUTS == outputs
    assert how.steps * gpu_plan.INPUTS == inputs
    assert 0 <= how.shares * how.each - how.steps < how.each
    assert 112 <= how.tiles * how.shares <= 264


def test_what_it_cannot_take_is_said():
    plain, coded = weight_of("bfloat16", 128, 256), weight_of("int8", 128, 256)

    def told(*weights: Weight, rows: int = 4) -> str:
        return str(gpu_plan.refusal(rows, *weights))

    assert "17 rows" in told(plain, rows=17)
    assert "int16" in told(Weight(jnp.ones((128, 256), jnp.int16)))
    assert "float32" in told(Weight(jnp.ones((128, 256))))
    assert "scales" in told(Weight(coded.values))
    assert "scales" in told(Weight(coded.values, jnp.ones((2, 128))))
    assert "multiples of 128" in told(Weight(plain.values[:120]))
    four = api.quantize_int4(jnp.ones((128, 768)))
    assert "scales" in told(Weight(four.values))
    assert "each group" in told(Weight(four.values, jnp.ones(128)))
    assert "each group" in told(Weight(four.values, jnp.ones((6, 128), jnp.int32)))
    narrow, odd = (api.quantize_int4(jnp.ones((128, 768)), of) for of in (64, 192))
    assert "groups of 64 inputs" in told(narrow)
    assert "groups of 192 inputs" in told(odd)


@emulated
@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2, 8, 15, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(128, 128), (384, 640), (256, 896), (640, 2048)])
def test_any_number_of_rows_and_weights_of_other_sizes(kind, count, size):
    check(count, kind, *size)
