"""The hybrid decoder: a ``Target`` made of blocks of any mixers and feed-forwards."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.interfaces import FINAL, Tap
from specjax.decoding.kinds import kinds
from specjax.decoding.types import Acceptance, Verdict, Window
from specjax.decoding.windows import spread_bad
from specjax.models.committed import (
    CommittedState,
    blank,
    empty_state,
    lend_table,
    release,
    spoil,
    take_back_table,
)
from specjax.models.config import DecoderConfig
from specjax.models.linear import Linear, accumulator, fewest_rows
from specjax.models.mixers.base import Aids, Chosen, RotaryTables
from specjax.models.norms import RMSNorm
from specjax.models.pages import Paged, PageTable, admit, room, take
from specjax.models.rope import Rope


class Sublayer(struct.PyTreeNode):
    """``x += post_norm(body(norm x))``; most have no ``post_norm``."""

    norm: RMSNorm
    body: Any
    post_norm: RMSNorm | None = None

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """What the body made, added to the residual stream."""
        return x + (y if self.post_norm is None else self.post_norm(y))


class Block(struct.PyTreeNode):
    """A mixer and a feed-forward, one after the other. One of them may be absent."""

    mixer: Sublayer | None
    feedforward: Sublayer | None


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
        return tuple(b.mixer and b.mixer.body for b in self.blocks)

    def init(self, batch: int, capacity: int) -> CommittedState:
        """An empty state."""
        return empty_state(self.mixers, batch, capacity, self.paged)

    def admit(self, prompt_lengths: Sequence[int]) -> None:
        """Raise ``PoolError`` if the pool cannot hold these prompts."""
        if self.paged is not None:
            admit(self.paged, prompt_lengths)

    def room(
        self, state: CommittedState, most: int, active: Bool[Array, " B"]
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
        x = self._embed(wide)
        tables = self._rotary_tables(wide.positions, x.dtype)
        seen: dict[Tap, jax.Array] = {0: x}
        pending = []
        chosen = None
        for depth, (block, block_state) in enumerate(
            zip(self.blocks, self._lent(state, state.pages), strict=True), start=1
        ):
            aids = Aids(rotary=tables.get(_rope(block)), chosen=chosen)
            x, added, chosen = _run_block(
                block, x, wide, block_state, state.lengths, aids, kinds=kinds(block)
            )
            seen[depth] = x
            pending.append(added)
        final = self.norm(x)
        seen[FINAL] = final
        rows = self._logits(final) if logits == "all" else None
        finite = jnp.all(jnp.isfinite(final if rows is None else rows), axis=-1)
        bad = spread_bad(~finite, wide.ancestors)
        verdict = Verdict(
            logits=rows,
            features={tap: seen[tap] for tap in taps},
            pending=tuple(pending),
            bad=bad,
        )
        return jax.tree.map(lambda leaf: leaf[:, : window.width], verdict)

    def commit(
        self, state: CommittedState, pending: Any, acceptance: Acceptance
    ) -> CommittedState:
        """Fold the accepted path into every block's state."""
        pages = state.pages and take(state.pages, state.lengths, acceptance)
        blocks = tuple(
            mixer
            and _commit_block(
                mixer, old, added, acceptance, state.lengths, kinds=kinds(mixer)
            )
            for mixer, old, added in zip(
                self.mixers, self._lent(state, pages), pending, strict=True
            )
        )
        return CommittedState(
            take_back_table(blocks), state.lengths + acceptance.num_tokens, pages
        )

    def canonical(self, state: CommittedState) -> CommittedState:
        """The comparable form of a state: see each mixer's ``canonical``."""
        blocks = tuple(
            mixer and mixer.canonical(old, state.lengths)
            for mixer, old in zip(
                self.mixers, self._lent(state, state.pages), strict=True
            )
        )
        return CommittedState(blocks, state.lengths)

    def blank(self, state: CommittedState, value: float | jax.Array) -> CommittedState:
        """The state with ``value`` wherever it holds nothing that was committed."""
        return blank(self.mixers, state, value)

    def spoil(self, state: CommittedState, row: int) -> CommittedState:
        """The state with NaN in all that it holds for one row: for tests."""
        return spoil(self.mixers, state, row)

    def _lent(self, state: CommittedState, pages: PageTable | None) -> tuple[Any, ...]:
        return lend_table(self.mixers, state.blocks, pages)

    def _embed(self, window: Window) -> Float[Array, "B W D"]:
        dtype = accumulator(self.embedding.dtype)
        # Bound to the tokens: XLA's CPU backend gathers bfloat16 by way of float32,
        # and would turn the whole matrix before a loop of rounds, at every call.
        matrix, tokens = jax.lax.optimization_barrier((self.embedding, window.tokens))
        rows = matrix.at[tokens].get(mode="clip").astype(dtype)
        if self.config.embedding_scale == 1.0:
            return rows
        # of the weights' precision, as in the model's own code
        scale = jnp.asarray(self.config.embedding_scale, self.embedding.dtype)
        return rows * scale.astype(dtype)

    def _logits(self, final: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        rows, cap = self.head(final), self.config.logit_softcap
        return rows if cap is None else cap * jnp.tanh(rows / cap)

    def _rotary_tables(
        self, positions: Int[Array, "B W"], dtype: jnp.dtype
    ) -> dict[Any, RotaryTables]:
        ropes = {rope for rope in map(_rope, self.blocks) if rope is not None}
        return {rope: RotaryTables(*rope.tables(positions, dtype)) for rope in ropes}

    def _rows_needed(self, batch: int, width: int) -> int:
        """Window rows that bring ``batch`` rows up to the products' fast path."""
        if self.tile is not None:
            return self.tile * -(-width // self.tile)
        return -(-fewest_rows(self.head.weight.dtype) // batch)


# Blocks of one kind have one shape, so under jit they are traced and lowered once, not
# once a block: for thirty blocks that is most of the time to a first token. XLA inlines
# the calls, and the compiled program is the unrolled one.


@partial(jax.jit, static_argnames="kinds")
def _run_block(
    block: Block,
    x: jax.Array,
    window: Window,
    state: Any,
    lengths: jax.Array,
    aids: Aids,
    *,
    kinds: Hashable,
) -> tuple[jax.Array, Any, Chosen | None]:
    added = None
    if block.mixer is not None:
        mixer, normed = block.mixer.body, block.mixer.norm(x)
        if getattr(mixer, "indexer", None) is not None:
            chosen = mixer.choose(normed, window, state, lengths, aids)
            aids = aids.replace(chosen=chosen)
        y, added = mixer.mix(normed, window, state, lengths, aids)
        x = block.mixer.add(x, y)
    if block.feedforward is not None:
        y = block.feedforward.body(block.feedforward.norm(x), window.valid)
        x = block.feedforward.add(x, y)
    return x, added, aids.chosen


@partial(jax.jit, static_argnames="kinds")
def _commit_block(
    mixer: Any,
    state: Any,
    pending: Any,
    acceptance: Acceptance,
    lengths: jax.Array,
    *,
    kinds: Hashable,
) -> Any:
    return mixer.commit(state, pending, acceptance, lengths)


def _rope(block: Block) -> Rope | None:
    """How the block's mixer turns its heads, if it does."""
    return block.mixer and getattr(block.mixer.body.config, "rope", None)


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
