"""The short causal convolution of recurrent mixers, over trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decoding.types import Acceptance, Window


def convolve(
    inputs: Float[Array, "B W C"],
    window: Window,
    history: Float[Array, "B past C"],
    taps: Float[Array, "C width"],
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
    return out


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
    width = window.width
    strict = window.ancestors & ~jnp.eye(width, dtype=bool)
    rows = jnp.arange(width, dtype=jnp.int32)
    # rows stand behind their ancestors, so the last strict ancestor is the parent
    parent = jnp.max(jnp.where(strict, rows, -1), axis=2)
    batch = window.tokens.shape[0]
    old = jnp.maximum(jnp.arange(past, dtype=jnp.int32) - 1, 0)
    return jnp.concatenate(
        [jnp.broadcast_to(old, (batch, past)), parent + past], axis=1
    )


def silent_rows(x: jax.Array, sound: jax.Array) -> jax.Array:
    """Zero the window rows (axis 1) that are padding or not finite."""
    shape = sound.shape + (1,) * (x.ndim - 2)
    return jnp.where(sound.reshape(shape), x, jnp.zeros((), x.dtype))
