"""A draft model of another vocabulary, made to look like one of the target's.

Tokens that both vocabularies hold are told by what they spell. The draft model can only
say these: the other tokens' logits are ``-inf``, so that they are never drafted, and
what is left is the true law of its drafts. (Timor et al., 2502.05202, "TLI".)

Committed text goes the other way, token by token, so that both models stay at the same
position. A target token that the draft model does not have is given to it as a
stand-in, one token of its own. What it then says may be beside the point; the output is
the target's whatever it says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.decoding.interfaces import Tap, Target
from specjax.decoding.types import NO_TOKEN, Acceptance, Verdict, Window


class Vocabulary(struct.PyTreeNode):
    """How the target's ids read in the draft model's vocabulary."""

    said: jax.Array  # [V] int32: the same token there, or NO_TOKEN
    fed: jax.Array  # [V] int32: what stands for it in the draft model's text

    @property
    def size(self) -> int:
        """``V``, of the target."""
        return self.said.shape[0]

    @property
    def shared(self) -> int:
        """Tokens that both have. Not inside ``jit``."""
        return int((self.said != NO_TOKEN).sum())


def match(
    target: Sequence[Hashable | None],
    draft: Sequence[Hashable | None],
    target_size: int,
    draft_size: int,
    *,
    same: Iterable[tuple[int, int]] = (),
    stand_ins: dict[int, int] | None = None,
    stand_in: int = 0,
) -> Vocabulary:
    """Match two vocabularies by what their tokens spell, ``None`` for no token.

    The models' sizes may be larger than their tokenizers', by padding; padded ids are
    no tokens. ``same`` are pairs of a target's id and a draft model's that mean the
    same, however they are spelled: ends of text. Tokens that are not shared are fed as
    ``stand_ins`` says, or else as ``stand_in``.

    Raises ``ValueError`` if there is no token that both have, or an id is out of range.
    """
    ids = {token: i for i, token in enumerate(draft[:draft_size]) if token is not None}
    said = np.full((target_size,), NO_TOKEN, np.int32)
    for i, token in enumerate(target[:target_size]):
        if token is not None:
            said[i] = ids.get(token, NO_TOKEN)
    for ours, theirs in same:
        _check_id(ours, target_size, "target")
        said[said == theirs] = NO_TOKEN  # no token of the draft model means two
        said[ours] = theirs
    fed = np.full((target_size,), stand_in, np.int32)
    for ours, theirs in (stand_ins or {}).items():
        _check_id(ours, target_size, "target")
        fed[ours] = theirs
    fed = np.where(said != NO_TOKEN, said, fed)
    if not (said != NO_TOKEN).any():
        raise ValueError(
            "the draft model's vocabulary and the target's have no token in common"
        )
    for theirs in (int(fed.min()), int(fed.max()), int(said.max())):
        _check_id(theirs, draft_size, "draft model")
    return Vocabulary(jnp.asarray(said), jnp.asarray(fed))


def _check_id(index: int, size: int, whose: str) -> None:
    if not 0 <= index < size:
        raise ValueError(f"id {index} is not in the {whose}'s vocabulary of {size}")


class Translated(struct.PyTreeNode):
    """A target for drafters: ``model`` behind the vocabulary of another one."""

    model: Target
    vocabulary: Vocabulary

    @property
    def vocab_size(self) -> int:
        """``V``, of the one it drafts for."""
        return self.vocabulary.size

    @property
    def canonical(self) -> Any:
        """The model's, if it has one."""
        return self.model.canonical  # type: ignore[attr-defined]

    def init(self, batch: int, capacity: int) -> Any:
        """The model's."""
        return self.model.init(batch, capacity)

    def verify(
        self,
        state: Any,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """The model's pass over the window in its own ids; logits ``[B, W, V]``."""
        fed = self.vocabulary.fed.at[window.tokens].get(mode="clip")
        own = self.model.verify(
            state, window.replace(tokens=fed), taps=taps, logits=logits
        )
        if own.logits is None:
            return own
        said = self.vocabulary.said
        there = own.logits.at[..., jnp.maximum(said, 0)].get(mode="clip")
        return own.replace(logits=jnp.where(said >= 0, there, -jnp.inf))

    def commit(self, state: Any, pending: Any, acceptance: Acceptance) -> Any:
        """The model's."""
        return self.model.commit(state, pending, acceptance)
