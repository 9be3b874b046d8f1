"""Windows: the rows of one target pass, from a proposal or from a stretch of text."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.decoding.types import Proposal, Window


def draft_window(
    anchor: Int[Array, " B"],
    lengths: Int[Array, " B"],
    room: Int[Array, " B"],
    proposal: Proposal,
    vocab_size: int,
) -> Window:
    """The anchor and the draft nodes, as rows of one pass.

    A node is valid if it is among the first ``num_nodes``, its token lies in the
    vocabulary, its parent stands before it, all its ancestors are valid, and it is not
    deeper than the row has room for. A row without room has no valid row at all.
    """
    nodes = proposal.tokens.shape[1]
    index = jnp.arange(nodes, dtype=jnp.int32)
    parents_ok = (proposal.parents >= -1) & (proposal.parents < index)
    tokens_ok = (proposal.tokens >= 0) & (proposal.tokens < vocab_size)
    drafted = index < proposal.num_nodes[:, None]
    open_rows = room > 0
    node_ok = jnp.concatenate(
        [open_rows[:, None], drafted & parents_ok & tokens_ok], axis=1
    )
    parent_rows = jnp.where(parents_ok, proposal.parents + 1, 0)
    ancestors = ancestor_mask(parent_rows)
    depths = ancestors.sum(axis=-1, dtype=jnp.int32) - 1
    valid = jnp.all(node_ok[:, None, :] | ~ancestors, axis=-1)
    valid = valid & (depths < room[:, None])
    tokens = jnp.concatenate([anchor[:, None], proposal.tokens], axis=1)
    return Window(
        tokens=jnp.where(valid, tokens, 0),
        positions=jnp.maximum(lengths - 1, 0)[:, None] + depths,
        ancestors=keep_valid(ancestors, valid),
        valid=valid,
    )


def chunk_window(
    tokens: Int[Array, "B T"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    width: int,
) -> Window:
    """A stretch of text, ``tokens[start : stop]``, cut at ``width`` rows."""
    positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    valid = positions < stop[:, None]
    picked = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
    causal = jnp.tril(jnp.ones((width, width), bool))
    ancestors = jnp.broadcast_to(causal, (tokens.shape[0], width, width))
    return Window(
        tokens=jnp.where(valid, picked, 0),
        positions=positions,
        ancestors=keep_valid(ancestors, valid),
        valid=valid,
    )


def ancestor_mask(parent_rows: Int[Array, "B N"]) -> Bool[Array, "B W W"]:
    """Row ``j`` is row ``i`` or above it, for nodes whose parents are earlier rows.

    The closure of "self or parent" by repeated squaring: ``log2(W)`` small products.
    """
    batch, nodes = parent_rows.shape
    width = nodes + 1
    rows = jnp.arange(width, dtype=jnp.int32)
    parents = jnp.concatenate(
        [jnp.zeros((batch, 1), jnp.int32), parent_rows.astype(jnp.int32)], axis=1
    )
    reach = (parents[:, :, None] == rows) | (rows[:, None] == rows)
    for _ in range(math.ceil(math.log2(width)) if width > 1 else 0):
        counts = jnp.einsum(
            "bij,bjk->bik", reach.astype(jnp.float32), reach.astype(jnp.float32)
        )
        reach = counts > 0
    return reach


def keep_valid(
    ancestors: Bool[Array, "B W W"], valid: Bool[Array, "B W"]
) -> Bool[Array, "B W W"]:
    """Cut padding rows out of the mask; such a row sees only itself."""
    itself = jnp.eye(valid.shape[1], dtype=bool)
    return (ancestors & valid[:, :, None] & valid[:, None, :]) | itself


def slice_rows(window: Window, width: int) -> Window:
    """The first ``width`` rows. Parents stand before children, so nothing is torn."""
    return Window(
        tokens=window.tokens[:, :width],
        positions=window.positions[:, :width],
        ancestors=window.ancestors[:, :width, :width],
        valid=window.valid[:, :width],
    )


def widen(tree, width: int):
    """Pad every leaf of a pytree with zeros to ``width`` window rows (axis 1)."""

    def pad(x: jax.Array) -> jax.Array:
        missing = width - x.shape[1]
        if missing == 0:
            return x
        return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, tree)


def spread_bad(
    bad: Bool[Array, "B W"], ancestors: Bool[Array, "B W W"]
) -> Bool[Array, "B W"]:
    """A row below a bad one is bad as well."""
    return jnp.any(ancestors & bad[:, None, :], axis=-1)
