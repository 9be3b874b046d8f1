"""What a replay hands to a drafter that reads hidden states: one row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import NO_TOKEN, Acceptance, Context, Sampling, Verdict
from specjax.drafters.features import pairs_window


def path(
    taps: Sequence[Tap], features: np.ndarray, tokens: list[int], width: int
) -> tuple[Verdict, Acceptance]:
    """An accepted path in a window of ``width`` rows: its features, ``[rows, m*D]``,
    and the tokens behind them."""
    count, missing = len(tokens), (0, width - len(tokens))
    rows = np.pad(np.asarray(features), (missing, (0, 0)))
    parts = np.split(rows, len(taps), axis=-1)
    index = np.arange(width, dtype=np.int32)
    verdict = Verdict(
        logits=None,
        features={t: jnp.asarray(x)[None] for t, x in zip(taps, parts, strict=True)},
        pending=None,
        bad=jnp.zeros((1, width), bool),
    )
    acceptance = Acceptance(
        path=jnp.asarray(np.where(index < count, index, 0))[None],
        tokens=jnp.asarray(
            [np.pad(tokens, missing, constant_values=NO_TOKEN)], jnp.int32
        ),
        num_tokens=jnp.full((1,), count, jnp.int32),
    )
    return verdict, acceptance


def taken_in(drafter: Any, state: Any, verdict: Verdict, acceptance: Acceptance) -> Any:
    """The drafter's state after a path. What else lay in the window does not matter to
    heads, nor which tokens it read: a window of the path's own shape will do."""
    start = jnp.zeros(acceptance.num_tokens.shape, jnp.int32)
    window = pairs_window(acceptance, start)
    return drafter.observe(state, None, window, verdict, acceptance)


def context(text: list[int]) -> Context:
    """A row of plain greedy decoding with room to spare."""
    return Context(
        tokens=jnp.asarray([text], jnp.int32),
        lengths=jnp.full((1,), len(text), jnp.int32),
        room=jnp.full((1,), 32, jnp.int32),
        done=jnp.zeros((1,), bool),
        seeds=jnp.zeros((1,), jnp.uint32),
        sampling=Sampling(),
        counts=None,
    )
