"""How long a draft gets, decided so that the output stays exact.

Verifying only some of the drafts is exact if the decision to verify a node does not
depend on that node's own token, or on a later one; what came before it and the law it
will be drawn from may decide. Dropping a draft because it looks bad is biased. With
p = (0.7, 0.3), q = (0.5, 0.5) and "verify only if the draft is token 1", the first
token comes out as (0.85, 0.15).

Here the wrong order cannot be written down: a policy is asked before the token is
drawn, and is given the law and what the tokens before it amount to.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float


@runtime_checkable
class LengthPolicy(Protocol):
    """Says, node by node, whether a draft goes on."""

    def goes_on(
        self, log_law: Float[Array, "B V"], confidence: Float[Array, " B"]
    ) -> Bool[Array, " B"]:
        """Whether another token is drafted.

        ``log_law`` is the normalised law it would be drawn from, ``confidence`` the
        probability, under the draft's own laws, of the tokens drafted before it.
        """
        ...


class Confidence(struct.PyTreeNode):
    """Goes on while the most probable next draft would be right with probability
    ``least`` or more, if the draft's own laws are to be believed.

    With ``whole`` the probability is that of the whole draft and not of its next token:
    that is what decides whether the next row is reached at all.
    """

    least: float = struct.field(pytree_node=False)
    whole: bool = struct.field(pytree_node=False, default=True)

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise ValueError(f"least = {self.least}: it must lie in [0, 1]")

    def goes_on(
        self, log_law: Float[Array, "B V"], confidence: Float[Array, " B"]
    ) -> Bool[Array, " B"]:
        """See ``LengthPolicy``."""
        best = jnp.exp(log_law.max(axis=-1))
        return (best * confidence if self.whole else best) >= self.least
