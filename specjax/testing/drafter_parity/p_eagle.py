"""Replaying an oracle of P-EAGLE: two rounds, each of one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax.decoding.types import Acceptance, Verdict
from specjax.drafters.drawing import Pick
from specjax.drafters.eagle.parallel import ParallelChain, ParallelHead, SlotsState
from specjax.drafters.features import HeadState, read_pairs
from specjax.testing.drafter_parity.eagle import STEPS, WIDTH, own_vocabulary
from specjax.testing.drafter_parity.rows import context, path, taken_in


@jax.jit
def _observe(
    drafter: ParallelChain, state: SlotsState, verdict: Verdict, acceptance: Acceptance
) -> tuple[SlotsState, jax.Array]:
    """The state after a path, and what every row of it says."""
    pairs = HeadState(own=state.own, lengths=state.lengths, out=state.outs[:, 0])
    out, _ = read_pairs(drafter.part.head, pairs, verdict, acceptance)
    return taken_in(drafter, state, verdict, acceptance), out


_propose = jax.jit(lambda drafter, state, context: drafter.propose(state, context)[0])


def replay(
    part: ParallelHead, oracle: Mapping[str, np.ndarray], features: Any
) -> dict[str, np.ndarray]:
    """Prompt, drafts, a forced acceptance, drafts."""
    drafter = ParallelChain(part, STEPS, pick=Pick.BEST)
    text = [*oracle["prompt_ids"].tolist(), int(oracle["first_token"])]
    state, found = drafter.init(1, 64), {}
    paths = {
        ("prefill", "round1"): ("prefill_features", text[1:]),
        ("refresh", "round2"): ("round2_features", oracle["round2_in_ids"].tolist()),
    }
    for (taking, round_), (name, tokens) in paths.items():
        given = path(part.taps, features(name), tokens, WIDTH)
        state, out = _observe(drafter, state, *given)
        logits = own_vocabulary(part.head, part.head.logits(out[:, : len(tokens)]))
        found[f"{taking}_logits"] = logits[0]
        proposal = _propose(drafter, state, context(text))
        said = own_vocabulary(part.head, part.head.logits(state.outs))[0]
        found[f"{round_}_ids"] = np.asarray(proposal.tokens)[0]
        found[f"{round_}_logits"] = said
        found[f"{round_}_draft_ids"] = said.argmax(axis=-1)
    return found
