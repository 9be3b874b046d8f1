"""Activation functions, alike for every row of a batch, and by name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.elementwise import whole
from specjax.models.config import Activation


def relu2(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Relu squared (So et al., 2109.08668)."""
    positive = jax.nn.relu(x)
    return positive * positive


def silu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``x sigmoid(x)``."""
    return whole(jax.nn.silu, x)


def sigmoid(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``1 / (1 + exp(-x))``."""
    return whole(jax.nn.sigmoid, x)


def softplus(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``log(1 + exp(x))``."""
    return whole(jax.nn.softplus, x)


def softmax(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Over the last axis."""
    return whole(functools.partial(jax.nn.softmax, axis=-1), x, fill=-jnp.inf)


def gelu_tanh(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """GELU by its approximation with a hyperbolic tangent."""
    return whole(functools.partial(jax.nn.gelu, approximate=True), x)


_FUNCTIONS = {
    "silu": silu,
    "sigmoid": sigmoid,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}


def activate(name: Activation, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The activation of this name, element by element."""
    return _FUNCTIONS[name](x)
