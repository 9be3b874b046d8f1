"""Spreading a model and its state over a mesh, by the logical names of their axes.

A mesh has axes of its own: ``data`` for the rows of a batch, ``tensor`` for heads, MLP
channels and the vocabulary, ``expert`` for experts. The rules say which logical axis
goes where; the compiler's partitioner does the rest, and what it makes is the same
function. An axis that its mesh axis does not divide stays whole, and so does one whose
mesh axis another axis of the same array has taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.mesh import Spread
from specjax.decoding.types import DecodeState
from specjax.models.axes import BATCH, EMBED, EXPERT, HEADS, KV_HEADS, MLP, VOCAB
from specjax.models.committed import CommittedState
from specjax.models.decoder import Decoder
from specjax.models.feedforward.router import Router
from specjax.models.linear import Linear, StackedLinear
from specjax.models.mixers.attention import Attention, KVCache
from specjax.models.mixers.latent_attention import LatentCache
from specjax.models.stack import Block

DATA, TENSOR = "data", "tensor"

RULES: dict[str, str] = {
    BATCH: DATA,
    VOCAB: TENSOR,
    HEADS: TENSOR,
    KV_HEADS: TENSOR,
    MLP: TENSOR,
    EXPERT: EXPERT,
}
"""Logical axis to mesh axis; what is not named stays whole."""

Logical = tuple[str | None, ...]


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of these axes in this order, over the first devices.

    Raises ``ValueError`` if an axis is unknown, or there are too few devices.
    """
    for name, size in sizes.items():
        if name not in (DATA, TENSOR, EXPERT) or size < 1:
            raise ValueError(
                f"mesh axis {name} = {size}: {DATA}, {TENSOR} and {EXPERT} of at least "
                "1 are known"
            )
    devices = jax.devices() if devices is None else devices
    needed = int(np.prod(list(sizes.values()), dtype=int))
    if needed > len(devices):
        raise ValueError(
            f"mesh {dict(sizes)} takes {needed} devices, and there are {len(devices)}"
        )
    shape = tuple(sizes.values())
    return Mesh(np.array(devices[:needed]).reshape(shape), tuple(sizes))


def shard_decoder(
    decoder: Decoder, mesh: Mesh, rules: Mapping[str, str] = RULES
) -> Decoder:
    """The decoder with its parameters spread over the mesh.

    Shapes in the place of arrays are told where they lie: what is then lowered may be
    compiled for devices that are not here.
    """
    tensor = dict(mesh.shape).get(TENSOR, 1)
    spread = Spread(mesh, batch=rules.get(BATCH), heads=rules.get(KV_HEADS))
    told = tuple(_spread(block, spread) for block in decoder.blocks)
    decoder = _without_skinny_kernels(decoder.replace(blocks=told))
    return _put(decoder, _parameter_axes(decoder, tensor), mesh, rules)


def shard_state(
    state: DecodeState, mesh: Mesh, rules: Mapping[str, str] = RULES
) -> DecodeState:
    """A state, as ``Engine.start`` makes it, spread over the mesh.

    The batch must be a multiple of the mesh's ``data`` axis.
    """
    rows = dict(mesh.shape).get(DATA, 1)
    batch = state.lengths.shape[0]
    if batch % rows:
        raise ValueError(
            f"{batch} rows do not spread over {rows} devices of axis {DATA!r}"
        )
    return _put(state, _state_axes(state), mesh, rules)


def partition(
    shape: tuple[int, ...], axes: Logical, mesh: Mesh, rules: Mapping[str, str] = RULES
) -> PartitionSpec:
    """Where each axis of an array goes."""
    sizes, taken, parts = dict(mesh.shape), set(), []
    for extent, name in zip(shape, axes, strict=True):
        to = rules.get(name) if name is not None else None
        fits = to in sizes and to not in taken and extent % sizes[to] == 0
        parts.append(to if fits else None)
        if fits:
            taken.add(to)
    return PartitionSpec(*parts)


def _spread(block: Block, spread: Spread) -> Block:
    """A mixer with kernels is told how its batch rows and heads lie apart."""
    if block.mixer is None or not hasattr(block.mixer.body, "spread"):
        return block
    mixer = block.mixer.replace(body=block.mixer.body.replace(spread=spread))
    return block.replace(mixer=mixer)


def _without_skinny_kernels(decoder: Decoder) -> Decoder:
    """Weights lie in parts here, and the partitioner cannot divide a kernel."""

    def told(node: Any) -> Any:
        return node.replace(divided=True) if isinstance(node, Linear) else node

    return jax.tree.map(told, decoder, is_leaf=lambda node: isinstance(node, Linear))


def _put(tree: Any, axes: Any, mesh: Mesh, rules: Mapping[str, str]) -> Any:
    def place(array: Any, names: _Axes) -> Any:
        spec = partition(array.shape, names.of(len(array.shape)), mesh, rules)
        there = NamedSharding(mesh, spec)
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=there)
        return jax.device_put(array, there)

    return jax.tree.map(place, tree, axes)


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Names of an array's first axes; a leaf, where a tuple would be a subtree."""

    names: Logical = ()

    def of(self, ndim: int) -> Logical:
        return (*self.names[:ndim], *[None] * (ndim - len(self.names)))


def _each(tree: Any, axes: _Axes) -> Any:
    return jax.tree.map(lambda _: axes, tree)


def _parameter_axes(node: Any, tensor: int) -> Any:
    """The tree with names in place of arrays; ``tensor`` devices share its heads."""
    inner = partial(_parameter_axes, tensor=tensor)
    match node:
        case Decoder():
            return _fields(node, inner).replace(embedding=_Axes((VOCAB, EMBED)))
        case Linear() | StackedLinear():
            # scales and biases stand beside the outputs
            outputs = _Axes(node.axes[:-1])
            return node.replace(
                weight=_Axes(node.axes),
                scale=_each(node.scale, outputs),
                bias=_each(node.bias, outputs),
            )
        case Router():
            return _each(node, _Axes())
        case Attention() if node.config.num_kv_heads % tensor:
            # heads are not torn
            return _fields(node, inner).replace(
                k=_each(node.k, _Axes()), v=_each(node.v, _Axes())
            )
    return _inside(node, inner, _Axes())


def _state_axes(node: Any) -> Any:
    """The tree with names in place of arrays."""
    match node:
        case KVCache() | LatentCache():
            return _each(node, _Axes(node.axes))
        case CommittedState() if node.pages is not None:
            # rows share the pool, so it cannot be spread by rows
            return _each(node, _Axes())
    return _inside(node, _state_axes, _Axes((BATCH,)))


def _inside(node: Any, of: Callable[[Any], Any], otherwise: _Axes) -> Any:
    """``of`` what is in a dataclass or tuple; any other leaf has the axes given."""
    if isinstance(node, tuple):
        parts = [of(part) for part in node]
        named = hasattr(node, "_fields")
        return type(node)(*parts) if named else tuple(parts)
    if dataclasses.is_dataclass(node):
        return _fields(node, of)
    return _each(node, otherwise)


def _fields(node: Any, of: Callable[[Any], Any]) -> Any:
    """A dataclass with ``of`` its array fields in their place."""
    fields = {
        field.name: of(getattr(node, field.name))
        for field in dataclasses.fields(node)
        if field.metadata.get("pytree_node", True)
    }
    return dataclasses.replace(node, **fields)
