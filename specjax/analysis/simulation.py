"""Rounds played with coins: what the speed-up law says, seen one round at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from specjax.analysis.law import speedup, tree_tau_by_rank
from specjax.analysis.law.sizes import Number
from specjax.decoding.trees import Tree
from specjax.decoding.types import ANCHOR


@dataclasses.dataclass(frozen=True)
class Game:
    """The rules: what is drafted, how good it is, what a round costs."""

    tree: Tree
    """The drafts of every round; a chain is a tree."""
    ranks: tuple[float, ...]
    """The probability that a node of rank ``r`` is right, if its parent is."""
    c_draft: Number
    """Drafting a round, in plain steps."""
    c_verify: Number = 1.0
    """Verifying a round and all else, in plain steps."""

    def __post_init__(self) -> None:
        for name in ("c_draft", "c_verify"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: it must be 0 or more"
                )
        speedup(self.tau, self.c_draft, self.c_verify)  # refuses what makes no sense

    @property
    def tau(self) -> float:
        """By the law."""
        return tree_tau_by_rank(self.tree, self.ranks)

    @property
    def cost(self) -> Number:
        """Of a round, in plain steps."""
        return self.c_draft + self.c_verify

    @property
    def speedup(self) -> float:
        """By the law."""
        return self.tau / self.cost


@dataclasses.dataclass(frozen=True)
class Played:
    """Some rounds of a game."""

    game: Game
    paths: tuple[tuple[int, ...], ...]
    """The accepted nodes of each round, from the anchor's child down."""

    @property
    def committed(self) -> tuple[int, ...]:
        """Tokens of each round: its accepted nodes, and the target's own token."""
        return tuple(len(path) + 1 for path in self.paths)

    @property
    def tau(self) -> float:
        """Tokens a round, as they came."""
        return sum(self.committed) / len(self.committed)

    @property
    def speedup(self) -> float:
        """Tokens over plain steps that the rounds cost, as they came."""
        return self.tau / self.game.cost

    @property
    def tau_error(self) -> float:
        """The standard error of ``tau``; inf for one round."""
        if len(self.committed) < 2:
            return math.inf
        spread = float(np.std(self.committed, ddof=1))
        return spread / math.sqrt(len(self.committed))


def play(game: Game, rounds: int, seed: int) -> Played:
    """Play rounds; the same seed gives the same ones.

    One coin a level decides which child is right, or that none is: siblings cannot be
    right together. Coins are drawn for every level, also beyond the first rejection,
    so that a round's coins do not depend on the rounds before.
    """
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: play at least one")
    coins = np.random.default_rng(seed).random((rounds, game.tree.max_depth))
    return Played(game, tuple(_walk(game, row) for row in coins.tolist()))


def _walk(game: Game, coins: Sequence[float]) -> tuple[int, ...]:
    path: list[int] = []
    node = ANCHOR
    for coin in coins:
        children = game.tree.children(node)
        shares = [game.ranks[game.tree.ranks[child]] for child in children]
        right = [
            child
            for child, upper in zip(children, itertools.accumulate(shares), strict=True)
            if coin < upper
        ]
        if not right:
            break
        node = right[0]
        path.append(node)
    return tuple(path)
