"""How a drafter picks a token, and under which settings."""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decoding.argmax import first_argmax
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.noise import Stream, gumbel_of, round_keys, sample
from specjax.decoding.types import Context, Sampling


class Pick(enum.Enum):
    """What is drafted of a law."""

    COUPLED = "coupled"
    """The draw that the target itself would make with the row's seed, were this its
    law: it agrees with the target most often. Given the seed it is deterministic."""
    DRAWN = "drawn"
    """An independent draw; its law goes into ``log_q``, for min(1, p/q) rules."""
    BEST = "best"
    """The most probable token."""

    @property
    def law(self) -> ProposalLaw:
        """What a rule may assume of a chain picked like this."""
        drawn = self is Pick.DRAWN
        return ProposalLaw.INDEPENDENT if drawn else ProposalLaw.DETERMINISTIC


@dataclasses.dataclass(frozen=True)
class Warping:
    """Settings of the drafter's own, in place of the request's.

    Exactness does not depend on them, for a rule compares with the law that was drawn
    from. Rows at temperature 0 stay at 0.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature <= 1e6:
            given = self.temperature
            raise ValueError(f"temperature = {given}: it must lie in 1e-6 .. 1e6")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"{self}: top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1")

    def apply(self, sampling: Sampling, batch: int) -> Sampling:
        """The request's settings, with these in place of its own."""
        if sampling.temperature is None:
            return sampling
        full = jnp.full((batch,), self.temperature, jnp.float32)
        return sampling.replace(
            temperature=jnp.where(sampling.temperature > 0, full, 0.0),
            top_k=jnp.full((batch,), self.top_k, jnp.int32) if self.top_k else None,
            top_p=_unless(self.top_p, 1.0, batch),
            min_p=_unless(self.min_p, 0.0, batch),
        )


def _unless(value: float, default: float, batch: int) -> jax.Array | None:
    return None if value == default else jnp.full((batch,), value, jnp.float32)


def pick(
    how: Pick,
    scores: Float[Array, "B V"],
    context: Context,
    positions: Int[Array, " B"],
    node: jax.Array | int,
) -> Int[Array, " B"]:
    """A token of the unnormalised log-law ``scores``, to stand at ``positions``.

    ``node`` numbers the draws of a round.
    """
    if how is Pick.BEST or context.sampling.temperature is None:
        return first_argmax(scores)
    if how is Pick.COUPLED:
        return sample(scores, context.seeds, positions)
    return first_argmax(scores + draft_noise(context, node, scores.shape[-1]))


def draft_noise(
    context: Context, node: jax.Array | int, size: int
) -> Float[Array, "B size"]:
    """Gumbel noise for one draw of this round: a stream that no rule draws from."""
    anchors = jnp.maximum(context.lengths - 1, 0)
    nodes = jnp.broadcast_to(jnp.asarray(node, jnp.int32), anchors.shape)
    keys = round_keys(context.seeds, anchors, Stream.DRAFT, nodes)
    return gumbel_of(keys, size)
