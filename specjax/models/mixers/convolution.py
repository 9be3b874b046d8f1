"""The short causal convolution of recurrent mixers, over trees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.types import Acceptance, Window


def convolve(
    inputs: Float[Array, "B W C"],
    window: Window,
    history: Float[Array, "B past C"],
    taps: Float[Array, "C width"],
    bias: Float[Array, " C"] | None = None,
) -> Float[Array, "B W C"]:
    """Each row's convolution over itself and its nearest ``width - 1`` ancestors.

    Above row 0 come the committed inputs, ``history``, oldest first; the last tap
    belongs to the row itself.
    """
    buffer = jnp.concatenate([history, inputs], axis=1)
    place = _places(window, history.shape[1])
    out = jnp.zeros_like(inputs)
    current = jnp.broadcast_to(
        jnp.arange(window.width, dtype=jnp.int32) + history.shape[1],
        window.tokens.shape,
    )
    for tap in reversed(range(taps.shape[1])):
        rows = jnp.take_along_axis(buffer, current[:, :, None], axis=1, mode="clip")
        out = out + rows * taps[:, tap]
        current = jnp.take_along_axis(place, current, axis=1, mode="clip")
    return out if bias is None else out + bias


def advance(
    history: Float[Array, "B past C"],
    inputs: Float[Array, "B W C"],
    acceptance: Acceptance,
) -> Float[Array, "B past C"]:
    """The last inputs after the accepted path."""
    past = history.shape[1]
    on_path = jnp.take_along_axis(
        inputs, acceptance.path[:, :, None], axis=1, mode="clip"
    )
    buffer = jnp.concatenate([history, on_path], axis=1)
    slots = acceptance.num_tokens[:, None] + jnp.arange(past, dtype=jnp.int32)
    return jnp.take_along_axis(buffer, slots[:, :, None], axis=1, mode="clip")


def _places(window: Window, past: int) -> Int[Array, "B rows"]:
    """For each row of ``history + window``: the row before it on its path."""
    parent = parent_rows(window.ancestors)
    batch = window.tokens.shape[0]
    old = jnp.maximum(jnp.arange(past, dtype=jnp.int32) - 1, 0)
    return jnp.concatenate(
        [jnp.broadcast_to(old, (batch, past)), parent + past], axis=1
    )


def parent_rows(ancestors: Bool[Array, "B W W"]) -> Int[Array, "B W"]:
    """The row above each; -1 for row 0 and for padding."""
    width = ancestors.shape[1]
    strict = ancestors & ~jnp.eye(width, dtype=bool)
    # rows stand behind their ancestors, so the last strict ancestor is the parent
    return jnp.max(jnp.where(strict, jnp.arange(width, dtype=jnp.int32), -1), axis=2)


def usable_rows(*parts: Float[Array, "B W ..."]) -> Bool[Array, "B W"]:
    """The window rows in which every part is finite, and so far from overflow that
    sums of products of two of its numbers are finite as well.

    What is not would reach a row's neighbours as ``0 * NaN`` or ``0 * inf``.
    """

    def usable(x: jax.Array) -> jax.Array:
        largest = float(jnp.finfo(x.dtype).max) ** 0.5 / 1024
        return jnp.all(jnp.abs(x) <= largest, axis=tuple(range(2, x.ndim)))

    return functools.reduce(jnp.logical_and, map(usable, parts))


def flag_rows(x: jax.Array, bad: Bool[Array, "B W"]) -> jax.Array:
    """Window rows (axis 1) that could not be computed are NaN."""
    shape = bad.shape + (1,) * (x.ndim - 2)
    return jnp.where(bad.reshape(shape), jnp.asarray(jnp.nan, x.dtype), x)


def silent_rows(x: jax.Array, sound: jax.Array) -> jax.Array:
    """Zero the window rows (axis 1) that are padding or not finite."""
    shape = sound.shape + (1,) * (x.ndim - 2)
    return jnp.where(sound.reshape(shape), x, jnp.zeros((), x.dtype))
