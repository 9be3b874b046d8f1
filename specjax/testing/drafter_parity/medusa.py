"""Replaying an oracle of Medusa heads: two rounds of a chain, and a static tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.interfaces import FINAL
from specjax.decoding.trees import Tree, from_choices
from specjax.decoding.types import Acceptance, Context, Sampling, Verdict
from specjax.decoding.windows import chunk_window
from specjax.drafters.drawing import Pick
from specjax.drafters.medusa import MedusaChain, MedusaHeads, MedusaState, MedusaTree

CANDIDATES = 10
"""Of each head, in the reference's numbering of a tree's tokens."""
NO_NODE, NO_TOKEN = -1, 0
"""What the reference fills short paths up with."""

_propose = jax.jit(lambda drafter, state, context: drafter.propose(state, context)[0])


def replay(
    part: MedusaHeads,
    oracle: Mapping[str, np.ndarray],
    features: Callable[[str], np.ndarray],
) -> dict[str, np.ndarray]:
    """All that an oracle holds, by its names."""
    drafter = MedusaChain(part, part.num_heads, pick=Pick.BEST)
    text = [*oracle["prompt_ids"].tolist(), int(oracle["first_token"])]
    rows = np.asarray(features("hidden"))
    every = np.asarray(part.logits(jnp.asarray(rows)))
    found: dict[str, Any] = {"head_logits": every.swapaxes(0, 1)}
    state = _take_in(drafter, drafter.init(1, len(text)), rows, text)
    first = _propose(drafter, state, _context(text))
    found["draft1"] = np.asarray(first.tokens)[0]
    found |= _tree(part, oracle, state, text)
    accepted = found["draft1"][: int(oracle["accepted"])].tolist()
    more = [*accepted, int(oracle["next_token"])]
    rows = np.asarray(features("hidden2"))
    state = _take_in(drafter, state, rows, text + more)
    second = _propose(drafter, state, _context(text + more))
    found["head_logits2"] = np.asarray(part.logits(state.hidden))[0]
    found["draft2"] = np.asarray(second.tokens)[0]
    return found


def _take_in(
    drafter: MedusaChain, state: MedusaState, hidden: np.ndarray, text: list[int]
) -> MedusaState:
    """The state after the rows that stand before the text's last token."""
    count = len(hidden)
    stop = jnp.full((1,), len(text) - 1, jnp.int32)
    window = chunk_window(jnp.asarray([text], jnp.int32), stop - count, stop, count)
    rows = jnp.arange(count, dtype=jnp.int32)[None]
    verdict = Verdict(None, {FINAL: jnp.asarray(hidden)[None]}, None, rows < 0)
    behind = jnp.asarray([text[-count:]], jnp.int32)
    taken = Acceptance(rows, behind, jnp.full((1,), count, jnp.int32))
    return drafter.observe(state, None, window, verdict, taken)


def _context(text: list[int]) -> Context:
    one = jnp.ones((1,), jnp.int32)
    return Context(
        tokens=jnp.asarray([text], jnp.int32),
        lengths=len(text) * one,
        room=32 * one,
        done=one > 1,
        seeds=one.astype(jnp.uint32),
        sampling=Sampling(),
        counts=None,
    )


def _tree(
    part: MedusaHeads, oracle: Mapping[str, np.ndarray], state: Any, text: list[int]
) -> dict[str, np.ndarray]:
    """The static tree's arrays, and its tokens in the first round."""
    choices = [[r for r in row if r >= 0] for row in oracle["medusa_choices"].tolist()]
    tree = from_choices(choices)
    proposal = _propose(MedusaTree(part, tree), state, _context(text))
    nodes = np.array([text[-1], *np.asarray(proposal.tokens)[0].tolist()], np.int32)
    paths = _paths(tree)
    padded = np.append(nodes, NO_TOKEN)
    levels = np.array(tree.depths) - 1
    return {
        "tree_mask": np.array(tree.ancestors),
        "tree_positions": np.append(0, tree.depths).astype(np.int32),
        "tree_indices": np.append(0, 1 + levels * CANDIDATES + tree.ranks),
        "retrieve_indices": paths,
        "tree_candidates": nodes,
        "cart_candidates": padded[paths].astype(np.int32),
    }


def _paths(tree: Tree) -> np.ndarray:
    """Window rows from the anchor down to each leaf, the last leaf first."""
    rows = [[0, *(node + 1 for node in p)] for p in reversed(tree.paths)]
    full = tree.max_depth + 1
    return np.array([row + [NO_NODE] * (full - len(row)) for row in rows], np.int32)
