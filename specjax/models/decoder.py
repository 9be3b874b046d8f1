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
from specjax.models.config import AttentionConfig, DecoderConfig
from specjax.models.linear import Linear, accumulator, fewest_rows
from specjax.models.mixers.base import RotaryTables
from specjax.models.norms import RMSNorm


class Block(struct.PyTreeNode):
    """``x += mixer(norm x)``, then ``x += feedforward(norm x)``."""

    mixer_norm: RMSNorm
    mixer: Any
    feedforward_norm: RMSNorm
    feedforward: Any


class CommittedState(struct.PyTreeNode):
    """What the decoder remembers: one state a block, and how many tokens they hold."""

    blocks: tuple[Any, ...]
    lengths: jax.Array  # [B] int32


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

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.config.vocab_size

    def init(self, batch: int, capacity: int) -> CommittedState:
        """An empty state."""
        return CommittedState(
            blocks=tuple(b.mixer.init_state(batch, capacity) for b in self.blocks),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    def verify(
        self,
        state: CommittedState,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """One pass over the window; a tap is what ``interfaces.Tap`` says."""
        wide = pad_rows(window, self._rows_needed(window.tokens.shape[0]))
        x = self._embed(wide)
        tables = self._rotary_tables(wide.positions, x.dtype)
        seen: dict[Tap, jax.Array] = {0: x}
        pending = []
        for depth, (block, block_state) in enumerate(
            zip(self.blocks, state.blocks, strict=True), start=1
        ):
            rotary = tables.get(getattr(block.mixer.config, "rope", None))
            x, added = _run_block(
                block, x, wide, block_state, state.lengths, rotary, kinds=kinds(block)
            )
            seen[depth] = x
            pending.append(added)
        final = self.norm(x)
        seen[FINAL] = final
        rows = self.head(final) if logits == "all" else None
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
        blocks = tuple(
            _commit_block(
                block.mixer,
                old,
                added,
                acceptance,
                state.lengths,
                kinds=kinds(block.mixer),
            )
            for block, old, added in zip(
                self.blocks, state.blocks, pending, strict=True
            )
        )
        return CommittedState(blocks, state.lengths + acceptance.num_tokens)

    def canonical(self, state: CommittedState) -> CommittedState:
        """The comparable form of a state: see each mixer's ``canonical``."""
        blocks = tuple(
            block.mixer.canonical(old, state.lengths)
            for block, old in zip(self.blocks, state.blocks, strict=True)
        )
        return CommittedState(blocks, state.lengths)

    def _embed(self, window: Window) -> Float[Array, "B W D"]:
        dtype = accumulator(self.embedding.dtype)
        return self.embedding.at[window.tokens].get(mode="clip").astype(dtype)

    def _rotary_tables(
        self, positions: Int[Array, "B W"], dtype: jnp.dtype
    ) -> dict[Any, RotaryTables]:
        ropes = {
            block.mixer.rope
            for block in self.config.blocks
            if isinstance(block.mixer, AttentionConfig)
        }
        return {rope: RotaryTables(*rope.tables(positions, dtype)) for rope in ropes}

    def _rows_needed(self, batch: int) -> int:
        """Window rows that bring ``batch`` rows up to the products' fast path."""
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
    rotary: RotaryTables | None,
    *,
    kinds: Hashable,
) -> tuple[jax.Array, Any]:
    y, added = block.mixer.mix(block.mixer_norm(x), window, state, lengths, rotary)
    x = x + y
    return x + block.feedforward(block.feedforward_norm(x)), added


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
