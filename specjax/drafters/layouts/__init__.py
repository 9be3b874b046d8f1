"""Published checkpoint layouts of learned drafters: configuration and names to parts.

One file a method. Like a model family, a layout holds no maths: it reads the
configuration (every field, or an error that names it), asks for tensors by name, and
makes the part that the drafter runs. A new layout is one file here and one line in
``LAYOUTS``; ``specjax.checkpoints.drafters`` finds the one that fits a folder.
"""

from __future__ import annotations

from specjax.drafters.layouts import (
    dflash,
    dspark,
    eagle1,
    eagle3,
    hydra,
    medusa,
    p_eagle,
)
from specjax.drafters.layouts.layout import Export, Host, Layout

__all__ = ["LAYOUTS", "Export", "Host", "Layout"]

LAYOUTS: tuple[Layout, ...] = (
    *dflash.LAYOUTS,
    *dspark.LAYOUTS,
    eagle1.LAYOUT,
    *eagle3.LAYOUTS,
    p_eagle.LAYOUT,
    *medusa.LAYOUTS,
    hydra.LAYOUT,
)
"""In the order in which they are tried."""
