"""The state of a layer that convolves its inputs and then runs a recurrence on them."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
from flax import struct

from pallas_kernels.mesh import Spread
from specjax.decoding.types import Acceptance
from specjax.models.axes import BATCH, TIME
from specjax.models.mixers.convolution import advance
from specjax.models.recurrence.base import Recurrence


class LayerState(struct.PyTreeNode):
    """What the committed tokens left."""

    memory: Any  # the recurrence's own
    inputs: jax.Array  # [B, conv_width - 1, C] of the convolution, oldest first

    inputs_axes = (BATCH, TIME, "channels")


class LayerWindow(struct.PyTreeNode):
    """What a window would add; every leaf has its rows on axis 1."""

    memory: Any
    inputs: jax.Array  # [B, W, C] before the convolution


def placed(recurrence: Recurrence, spread: Spread | None) -> Recurrence:
    """The strategy told of the mesh; one that calls no kernel need not know."""
    if spread is None or not hasattr(recurrence, "spread"):
        return recurrence
    return dataclasses.replace(cast(Any, recurrence), spread=spread)


def commit_layer(
    recurrence: Recurrence,
    state: LayerState,
    pending: LayerWindow,
    acceptance: Acceptance,
) -> LayerState:
    """Both parts follow the accepted path."""
    return LayerState(
        memory=recurrence.commit(state.memory, pending.memory, acceptance),
        inputs=advance(state.inputs, pending.inputs, acceptance),
    )


def blank_layer(
    recurrence: Recurrence, state: LayerState, value: float | jax.Array
) -> LayerState:
    """With ``value`` wherever the recurrence's own state holds nothing."""
    fill = getattr(recurrence, "blank", None)
    return state if fill is None else state.replace(memory=fill(state.memory, value))


def canonical_layer(recurrence: Recurrence, state: LayerState) -> LayerState:
    """With the matrices in place of the recurrence's own state."""
    return state.replace(memory=recurrence.canonical(state.memory))
