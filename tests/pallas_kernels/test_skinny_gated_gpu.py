"""The Hopper kernel of a gate and an up weight at once, emulated, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, gpu_products
from pallas_kernels.skinny_matmul import api, gpu, gpu_plan
from pallas_kernels.skinny_matmul.gpu_plan import Cut
from pallas_kernels.skinny_matmul.problems import KINDS, exactly, rows_of, weight_of
from pallas_kernels.skinny_matmul.reference import ACTIVATIONS, Activation, Weight
from pallas_kernels.skinny_matmul.specs import MODELS

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
    ),
]

CLOSE = {"rtol": 0, "atol": 4e-5}
"""Outputs are of the order of 1, and products of two sums."""

ONE, TWO = 256, 1152
"""Inputs of one share, and of two, of which the second has fewer steps."""

LONG = 896
"""One share of more steps than are on their way at once."""

each_way = pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("bfloat16", TWO),
        ("int8", ONE),
        ("int4", TWO),
        pytest.param("bfloat16", ONE, marks=pytest.mark.full),
        pytest.param("int8", TWO, marks=pytest.mark.full),
        pytest.param("int4", ONE, marks=pytest.mark.full),
    ],
)


def pair(kind: str, outputs: int, inputs: int) -> tuple[Weight, Weight]:
    return weight_of(kind, outputs, inputs), weight_of(kind, outputs, inputs, seed=4)


def by_kernel(
    x: jax.Array, gate: Weight, up: Weight, activation: Activation = "silu"
) -> np.ndarray:
    out = gpu.skinny_gated(
        x, gate, up, activation=activation, interpret=compat.gpu_interpret()
    )
    assert out.dtype == jnp.float32
    return np.asarray(out)


def wanted(
    x: jax.Array, gate: Weight, up: Weight, activation: Activation = "silu"
) -> np.ndarray:
    inner = exactly(x, gate)
    if activation == "silu":
        inner = inner / (1 + np.exp(-inner))
    else:
        cubed = (2 / np.pi) ** 0.5 * (inner + 0.044715 * inner**3)
        inner = inner * (1 + np.tanh(cubed)) / 2
    return inner * exactly(x, up)


def check(count: int, kind: str, outputs: int, inputs: int) -> None:
    x, weights = rows_of(count, inputs), pair(kind, outputs, inputs)
    assert gpu_plan.refusal(count, *weights) is None
    np.testing.assert_allclose(by_kernel(x, *weights), wanted(x, *weights), **CLOSE)


def calls(function: Any, *arguments: Any) -> list[str]:
    """Names of the kernels in a program."""
    text = str(jax.make_jaxpr(function)(*arguments))
    return [name for name in ("skinny_gated", "skinny_matmul") if f"={name}" in text]


@pytest.mark.parametrize("inputs", [LONG, TWO])
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_are_multiplied_at_once(kind, inputs):
    check(7, kind, 256, inputs)


def test_what_is_cut_is_half_as_tall():
    assert gpu_plan.cut(256, LONG, 2) == Cut(64, tiles=4, shares=1, each=7, steps=7)
    assert gpu_plan.cut(256, TWO, 2) == Cut(64, tiles=4, shares=2, each=5, steps=9)


@pytest.mark.parametrize("inputs", [128, TWO])
def test_the_other_activation(inputs):
    x, weights = rows_of(16, inputs), pair("int8", 128, inputs)
    got = by_kernel(x, *weights, activation="gelu_tanh")
    np.testing.assert_allclose(got, wanted(x, *weights, "gelu_tanh"), **CLOSE)


@each_way
def test_sums_have_the_bits_of_two_products(kind, inputs):
    """Which are cut into as many shares here."""
    assert gpu_plan.cut(128, inputs).shares == gpu_plan.cut(128, inputs, 2).shares
    x, weights = rows_of(5, inputs), pair(kind, 128, inputs)
    gate, up = (
        gpu.skinny_matmul(x, weight, interpret=compat.gpu_interpret())
        for weight in weights
    )
    each = jax.jit(lambda gate, up: ACTIVATIONS["silu"](gate) * up)(gate, up)
    np.testing.assert_array_equal(by_kernel(x, *weights), np.asarray(each))


@each_way
def test_a_rows_bits_do_not_depend_on_other_rows_or_on_how_many_there_are(kind, inputs):
    weights = pair(kind, 128, inputs)
    x, others = rows_of(16, inputs), rows_of(16, inputs, seed=9)
    all_rows = by_kernel(x, *weights)
    assert np.abs(all_rows).min() > 0
    np.testing.assert_array_equal(by_kernel(x[:3], *weights), all_rows[:3])
    others = others.at[5].set(jnp.nan)  # not even a row that is not finite
    mixed = by_kernel(jnp.concatenate([others[:6], x[6:7], others[7:]]), *weights)
    np.testing.assert_array_equal(mixed[6], all_rows[6])
    assert np.isnan(mixed[5]).all()


@each_way
def test_gate_and_up_exchanged_show(kind, inputs):
    x, (gate, up) = rows_of(4, inputs), pair(kind, 128, inputs)
    assert np.abs(by_kernel(x, up, gate) - wanted(x, gate, up)).max() > 1e-2


@pytest.mark.parametrize(
    ("kind", "inputs"), [("int8", ONE), ("int8", TWO), ("int4", ONE)]
)
def test_scales_of_the_other_weight_or_of_other_outputs_show(kind, inputs):
    x, (gate, up) = rows_of(4, inputs), pair(kind, 128, inputs)
    assert gate.scale is not None
    exchanged = gate._replace(scale=up.scale), up._replace(scale=gate.scale)
    turned = gate._replace(scale=gate.scale[..., ::-1]), up
    for wrong in (exchanged, turned):
        assert np.abs(by_kernel(x, *wrong) - wanted(x, gate, up)).max() > 1e-2


@pytest.mark.parametrize("inputs", [ONE, TWO])
def test_an_output_that_is_not_finite_leaves_others_alone(inputs):
    x, (gate, up) = rows_of(4, inputs), pair("bfloat16", 128, inputs)
    whole = by_kernel(x, gate, up)
    got = by_kernel(
        x,
        Weight(gate.values.at[7, -1].set(jnp.nan)),
        Weight(up.values.at[64, 0].set(jnp.nan)),
    )
    harmed = np.isin(np.arange(128), [7, 64])
    assert np.isnan(got[:, harmed]).all()
    np.testing.assert_array_equal(got[:, ~harmed], whole[:, ~harmed])


def test_weights_that_differ_are_two_products():
    x, gate = rows_of(4, 384), weight_of("int8", 128, 384)
    wide = api.quantize_int4(jnp.asarray(exactly(jnp.eye(384), gate).T), 384)
    narrow = weight_of("int4", 128, 384, seed=4)

    def gated(x: jax.Array, gate: Weight, up: Weight) -> jax.Array:
        interpret = compat.gpu_interpret()
        return gpu.skinny_gated(x, gate, up, activation="silu", interpret=interpret)

    assert calls(gated, x, gate, gate) == ["skinny_gated"]
    for weights in ((gate, narrow), (wide, narrow)):
        assert calls(gated, x, *weights) == ["skinny_matmul"]
        got = by_kernel(x, *weights)
        np.testing.assert_allclose(got, wanted(x, *weights), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_overwritten_while_it_is_multiplied(kind):
    with gpu_products.watched():
        check(4, kind, 128, LONG)


@pytest.mark.usefixtures("refilled_too_early")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_overwritten_too_early_shows(kind):
    with (
        gpu_products.watched(),
        pytest.raises(compat.RaceError),
        compat.without_gpu_races(),
    ):
        check(4, kind, 128, LONG)


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("up")])
def test_weights_of_real_models_fill_the_device(name):
    outputs, inputs = MODELS[name]
    how = gpu_plan.cut(outputs, inputs, 2)
    assert how.tiles * how.tall == outputs and how.steps * gpu_plan.INPUTS == inputs
    assert 112 <= how.tiles * how.shares <= 272


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(128, 128), (384, 640), (256, 1536), (640, 2048)])
def test_any_number_of_rows_and_weights_of_other_sizes(kind, count, size):
    check(count, kind, *size)
