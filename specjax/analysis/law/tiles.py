"""Draft lengths that fill an attention kernel's tile.

Attention over grouped heads multiplies G query heads by 1 + D rows at once, in tiles of
128. Source: the digest's summary of a vendor's guide, D = 128 / G - 1.
"""

from __future__ import annotations

from specjax.analysis.law.sizes import at_least


def tile_drafts(group: int, tile: int = 128) -> float:
    """Drafts at which ``group`` query heads a KV head fill one tile."""
    at_least("tile", tile, 1)
    return tile / at_least("group", group, 1) - 1


def tiles_used(group: int, drafts: int, tile: int = 128) -> int:
    """Tiles that a window of ``drafts`` drafts takes."""
    at_least("group", group, 1)
    at_least("drafts", drafts, 0)
    at_least("tile", tile, 1)
    return -(-group * (1 + drafts) // tile)
