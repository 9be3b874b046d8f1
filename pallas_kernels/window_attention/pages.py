"""A paged cache as one stretch a row, for what cannot read pages."""

from __future__ import annotations

from jaxtyping import Array, Int, Real


def gather_pages(
    cache: Real[Array, "pages H size *D"], table: Int[Array, "B blocks"]
) -> Real[Array, "B H T *D"]:
    """Each row's pages, one behind the other. What stands for no page is zero.

    An entry of ``pages`` or more, or a negative one, stands for no page.
    """
    rows = cache.at[table].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    batch, blocks, heads, size, *rest = rows.shape
    return rows.swapaxes(1, 2).reshape(batch, heads, blocks * size, *rest)
