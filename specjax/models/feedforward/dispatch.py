"""Bringing rows to their experts. A slot is one row at one of its experts.

Three ways to one result, every slot's output in the order of the rows:

- ``by_tiles``: sorted by expert, a loop over tiles of slots that share one;
- ``by_gather``: each slot with a copy of its expert's weights;
- ``by_groups``: sorted by expert, one ragged product a layer.

None of them multiplies a row by the weights of an expert that it did not choose, as a
dense product over all experts would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.linear import StackedLinear

Between = Callable[[jax.Array], jax.Array]
"""From what the first layer makes of a row to what the second one takes."""

NARROWEST_TILE = 4
"""Rows. One more than XLA's fast bfloat16 products need (``linear.fewest_rows``)."""

WIDEST_TILE = 64


class Slots(NamedTuple):
    """Slots sorted by expert. Those of rows that are not valid come last."""

    experts: Int[Array, " S"]
    """``E`` where the row is not valid."""
    rows: Int[Array, " S"]
    """The row that a slot takes its input from."""
    place: Int[Array, " S"]
    """Where each slot went: in the order that they had before."""


def sort_slots(
    experts: Int[Array, "R k"], valid: Bool[Array, " R"], count: int
) -> Slots:
    """Order the slots of ``R`` rows by expert (of ``count``), of one expert by row."""
    flat = jnp.where(valid[:, None], experts, count).reshape(-1).astype(jnp.int32)
    numbers = jnp.arange(flat.size, dtype=jnp.int32)
    by_expert, order = jax.lax.sort((flat, numbers), num_keys=1)
    _, place = jax.lax.sort((order, numbers), num_keys=1)
    return Slots(by_expert, order // experts.shape[1], place)


def tile_rows(slots: int, experts: int) -> int:
    """Slots in a tile: about twice an expert's fair share, a power of two.

    Measured on CPU (two cores, E = 64, top 8, D = 2048, size 768). To 8 chosen experts
    a tile of 4 to 16 rows took 14 to 17 ms in bfloat16; to 512 slots, tiles of 4, 32
    and 128 rows took 736, 164 and 410 ms; to 2048 slots, 1247, 240 and 542 ms.
    """
    share = 2 * slots // experts
    power = 1 << max(share - 1, 0).bit_length()
    return min(max(power, NARROWEST_TILE), WIDEST_TILE)


def by_tiles(
    between: Between,
    up: StackedLinear,
    down: StackedLinear,
    x: Float[Array, "R in"],
    experts: Int[Array, "R k"],
    valid: Bool[Array, " R"],
) -> Float[Array, "R k in"]:
    """Read the weights of each expert that is wanted once for every tile of its slots.

    A tile starts where the one before it has no more slots of its expert, and writes
    all its rows: what it writes too much, later tiles write over.
    """
    count = up.weight.shape[0]
    tile = tile_rows(experts.size, count)
    slots = sort_slots(experts, valid, count)
    owners = jnp.pad(slots.experts, (0, tile), constant_values=count)
    sources = jnp.pad(slots.rows, (0, tile))

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, out = carry
        owner = jax.lax.dynamic_slice(owners, (start,), (tile,))
        source = jax.lax.dynamic_slice(sources, (start,), (tile,))
        # XLA takes bfloat16 slices out of a float32 copy, which it would make of all
        # the weights before the loop. A value of this very step it converts in place.
        first, second, expert = jax.lax.optimization_barrier((up, down, owner[0]))
        hidden = first.at(expert)(x.at[source].get(mode="clip"))
        y = second.at(expert)(between(hidden))
        out = jax.lax.dynamic_update_slice(out, y, (start, jnp.int32(0)))
        return start + jnp.sum(owner == owner[0], dtype=jnp.int32), out

    def unfinished(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(owners, carry[0], keepdims=False) < count

    out = jnp.zeros((owners.size, down.weight.shape[1]), down.result_dtype)
    _, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), out))
    return _in_rows(out.at[slots.place].get(mode="clip"), valid)


def by_gather(
    between: Between,
    up: StackedLinear,
    down: StackedLinear,
    x: Float[Array, "R in"],
    experts: Int[Array, "R k"],
    valid: Bool[Array, " R"],
) -> Float[Array, "R k in"]:
    """Copy the weights of every slot's expert, and multiply slot by slot."""
    flat = experts.reshape(-1)
    hidden = up.each(jnp.repeat(x, experts.shape[1], axis=0), flat)
    return _in_rows(down.each(between(hidden), flat), valid)


def by_groups(
    between: Between,
    up: StackedLinear,
    down: StackedLinear,
    x: Float[Array, "R in"],
    experts: Int[Array, "R k"],
    valid: Bool[Array, " R"],
) -> Float[Array, "R k in"]:
    """Both layers as ragged products over the sorted slots."""
    slots = sort_slots(experts, valid, up.weight.shape[0])
    hidden = up.grouped(x.at[slots.rows].get(mode="clip"), slots.experts)
    y = down.grouped(between(hidden), slots.experts)
    return _in_rows(y.at[slots.place].get(mode="clip"), valid)


def _in_rows(y: Float[Array, "S in"], valid: Bool[Array, " R"]) -> jax.Array:
    """``[R, k, in]``, zero for rows that are not valid: nobody computed them."""
    split = y.reshape(valid.size, -1, y.shape[-1])
    return jnp.where(valid[:, None, None], split, jnp.zeros((), y.dtype))
