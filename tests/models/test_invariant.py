"""Invariant mode: the same bits at every width, and refused where it cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import platforms
from specjax.models.build import WeightType
from specjax.models.config import GatedMLPConfig
from specjax.models.feedforward.gated_mlp import GatedMLP
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


def gated(activation: str = "silu", **changes: object) -> GatedMLP:
    """A tiled one of bfloat16, with changes to its gate."""
    draw = np.random.default_rng(1)

    def linear(out: int, of: int) -> Linear:
        weight = jnp.asarray(draw.normal(size=(out, of)) / of**0.5, jnp.bfloat16)
        return Linear(weight, tile=16)

    gate, up, down = linear(128, 256), linear(128, 256), linear(256, 128)
    config = GatedMLPConfig(size=128, activation=activation)  # pyright: ignore
    return GatedMLP(config, gate=gate.replace(**changes), up=up, down=down)


_run = jax.jit(lambda mlp, x: mlp(x))
# 19 rows: one tile, and three rows of another
_ROWS = np.random.default_rng(2).normal(size=(1, 19, 256)).astype(np.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_are_multiplied_by_one_kernel_with_the_bits_of_two(activation):
    platforms.forget_choices()
    together = np.asarray(_run(gated(activation), _ROWS))
    called = {choice.operation for choice in platforms.choices()}
    assert called == {"skinny_gated", "skinny_matmul"}
    apart = np.asarray(_run(gated(activation, divided=True), _ROWS))
    np.testing.assert_array_equal(together, apart)
    for width in (1, 3, 16):
        alone = np.asarray(_run(gated(activation), _ROWS[:, :width]))
        np.testing.assert_array_equal(together[:, :width], alone)


@pytest.mark.parametrize(
    ("activation", "changes"),
    [
        ("sigmoid", {}),
        ("silu", {"bias": jnp.ones((128,), jnp.float32)}),
        ("silu", {"divided": True}),
        ("silu", {"tile": None}),
    ],
)
def test_what_that_kernel_does_not_take_is_two_products(activation, changes):
    jax.clear_caches()  # what is traced already enters no record
    platforms.forget_choices()
    _run(gated(activation, **changes), _ROWS)
    called = {choice.operation for choice in platforms.choices()}
    assert called == {"skinny_matmul"}
