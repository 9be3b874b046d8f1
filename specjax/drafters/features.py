"""Draft heads that read the target's hidden states: EAGLE, MTP and their kin.

Row ``i`` of such a head takes (hidden state of position ``i``, token ``i + 1``) and
says what token ``i + 2`` will be. Both are known for every row of an accepted path: the
target's features at the path, and the tokens that follow it. So ``observe`` runs the
head over the accepted path alone, with true features, and commits what that adds; what
the head guessed while drafting was read through windows and never written.

The row of the last committed pair stands for the anchor. Its output is kept: it says
the first draft, and drafting goes on from it.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Context, Verdict, Window
from specjax.decoding.windows import keep_valid


@runtime_checkable
class FeatureHead(Protocol):
    """A network over (hidden state, next token) pairs, with a state of its own.

    Like a target it reads windows and takes in accepted paths: ``run`` changes nothing,
    ``commit`` folds rows in. ``window.tokens`` holds each row's *next* token and row 0
    stands at the position that the head's state has reached.
    """

    @property
    def vocab_size(self) -> int:
        """``V``, of the target."""
        ...

    @property
    def hidden_size(self) -> int:
        """``D``, of ``run``'s rows."""
        ...

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The target's hidden states that ``fuse`` needs."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """An empty state."""
        ...

    def fuse(self, features: dict[Tap, Array]) -> Float[Array, "B W D"]:
        """The target's features (tap -> ``[B, W, D]``) as ``run`` wants them."""
        ...

    def run(
        self, hidden: Float[Array, "B W D"], window: Window, state: Any
    ) -> tuple[Float[Array, "B W D"], Any]:
        """``(out [B, W, D], pending)``: ``out`` is what a drafted row hands on, in the
        place of fused features, to the rows below it; ``logits`` reads it too."""
        ...

    def logits(self, out: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """Of the token after each row's own, over the target's vocabulary; ``-inf``
        for tokens that the head cannot say."""
        ...

    def commit(self, state: Any, pending: Any, acceptance: Acceptance) -> Any:
        """The state after the accepted rows."""
        ...


class HeadState(struct.PyTreeNode):
    """What a head remembers of the committed pairs."""

    own: Any
    """The head's state."""
    lengths: jax.Array  # [B] int32: pairs taken in
    out: jax.Array  # [B, D]: the output of the last pair's row


class OwnHead(struct.PyTreeNode):
    """The part of a drafter that is the same whatever it makes of its head."""

    head: FeatureHead

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.head.vocab_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The hidden states that the head reads."""
        return self.head.taps

    def init(self, batch: int, capacity: int) -> HeadState:
        """An empty state. A row with no pair yet (a prompt of one token) has nothing
        to draft from: ``lengths`` is 0."""
        return HeadState(
            own=self.head.init(batch, capacity),
            lengths=jnp.zeros((batch,), jnp.int32),
            out=jnp.zeros((batch, self.head.hidden_size), jnp.float32),
        )

    def observe(
        self,
        state: HeadState,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> HeadState:
        """Take in the accepted pairs; whatever was guessed is forgotten."""
        return take_in(self.head, state, verdict, acceptance)


def take_in(
    head: FeatureHead, state: HeadState, verdict: Verdict, acceptance: Acceptance
) -> HeadState:
    """The state after the pairs of an accepted path."""
    out, pending = read_pairs(head, state, verdict, acceptance)
    num = acceptance.num_tokens
    last = jnp.maximum(num - 1, 0)[:, None]
    said = along(out, last)[:, 0].astype(state.out.dtype)
    return HeadState(
        own=head.commit(state.own, pending, rows_taken(acceptance, out)),
        lengths=state.lengths + num,
        out=jnp.where((num > 0)[:, None], said, state.out),
    )


def read_pairs(
    head: FeatureHead, state: HeadState, verdict: Verdict, acceptance: Acceptance
) -> tuple[Float[Array, "B P D"], Any]:
    """What the rows of an accepted path hand on, and what to commit of them."""
    features = {tap: verdict.features[tap] for tap in head.taps}
    hidden = head.fuse(jax.tree.map(lambda x: along(x, acceptance.path), features))
    window = pairs_window(acceptance, state.lengths)
    return head.run(hidden, window, state.own)


def rows_taken(acceptance: Acceptance, out: Float[Array, "B W D"]) -> Acceptance:
    """Which rows of a window of pairs are kept: the first ones, by name.

    The number is the acceptance's, but one that waits for the pass: else XLA may write
    the cache before the pass has read it, and for that copies it, every round.
    """
    rows = jnp.arange(acceptance.tokens.shape[1], dtype=jnp.int32)
    path = jnp.where(acceptance.taken, rows, 0)
    num = acceptance.num_tokens
    waited = jnp.minimum(num, num + jnp.any(jnp.isnan(out), (1, 2)).astype(num.dtype))
    return Acceptance(path=path, tokens=acceptance.tokens, num_tokens=waited)


def pairs_window(acceptance: Acceptance, lengths: Int[Array, " B"]) -> Window:
    """The accepted path as rows of a head: a chain of the tokens that follow it."""
    width = acceptance.tokens.shape[1]
    valid = acceptance.taken
    causal = jnp.broadcast_to(
        jnp.tril(jnp.ones((width, width), bool)), (*valid.shape[:1], width, width)
    )
    return Window(
        tokens=jnp.where(valid, acceptance.tokens, 0),
        positions=lengths[:, None] + jnp.arange(width, dtype=jnp.int32),
        ancestors=keep_valid(causal, valid),
        valid=valid,
    )


def along(x: Float[Array, "B W D"], rows: Int[Array, "B P"]) -> Float[Array, "B P D"]:
    """The rows of a window that a path names."""
    return jnp.take_along_axis(x, rows[:, :, None], axis=1, mode="clip")


def anchor_window(context: Context) -> Window:
    """The anchor alone: the last token of the text."""
    anchor = context.anchor[:, None]
    return Window(
        tokens=jnp.maximum(anchor, 0),
        positions=jnp.maximum(context.lengths - 1, 0)[:, None],
        ancestors=jnp.ones((*anchor.shape, 1), bool),
        valid=jnp.ones(anchor.shape, bool),
    )


def safe_rows(logits: Float[Array, "B W V"]) -> Float[Array, "B W V"]:
    """A head's logits, with rows that are no law made uniform: a draft may be anything.

    ``-inf`` stands for a token that the head cannot say, and stays.
    """
    best = logits.max(axis=-1, keepdims=True)  # NaN if any is
    return jnp.where(jnp.isfinite(best), logits, 0.0)


def check_depth(head: Any, what: str, depth: Any) -> None:
    """Refuse more drafts than there are heads, where there is one for each draft.

    JAX rebuilds pytrees with anything in the place of their parts; of those nothing is
    asked.
    """
    count = getattr(head, "num_heads", None)
    if isinstance(count, int) and isinstance(depth, int) and depth > count:
        raise ValueError(
            f"{what} {depth}: there are {count} heads, one a draft, so "
            f"{count} is the most"
        )
