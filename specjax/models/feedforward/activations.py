"""Activation functions by name."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from specjax.models.config import Activation


def relu2(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Relu squared (So et al., 2109.08668)."""
    positive = jax.nn.relu(x)
    return positive * positive


_FUNCTIONS = {
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu2": relu2,
}


def activate(name: Activation, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The activation of this name, element by element."""
    return _FUNCTIONS[name](x)
