"""The values that pass between the parts of a round.

Letters, used everywhere in this project: ``B`` batch rows, ``N`` draft nodes,
``W = N + 1`` window rows (the anchor first), ``K`` longest draft path, ``P = K + 1``
rows of the longest accepted path, ``V`` vocabulary, ``D`` hidden size, ``T`` capacity
in tokens.

All types are immutable pytrees: a round takes a state and returns another, so a
snapshot is a reference and a rollback is forgetting one.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

NO_TOKEN = -1
"""What stands in token arrays where there is no token (never used as an index)."""

ANCHOR = -1
"""The ``parents`` entry of a draft node whose parent is the anchor."""


class FinishReason(enum.IntEnum):
    """Why a row stopped. ``NONE`` while it still runs."""

    NONE = 0
    STOP = 1  # an end-of-sequence id was committed
    LENGTH = 2  # the token budget is used up
    CAPACITY = 3  # no room is left in the state
    NAN = 4  # the target's own pass was not finite
    STOP_STRING = 5  # the host found a stop string in the text


class Proposal(struct.PyTreeNode):
    """What a drafter proposes: a tree of draft nodes for every row.

    Parents come before children and siblings stand in the order they were drawn. Only
    the first ``num_nodes`` nodes of a row mean anything.
    """

    tokens: jax.Array  # [B, N] int32
    parents: jax.Array  # [B, N] int32 node index, or ANCHOR
    num_nodes: jax.Array  # [B] int32, 0..N
    log_q: jax.Array | None = None  # [B, W, V] the law of each draw, by parent row;
    # None for deterministic drafts, whose law is one-hot


class Window(struct.PyTreeNode):
    """Rows for one target pass: the anchor and the draft nodes, or a prefill chunk.

    Row 0 sits at the position the target's state has reached; a row at depth ``d``
    below it has position ``positions[:, 0] + d``. Rows that are not ``valid`` are
    padding: they are ancestors of no valid row.
    """

    tokens: jax.Array  # [B, W] int32, always inside the vocabulary
    positions: jax.Array  # [B, W] int32
    ancestors: jax.Array  # [B, W, W] bool, [b, i, j]: row j is row i or above it
    valid: jax.Array  # [B, W] bool

    @property
    def width(self) -> int:
        """``W``."""
        return self.tokens.shape[1]

    @property
    def depths(self) -> jax.Array:
        """``[B, W]`` int32: steps below row 0."""
        return self.positions - self.positions[:, :1]


class Verdict(struct.PyTreeNode):
    """What the target says about a window.

    ``pending`` is what the window would add to the target's state. Every leaf of it,
    and of ``features``, has the window rows on axis 1, so that a round can widen it.
    """

    logits: jax.Array | None  # [B, W, V] float32
    features: dict[int, jax.Array]  # tap -> [B, W, D]
    pending: Any
    bad: jax.Array  # [B, W] bool: not finite here or in an ancestor


class Acceptance(struct.PyTreeNode):
    """The accepted path: window rows, and the token that follows each of them.

    ``tokens[b, j]`` is the committed token after window row ``path[b, j]``. Beyond
    ``num_tokens`` the path holds 0 and the tokens ``NO_TOKEN``.
    """

    path: jax.Array  # [B, P] int32 window rows, anchor first
    tokens: jax.Array  # [B, P] int32
    num_tokens: jax.Array  # [B] int32, 0..P

    @property
    def taken(self) -> jax.Array:
        """``[B, P]`` bool: which entries of the path count."""
        slots = jnp.arange(self.path.shape[1], dtype=jnp.int32)
        return slots[None, :] < self.num_tokens[:, None]


class Sampling(struct.PyTreeNode):
    """How logits become a law, per row. A field that is ``None`` is not traced.

    Applied in this order: bias, penalties, temperature, top-k, top-p, min-p.
    """

    temperature: jax.Array | None = None  # [B] float32; None or 0 is greedy
    top_k: jax.Array | None = None  # [B] int32; 0 keeps all
    top_p: jax.Array | None = None  # [B] float32 in (0, 1]; 1 keeps all
    min_p: jax.Array | None = None  # [B] float32 in [0, 1]; 0 keeps all
    repetition: jax.Array | None = None  # [B] float32 > 0; 1 does nothing
    presence: jax.Array | None = None  # [B] float32
    frequency: jax.Array | None = None  # [B] float32
    bias: jax.Array | None = None  # [B, V] float32, added to the logits

    @property
    def has_penalties(self) -> bool:
        """Whether token counts are needed."""
        return any(
            x is not None for x in (self.repetition, self.presence, self.frequency)
        )


class Counts(struct.PyTreeNode):
    """Token counts for penalties: in the prompt and in the output so far."""

    prompt: jax.Array  # [B, V] int32
    output: jax.Array  # [B, V] int32


class Context(struct.PyTreeNode):
    """What a drafter may look at when it proposes."""

    tokens: jax.Array  # [B, T] int32, committed up to ``lengths``
    lengths: jax.Array  # [B] int32
    room: jax.Array  # [B] int32: tokens that may still be committed
    done: jax.Array  # [B] bool
    seeds: jax.Array  # [B] uint32
    sampling: Sampling
    counts: Counts | None

    @property
    def anchor(self) -> jax.Array:
        """``[B]`` int32: the last committed token, whose pass has not run."""
        last = jnp.maximum(self.lengths - 1, 0)
        return jnp.take_along_axis(self.tokens, last[:, None], axis=1, mode="clip")[
            :, 0
        ]


class Stats(struct.PyTreeNode):
    """Exact counters, for readers only: no round depends on them."""

    rounds: jax.Array  # [B] int32: target passes that committed something
    drafted: jax.Array  # [B] int32
    accepted: jax.Array  # [B] int32
    committed: jax.Array  # [B] int32
    drafted_by_position: jax.Array  # [B, K] int32: rounds that drafted at depth i+1
    accepted_by_position: jax.Array  # [B, K] int32


class DecodeState(struct.PyTreeNode):
    """All that a run needs. Saved between calls and restored, it goes on alike."""

    target: Any
    drafter: Any
    tokens: jax.Array  # [B, T] int32, NO_TOKEN beyond ``lengths``
    lengths: jax.Array  # [B] int32: committed tokens, prompt included
    prompt_lengths: jax.Array  # [B] int32
    limits: jax.Array  # [B] int32: the length a row may reach, at most T
    limit_reasons: jax.Array  # [B] int32: what reaching it means, LENGTH or CAPACITY
    done: jax.Array  # [B] bool
    finish_reason: jax.Array  # [B] int32, FinishReason
    seeds: jax.Array  # [B] uint32
    sampling: Sampling
    counts: Counts | None
    stats: Stats

    @property
    def capacity(self) -> int:
        """``T``."""
        return self.tokens.shape[1]
