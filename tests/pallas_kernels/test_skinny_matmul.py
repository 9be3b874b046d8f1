"""Skinny products: the TPU kernel, emulated, and the reference, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, platforms
from pallas_kernels.skinny_matmul import api, plan, reference, tpu
from pallas_kernels.skinny_matmul.problems import KINDS, exactly, rows_of, weight_of
from pallas_kernels.skinny_matmul.reference import Weight
from pallas_kernels.skinny_matmul.specs import MODELS

CLOSE = {"rtol": 0, "atol": 2e-5}
"""Outputs are of the order of 1."""


def gated(x: jax.Array, gate: Weight, up: Weight) -> np.ndarray:
    inner = exactly(x, gate)
    return inner / (1 + np.exp(-inner)) * exactly(x, up)


def check(x: jax.Array, weight: Weight, interpret: Any = True) -> None:
    got = tpu.skinny_matmul(x, weight, interpret=interpret)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), exactly(x, weight), **CLOSE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_multiplies(kind):
    weight = weight_of(kind, 640, 4096)
    cut = plan.blocks(weight)
    assert cut is not None and cut.inputs == 2048  # two steps along the inputs
    check(rows_of(7, 4096), weight)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_multiplies(kind):
    x, weight, up = (
        rows_of(3, 512),
        weight_of(kind, 256, 512),
        weight_of(kind, 256, 512, seed=4),
    )
    got = api.skinny_matmul(x, weight)
    np.testing.assert_allclose(np.asarray(got), exactly(x, weight), **CLOSE)
    got = api.skinny_gated(x, weight, up)
    np.testing.assert_allclose(np.asarray(got), gated(x, weight, up), **CLOSE)


@pytest.mark.timeout(120)
def test_gate_and_up_are_multiplied_at_once():
    x = rows_of(9, 2560)
    gate, up = weight_of("int4", 384, 2560), weight_of("int4", 384, 2560, seed=3)
    got = tpu.skinny_gated(x, gate, up, activation="silu", interpret=True)
    np.testing.assert_allclose(np.asarray(got), gated(x, gate, up), **CLOSE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_other_rows_or_on_how_many_there_are(kind):
    weight = weight_of(kind, 256, 2560)
    x, others = rows_of(16, 2560), rows_of(16, 2560, seed=9)
    others = others.at[5].set(jnp.nan)  # not even a row that is not finite
    wanted = np.asarray(tpu.skinny_matmul(x, weight, interpret=True))
    assert np.abs(wanted).min() > 0
    for count in (1, 8):
        got = tpu.skinny_matmul(x[:count], weight, interpret=True)
        np.testing.assert_array_equal(np.asarray(got), wanted[:count])
    mixed = jnp.concatenate([others[:6], x[6:7], others[7:]])
    got = np.asarray(tpu.skinny_matmul(mixed, weight, interpret=True))
    np.testing.assert_array_equal(got[6], wanted[6])
    assert np.isnan(got[5]).all()


def test_scales_of_other_groups_show():
    x, weight = rows_of(4, 1024), weight_of("int4", 256, 1024)
    assert weight.scale is not None
    wrong = Weight(weight.values, weight.scale[::-1])
    got = tpu.skinny_matmul(x, wrong, interpret=True)
    assert np.abs(np.asarray(got) - exactly(x, weight)).max() > 1e-2


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_multiplies_any_number_of_rows(kind, count):
    check(rows_of(count, 1024), weight_of(kind, 384, 1024))


# outputs, inputs, group, and steps along both
SIZES = {
    "one vector": (128, 128, 128, (1, 1)),
    "a prime number of vectors": (13 * 128, 7 * 128, 128, (1, 1)),
    "four steps each way": (8192, 8192, 128, (4, 4)),
    "small groups": (256, 1024, 32, (1, 1)),
    "one group": (256, 1024, 1024, (1, 1)),
    "two groups": (256, 512, 256, (1, 1)),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SIZES)
def test_the_kernel_multiplies_weights_of_other_sizes(name):
    outputs, inputs, group, steps = SIZES[name]
    weight = weight_of("int4", outputs, inputs, group)
    cut = plan.blocks(weight)
    assert cut is not None
    assert (outputs // cut.outputs >= steps[0]) and inputs // cut.inputs == steps[1]
    check(rows_of(8, inputs), weight)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-3-8b-qkv", "qwen3-4b-down"])
def test_the_kernel_multiplies_the_weights_of_real_models(name, kind):
    check(rows_of(8, MODELS[name][1]), weight_of(kind, *MODELS[name]))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_steps_do_not_depend_on_their_order_or_on_what_memory_holds(seed):
    interpret = compat.tpu_interpret(detect_races=True, seed=seed)
    with compat.without_races():
        check(rows_of(8, 4096), weight_of("int4", 2048, 4096), interpret)


def on_tpu(x: Any, weight: Any, **kind: Any) -> str:
    platforms.forget_choices()
    jax.eval_shape(lambda x, w: api.skinny_matmul(x, w, **kind), x, weight)
    (choice,) = platforms.choices()
    return choice.on("tpu")


def test_what_runs_is_said():
    x = rows_of(8, 256)
    plain, coded = weight_of("bfloat16", 128, 256), weight_of("int4", 128, 256)
    assert on_tpu(x, coded) == "kernel"
    assert on_tpu(x, plain) == "reference"  # XLA reads it once by itself
    assert on_tpu(x, plain, invariant=True) == "kernel"
    assert "float32" in on_tpu(x, Weight(x[:, :]), invariant=True)
    with pytest.raises(ValueError, match="1 to 16 rows"):
        on_tpu(rows_of(17, 256), coded, implementation="require")
    odd = api.quantize_int4(jnp.ones((120, 256)))
    with pytest.raises(platforms.NoKernelError, match="whole vectors"):
        on_tpu(x, odd, implementation="require")


@pytest.mark.parametrize("outputs", [1, 256])
def test_a_gate_and_an_up_weight_of_other_outputs_are_refused_by_name(outputs):
    """One output would be multiplied with all of the other's."""
    gate, up = weight_of("bfloat16", 128, 256), weight_of("bfloat16", outputs, 256)
    with pytest.raises(ValueError, match=f"128 and {outputs} outputs of gate and up"):
        api.skinny_gated(rows_of(2, 256), gate, up)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_weights_of_real_models_are_cut_into_blocks_of_fair_size(name, kind, count):
    outputs, inputs = MODELS[name]
    scale = {
        "bfloat16": None,
        "int8": jax.ShapeDtypeStruct((outputs,), jnp.float32),
        "int4": jax.ShapeDtypeStruct((inputs // 128, outputs), jnp.float32),
    }[kind]
    weight = Weight(jax.ShapeDtypeStruct((outputs, inputs), jnp.dtype(kind)), scale)
    assert plan.refusal(reference.ROWS, *[weight] * count) is None
    cut = plan.blocks(weight, count)
    assert cut is not None
    assert outputs % cut.outputs == 0 and inputs % cut.inputs == 0
    numbers = cut.outputs * cut.inputs * count
    assert numbers * plan._bits(weight) / 8 <= plan.BLOCK_BYTES
