"""Replaying an oracle of Hydra heads: two rounds of a chain, and a static tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax.decoding.trees import from_choices
from specjax.drafters.draft_tree import HeadTree
from specjax.drafters.hydra import HydraHeads
from specjax.testing.drafter_parity import eagle
from specjax.testing.drafter_parity.rows import context, path, taken_in

_propose = jax.jit(lambda drafter, state, context: drafter.propose(state, context)[0])


def replay(
    part: HydraHeads, oracle: Mapping[str, np.ndarray], features: Any
) -> dict[str, np.ndarray]:
    """All that an oracle holds, by its names."""
    found = eagle.rounds(part, oracle, features, steps=part.num_heads)
    found |= tree(part, oracle, features)
    return {name: found[name] for name in found if name in oracle}


def tree(
    part: HydraHeads, oracle: Mapping[str, np.ndarray], features: Any
) -> dict[str, np.ndarray]:
    """The static tree's tokens behind the prompt, the anchor first."""
    choices = [[r for r in row if r >= 0] for row in oracle["tree_choices"].tolist()]
    drafter = HeadTree(part, from_choices(choices))
    text = [*oracle["prompt_ids"].tolist(), int(oracle["first_token"])]
    given = path(part.taps, features("prefill_features"), text[1:], eagle.WIDTH)
    state = taken_in(drafter, drafter.init(1, 64), *given)
    proposal = _propose(drafter, state, context(text))
    return {"tree_ids": np.array([text[-1], *np.asarray(proposal.tokens)[0].tolist()])}
