"""Drafters that fill in a block of tokens in one pass: DFlash and its kin.

``context`` is what they all stand on (keys and values made of the target's hidden
states), ``backbone`` the network around it. ``dflash``, ``dflash2`` and ``dspark`` say
how the slots of a block become laws; ``chain`` and ``tree`` what is drafted of them.
"""

from __future__ import annotations

from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.chain import BlockChain
from specjax.drafters.block.dflash import DFlash
from specjax.drafters.block.dflash2 import DFlash2
from specjax.drafters.block.dspark import DSpark
from specjax.drafters.block.tree import BlockTree

__all__ = ["Backbone", "BlockChain", "BlockTree", "DFlash", "DFlash2", "DSpark"]
