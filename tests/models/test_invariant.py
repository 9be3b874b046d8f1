"""Invariant mode: the same bits at every width, and refused where it cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import platforms
from specjax.models.build import WeightType
from specjax.models.invariant import NotInvariant, check_invariant, invariant
from specjax.models.linear import Linear
from specjax.testing.toy_mixers import toy_attentions
from specjax.testing.toys import toy_hybrid, toy_llama

TOYS = {"llama": toy_llama, "hybrid": toy_hybrid}


def test_windows_of_any_width_give_the_same_bits_in_bfloat16():
    decoder = toy_hybrid(weights=WeightType.BFLOAT16).decoder
    check_invariant(invariant(decoder), (1, 9), tokens=20)


@pytest.mark.full
@pytest.mark.parametrize("toy", list(TOYS))
@pytest.mark.parametrize("weights", [WeightType.FLOAT32, WeightType.BFLOAT16])
def test_every_width_gives_the_same_bits(toy, weights):
    decoder = TOYS[toy](weights=weights).decoder
    check_invariant(invariant(decoder), (1, 2, 3, 5, 9, 16, 20), tokens=45)


def test_without_the_mode_bits_differ_and_the_check_sees_it():
    with pytest.raises(NotInvariant, match="not the same bits"):
        check_invariant(toy_llama().decoder, (1, 4), tokens=12)


def test_mixtures_and_indexers_are_refused_by_name():
    decoder = toy_attentions().decoder
    with pytest.raises(NotInvariant, match="block 1 is a mixture of experts"):
        invariant(decoder)
    without = [
        b.replace(feedforward=None) if i == 1 else b
        for i, b in enumerate(decoder.blocks)
    ]
    with pytest.raises(NotInvariant, match="block 2 attends to the keys"):
        invariant(decoder.replace(blocks=tuple(without)))


def test_on_a_tpu_tiles_are_multiplied_by_the_kernel_with_one_order_of_sums():
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(3, 256)), jnp.float32)
    weight = jnp.asarray(draw.normal(size=(128, 256)), jnp.bfloat16)
    platforms.forget_choices()
    tiled = jax.jit(lambda x: Linear(weight, tile=16)(x))(x)
    (choice,) = platforms.choices()
    assert (choice.operation, choice.on("tpu")) == ("skinny_matmul", "kernel")
    divided = jax.jit(lambda x: Linear(weight, tile=16, divided=True)(x))(x)
    assert len(platforms.choices()) == 1  # a kernel cannot be divided among devices
    np.testing.assert_array_equal(np.asarray(tiled), np.asarray(divided))
    plain = Linear(weight)(jnp.pad(x, [(0, 13), (0, 0)]))[:3]
    np.testing.assert_array_equal(np.asarray(tiled), np.asarray(plain))
