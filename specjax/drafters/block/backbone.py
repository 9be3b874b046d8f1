"""The network of the block family: a few blocks over context features and a block of
masked slots (DFlash, 2602.06036).

The block is the anchor and then mask tokens, at the positions from the anchor's on. All
of it goes through the network in one pass, on top of the cached context.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.decoding.interfaces import Tap
from specjax.decoding.types import Acceptance, Verdict, Window
from specjax.drafters.block.context import remember
from specjax.drafters.features import along, pairs_window
from specjax.models.committed import CommittedState, empty_state
from specjax.models.ends import Ends
from specjax.models.linear import Linear
from specjax.models.norms import RMSNorm
from specjax.models.stack import Block, mixers_of, run_blocks


class Backbone(struct.PyTreeNode):
    """From the target's features and an anchor to a vector a slot, and its logits."""

    fc: Linear  # [D, m * Dt]
    context_norm: RMSNorm
    blocks: tuple[Block, ...]
    """Their mixers are ``BlockAttention`` or look like it."""
    norm: RMSNorm
    ends: Ends
    """The target's own, or copies; the head may be of a smaller vocabulary."""
    draft_ids: jax.Array | None = None  # [Vd] int32: the head's rows, as target ids
    taps: tuple[Tap, ...] = struct.field(pytree_node=False, kw_only=True)
    """In the order in which ``fc`` takes them."""
    mask_token: int = struct.field(pytree_node=False, kw_only=True)
    block_size: int = struct.field(pytree_node=False, kw_only=True)
    max_positions: int = struct.field(pytree_node=False, kw_only=True)
    """The longest text it was made for; nothing here depends on it."""
    from_anchor: bool = struct.field(pytree_node=False, default=False)
    """The anchor's row is the first slot, and each slot says the token *behind* its
    position. Else the slots are the masks, and each says the token *at* its own."""
    own: tuple[str, ...] = struct.field(pytree_node=False, default=())
    """Which of ``embed_tokens`` and ``lm_head`` are not the target's."""
    multiplier: float = struct.field(pytree_node=False, default=1.0)
    """Of the head's products, before the softcap."""

    @property
    def vocab_size(self) -> int:
        """``V``, of the target."""
        return self.ends.vocab_size

    @property
    def slots(self) -> int:
        """``K``: how many tokens a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def init(self, batch: int, capacity: int) -> CommittedState:
        """No context yet."""
        return empty_state(mixers_of(self.blocks), batch, capacity, None)

    def fuse(self, features: Float[Array, "B P F"]) -> Float[Array, "B P D"]:
        """Context vectors, of the target's features side by side."""
        return self.context_norm(self.fc(features))

    def take_in(
        self, state: CommittedState, verdict: Verdict, acceptance: Acceptance
    ) -> CommittedState:
        """The state with the rows of an accepted path as context: the old anchor, and
        the drafts that were kept."""
        taps = [along(verdict.features[tap], acceptance.path) for tap in self.taps]
        context = self.fuse(jnp.concatenate(taps, axis=-1))
        window = pairs_window(acceptance, state.lengths)
        mixers = mixers_of(self.blocks)
        return remember(mixers, context, window, state, acceptance)

    def block(
        self, anchor: Int[Array, " B"], state: CommittedState
    ) -> Float[Array, "B S D"]:
        """A pass over one block, behind the last norm; the anchor's row is row 0."""
        window = self.window(anchor, state.lengths)
        embedded = self.ends.embed(window.tokens)
        streams, _ = run_blocks(self.blocks, embedded, window, state)
        return self.norm(streams[-1])

    def slot_rows(self, rows: Float[Array, "B S D"]) -> Float[Array, "B K D"]:
        """The rows of a block that draft something."""
        return rows if self.from_anchor else rows[:, 1:]

    def logits(self, rows: Float[Array, "B R D"]) -> Float[Array, "B R Vd"]:
        """Of any rows of a block, over the head's vocabulary."""
        logits = self.ends.head(rows)
        if self.multiplier != 1.0:
            logits = logits * jnp.asarray(self.multiplier, logits.dtype)
        cap = self.ends.softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def over_target(self, logits: Float[Array, "B Vd"]) -> Float[Array, "B V"]:
        """Logits over the target's vocabulary; ``-inf`` where the head has no row."""
        if self.draft_ids is None:
            return logits
        nothing = jnp.full((logits.shape[0], self.vocab_size), -jnp.inf, logits.dtype)
        return nothing.at[:, self.draft_ids].set(logits, mode="drop")

    def window(self, anchor: Int[Array, " B"], lengths: Int[Array, " B"]) -> Window:
        """The anchor and its masks; everybody sees everybody."""
        batch, size = anchor.shape[0], self.block_size
        slots = jnp.arange(size, dtype=jnp.int32)
        masks = jnp.full((batch, size), self.mask_token, jnp.int32)
        return Window(
            tokens=masks.at[:, 0].set(jnp.maximum(anchor, 0)),
            positions=lengths[:, None] + slots,
            ancestors=jnp.ones((batch, size, size), bool),
            valid=jnp.ones((batch, size), bool),
        )
