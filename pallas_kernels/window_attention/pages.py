"""A paged cache as one stretch a row, for what cannot read pages."""

from __future__ import annotations

from jaxtyping import Array, Float, Int


def gather_pages(
    cache: Float[Array, "pages H size D"], table: Int[Array, "B blocks"]
) -> Float[Array, "B H T D"]:
    """Each row's pages, one behind the other. What stands for no page is zero.

    An entry of ``pages`` or more stands for no page; none is negative.
    """
    rows = cache.at[table].get(mode="fill", fill_value=0)
    batch, blocks, heads, size, dim = rows.shape
    return rows.transpose(0, 2, 1, 3, 4).reshape(batch, heads, blocks * size, dim)
