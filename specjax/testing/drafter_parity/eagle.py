"""Replaying an oracle of EAGLE's heads: two rounds of a chain, and a dynamic tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.trees import depths_of
from specjax.decoding.types import Acceptance, Verdict
from specjax.decoding.windows import ancestor_mask
from specjax.drafters.drawing import Pick
from specjax.drafters.dynamic_tree import HeadDynamicTree
from specjax.drafters.eagle.eagle3 import Recycled
from specjax.drafters.features import FeatureHead, HeadState, OwnHead, read_pairs
from specjax.drafters.guessing import guessing
from specjax.drafters.head_chain import HeadChain, first_hidden, read_drafts
from specjax.testing.drafter_parity.rows import context, path, taken_in

STEPS, TOP_K, EXPANSIONS, NODES = 5, 3, 3, 11
"""Of the oracles: a chain of five, a tree of twelve with its anchor."""

WIDTH = 24
"""Of the windows that paths are taken in with: of the prompt."""


@jax.jit
def _observe(
    drafter: OwnHead, state: HeadState, verdict: Verdict, acceptance: Acceptance
) -> tuple[HeadState, jax.Array]:
    """The state after a path, and what every row of it hands on."""
    out, _ = read_pairs(drafter.head, state, verdict, acceptance)
    return taken_in(drafter, state, verdict, acceptance), out


_propose = jax.jit(lambda drafter, state, context: drafter.propose(state, context)[0])
_read_drafts = jax.jit(read_drafts)


def replay(part: Any, oracle: Mapping[str, np.ndarray], features: Any) -> dict:
    """All that an oracle of EAGLE-1 or EAGLE-3 holds, by its names."""
    found = rounds(part, oracle, features)
    if "tree_ids" in oracle:
        found |= tree(part, oracle, features)
    if "serve_round1_ids" in oracle:
        served = part.replace(recycled=Recycled.BEHIND_NORM)
        found |= rounds(served, oracle, features, "serve_")
    return {name: found[name] for name in found if name in oracle}


def rounds(
    part: FeatureHead,
    oracle: Mapping[str, np.ndarray],
    features: Any,
    prefix: str = "",
    steps: int = STEPS,
) -> dict[str, np.ndarray]:
    """Prompt, drafts, a forced acceptance, drafts."""
    drafter = HeadChain(part, steps, pick=Pick.BEST)
    empty = drafter.init(1, 64)
    text = [*oracle["prompt_ids"].tolist(), int(oracle["first_token"])]
    state, found = pairs(
        drafter, empty, features("prefill_features"), text[1:], "prefill"
    )
    found |= chain(drafter, state, text, "round1")
    accepted = found["round1_ids"][: int(oracle["accepted"])].tolist()
    more = [*accepted, int(oracle[f"{prefix}next_token"])]
    rows = features(f"{prefix}round2_features")
    state, refreshed = pairs(drafter, state, rows, more, "refresh")
    found |= refreshed | chain(drafter, state, text + more, "round2")
    return {prefix + name: value for name, value in found.items()}


def pairs(
    drafter: OwnHead,
    state: HeadState,
    features: np.ndarray,
    tokens: list[int],
    name: str,
) -> tuple[HeadState, dict[str, np.ndarray]]:
    """Take in a path: what its rows hand on, and the logits behind them."""
    given = path(drafter.taps, features, tokens, WIDTH)
    state, out = _observe(drafter, state, *given)
    out = out[:, : len(tokens)]
    logits = own_vocabulary(drafter.head, drafter.head.logits(out))
    found = {f"{name}_hidden": np.asarray(out)[0], f"{name}_logits": logits[0]}
    return state, found


def chain(
    drafter: HeadChain, state: HeadState, text: list[int], name: str
) -> dict[str, np.ndarray]:
    """A round of drafts, and what each step of it read."""
    proposal = _propose(drafter, state, context(text))
    head = guessing(drafter.head, state.own)
    outs, hidden = [state.out[:, None]], first_hidden(state, drafter.k)
    for step in range(1, drafter.k):
        last, _, hidden = _read_drafts(
            head, state, jnp.int32(step), proposal.tokens, hidden
        )
        outs.append(last)
    out = jnp.concatenate(outs, axis=1)
    logits = own_vocabulary(drafter.head, drafter.head.logits(out))[0]
    return {
        f"{name}_ids": np.asarray(proposal.tokens)[0],
        f"{name}_draft_ids": logits.argmax(axis=-1),
        f"{name}_logits": logits,
        f"{name}_hidden": np.asarray(out)[0],
    }


def tree(
    part: FeatureHead, oracle: Mapping[str, np.ndarray], features: Any
) -> dict[str, np.ndarray]:
    """EAGLE-2's tree behind the prompt, the anchor as node 0."""
    drafter = HeadDynamicTree(part, TOP_K, EXPANSIONS + 1, NODES)
    anchor = int(oracle["first_token"])
    text = [*oracle["prompt_ids"].tolist(), anchor]
    rows = features("prefill_features")
    given = path(part.taps, rows, text[1:], WIDTH)
    state, _ = _observe(drafter, drafter.init(1, 64), *given)
    proposal = _propose(drafter, state, context(text))
    parents = np.asarray(proposal.parents)[0] + 1
    mask = np.asarray(ancestor_mask(proposal.parents + 1))[0]
    depths = np.asarray(depths_of(proposal.parents))[0]
    leaves = sorted(set(range(1, len(parents) + 1)) - set(parents.tolist()))
    paths = np.full((len(leaves), depths.max() + 1), -1)
    for row, leaf in zip(paths, leaves, strict=True):
        above = np.flatnonzero(mask[leaf])
        row[: len(above)] = above
    return {
        "tree_ids": np.array([anchor, *np.asarray(proposal.tokens)[0]]),
        "tree_parent": np.array([-1, *parents]),
        "tree_mask": mask,
        "tree_positions": np.array([0, *depths]),
        "tree_retrieve": paths,
    }


def own_vocabulary(part: Any, logits: jax.Array) -> np.ndarray:
    """Logits as the head's rows say them."""
    vocabulary = getattr(part, "vocabulary", None)
    return np.asarray(logits if vocabulary is None else vocabulary.narrow(logits))
