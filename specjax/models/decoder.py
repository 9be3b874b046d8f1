"""The hybrid decoder: a ``Target`` made of blocks of any mixers and feed-forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.decoding.interfaces import FINAL, Tap
from specjax.decoding.types import Acceptance, Verdict, Window
from specjax.decoding.windows import spread_bad
from specjax.models.committed import (
    CommittedState,
    blank,
    empty_state,
    release,
    spoil,
)
from specjax.models.config import DecoderConfig
from specjax.models.ends import Ends
from specjax.models.linear import Linear, fewest_rows
from specjax.models.norms import RMSNorm
from specjax.models.pages import Paged, admit, room
from specjax.models.recurrence import Snapshot
from specjax.models.stack import (
    Block,
    canonical_mixers,
    commit_mixers,
    mixers_of,
    run_blocks,
)


class Decoder(struct.PyTreeNode):
    """Parameters and configuration; the methods are the ``Target`` protocol.

    The residual stream and everything outside the products is float32 (float64 for
    float64 weights), whatever the weights are stored as.
    """

    config: DecoderConfig = struct.field(pytree_node=False)
    embedding: jax.Array  # [V, D]
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear  # shares ``embedding`` when tied and of one weight type
    paged: Paged | None = struct.field(pytree_node=False, default=None)
    """Keep keys and values in a pool of pages; ``None``: one stretch a row."""
    tile: int | None = struct.field(pytree_node=False, default=None)
    """Of the invariant mode: window rows come in multiples of this."""

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.config.vocab_size

    @property
    def mixers(self) -> tuple[Any, ...]:
        """One a block; ``None`` where it has none."""
        return mixers_of(self.blocks)

    @property
    def ends(self) -> Ends:
        """Embedding and head, which draft heads may share."""
        config = self.config
        return Ends(
            self.embedding, self.head, config.embedding_scale, config.logit_softcap
        )

    @property
    def widest(self) -> int | None:
        """The most rows of a window with drafts: of a strategy that keeps states by
        row, so that all windows of a run pend alike. ``None``: any number."""
        strategies = [
            getattr(mixer.config, "recurrence", None) for mixer in self.mixers if mixer
        ]
        limits = [s.rows for s in strategies if isinstance(s, Snapshot)]
        return min(limits, default=None)

    def init(self, batch: int, capacity: int) -> CommittedState:
        """An empty state."""
        return empty_state(self.mixers, batch, capacity, self.paged)

    def admit(self, prompt_lengths: Sequence[int]) -> None:
        """Raise ``PoolError`` if the pool cannot hold these prompts."""
        if self.paged is not None:
            admit(self.paged, prompt_lengths)

    def room(
        self,
        state: CommittedState,
        most: Int[Array, " B"],
        active: Bool[Array, " B"],
    ) -> Int[Array, " B"] | None:
        """Tokens that each row may commit next, all together; ``None``: no limit."""
        if state.pages is None:
            return None
        return room(state.pages, state.lengths, most, active)

    def release(self, state: CommittedState, rows: Bool[Array, " B"]) -> CommittedState:
        """The state in which these rows are empty and hold no page."""
        return release(state, rows)

    def verify(
        self,
        state: CommittedState,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """One pass over the window; a tap is what ``interfaces.Tap`` says."""
        wide = pad_rows(window, self._rows_needed(*window.tokens.shape))
        ends = self.ends
        x = ends.embed(wide.tokens)
        streams, pending = run_blocks(self.blocks, x, wide, state)
        seen: dict[Tap, jax.Array] = dict(enumerate(streams))
        final = self.norm(streams[-1])
        seen[FINAL] = final
        rows = ends.logits(final) if logits == "all" else None
        finite = jnp.all(jnp.isfinite(final if rows is None else rows), axis=-1)
        bad = spread_bad(~finite, wide.ancestors)
        verdict = Verdict(
            logits=rows,
            features={tap: seen[tap] for tap in taps},
            pending=pending,
            bad=bad,
        )
        return jax.tree.map(lambda leaf: leaf[:, : window.width], verdict)

    def commit(
        self, state: CommittedState, pending: Any, acceptance: Acceptance
    ) -> CommittedState:
        """Fold the accepted path into every block's state."""
        return commit_mixers(self.mixers, state, pending, acceptance)

    def canonical(self, state: CommittedState) -> CommittedState:
        """The comparable form of a state: see each mixer's ``canonical``."""
        return canonical_mixers(self.mixers, state)

    def blank(self, state: CommittedState, value: float | jax.Array) -> CommittedState:
        """The state with ``value`` wherever it holds nothing that was committed."""
        return blank(self.mixers, state, value)

    def spoil(self, state: CommittedState, row: int) -> CommittedState:
        """The state with NaN in all that it holds for one row: for tests."""
        return spoil(self.mixers, state, row)

    def _rows_needed(self, batch: int, width: int) -> int:
        """Window rows that bring ``batch`` rows up to the products' fast path."""
        if self.tile is not None:
            return self.tile * -(-width // self.tile)
        return -(-fewest_rows(self.head.weight.dtype) // batch)


def pad_rows(window: Window, width: int) -> Window:
    """Add padding rows up to ``width``: they are valid nowhere and seen by nobody."""
    missing = width - window.width
    if missing <= 0:
        return window
    batch = window.tokens.shape[0]
    last = window.positions[:, -1:]
    eye = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    inner = jnp.pad(window.ancestors, [(0, 0), (0, missing), (0, missing)])
    zeros: Bool[Array, "B missing"] = jnp.zeros((batch, missing), bool)
    return Window(
        tokens=jnp.pad(window.tokens, [(0, 0), (0, missing)]),
        positions=jnp.concatenate([window.positions, *[last] * missing], axis=1),
        ancestors=inner | eye,
        valid=jnp.concatenate([window.valid, zeros], axis=1),
    )
