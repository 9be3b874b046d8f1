"""Activations, and the MLPs of two and of three layers."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import Activation, GatedMLPConfig, PlainMLPConfig
from specjax.models.feedforward.activations import activate
from specjax.models.feedforward.gated_mlp import GatedMLP
from specjax.models.feedforward.plain_mlp import PlainMLP
from specjax.models.linear import Linear

D, SIZE = 6, 10
X = np.random.default_rng(0).normal(size=(2, 3, D)) * 2


def by_definition(name, x):
    if name == "relu2":
        return np.maximum(x, 0) ** 2
    if name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + np.tanh(inner))
    sigmoid = 1 / (1 + np.exp(-x))
    return x * sigmoid if name == "silu" else sigmoid


def layers(**shapes):
    draw = np.random.default_rng(1)
    weights = {name: draw.normal(size=shape) for name, shape in shapes.items()}
    biases = {name: draw.normal(size=shape[0]) for name, shape in shapes.items()}
    made = {
        name: Linear(weight=jnp.asarray(weights[name]), bias=jnp.asarray(biases[name]))
        for name in shapes
    }

    def apply(name, x):
        return x @ weights[name].T + biases[name]

    return made, apply


@pytest.mark.parametrize("name", get_args(Activation))
def test_activations_are_their_definitions(name):
    with jax.enable_x64(True):
        got = activate(name, jnp.asarray(X))
        assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, by_definition(name, X), rtol=1e-12, atol=1e-15)
    assert np.isnan(activate(name, jnp.asarray([jnp.nan], jnp.float32))).all()


@pytest.mark.parametrize("name", get_args(Activation))
def test_a_gated_mlp_is_its_formula(name):
    with jax.enable_x64(True):
        made, apply = layers(gate=(SIZE, D), up=(SIZE, D), down=(D, SIZE))
        config = GatedMLPConfig(size=SIZE, bias=True, activation=name)
        got = GatedMLP(config=config, **made)(jnp.asarray(X))
    hidden = by_definition(name, apply("gate", X)) * apply("up", X)
    np.testing.assert_allclose(got, apply("down", hidden), rtol=1e-11)


@pytest.mark.parametrize("name", get_args(Activation))
def test_a_plain_mlp_is_its_formula(name):
    with jax.enable_x64(True):
        made, apply = layers(up=(SIZE, D), down=(D, SIZE))
        config = PlainMLPConfig(size=SIZE, bias=True, activation=name)
        got = PlainMLP(config=config, **made)(jnp.asarray(X))
    hidden = by_definition(name, apply("up", X))
    np.testing.assert_allclose(got, apply("down", hidden), rtol=1e-11)


def test_rows_that_are_not_valid_change_nothing():
    made, _ = layers(gate=(SIZE, D), up=(SIZE, D), down=(D, SIZE))
    gated = GatedMLP(config=GatedMLPConfig(size=SIZE), **made)
    plain = PlainMLP(config=PlainMLPConfig(size=SIZE), up=made["up"], down=made["down"])
    x = jnp.asarray(X, jnp.float32)
    valid = jnp.asarray([[True, False, True], [False, True, True]])
    for layer in (gated, plain):
        np.testing.assert_array_equal(layer(x, valid), layer(x))
