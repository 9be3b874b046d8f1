"""Which experts a token goes to, and with what weights.

Softmax routing is Shazeer et al. (1701.06538); sigmoid scores, the selection bias and
the groups are DeepSeek-V3's (2412.19437).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.models.axes import EMBED, EXPERT, Axes
from specjax.models.config import RouterConfig
from specjax.models.feedforward.activations import sigmoid, softmax


class Routes(NamedTuple):
    """Every row's experts, the best first, and what their outputs are multiplied by."""

    experts: Int[Array, "R k"]
    weights: Float[Array, "R k"]


class Router(struct.PyTreeNode):
    """A projection to one logit an expert, and a choice among them.

    Its weights are float32 (float64 beside float64 weights) whatever the weight type,
    and so is everything computed from them: a rounded logit is another expert.
    """

    config: RouterConfig = struct.field(pytree_node=False)
    weight: jax.Array  # [E, D]
    bias: jax.Array | None = None  # [E]
    selection_bias: jax.Array | None = None  # [E]
    axes: Axes = struct.field(pytree_node=False, default=(EXPERT, EMBED))
    """Logical names of the weight's two axes."""

    def __call__(self, x: Float[Array, "R D"]) -> Routes:
        """``k`` different experts a row; of equal scores the lower index.

        A NaN row gets indices in range, and weights that are NaN.
        """
        config = self.config
        logits = self._logits(x)
        scores = _scores(config, logits)
        ranked = scores
        if self.selection_bias is not None:
            ranked = ranked + self.selection_bias
        if config.groups > 1:
            ranked = best_groups(ranked, config.groups, config.kept_groups)
        _, experts = jax.lax.top_k(ranked, config.top_k)
        chosen = jnp.take_along_axis(scores, experts, axis=1, mode="clip")
        return Routes(experts, _weights(config, chosen))

    def _logits(self, x: Float[Array, "R D"]) -> Float[Array, "R E"]:
        logits = jax.lax.dot_general(
            x.astype(self.weight.dtype),
            self.weight,
            (((1,), (1,)), ((), ())),
            # accelerators would take fewer bits of a float32
            precision=jax.lax.Precision.HIGHEST,
        )
        return logits if self.bias is None else logits + self.bias


def _scores(config: RouterConfig, logits: Float[Array, "R E"]) -> Float[Array, "R E"]:
    if config.kind == "softmax":
        return softmax(logits)
    if config.kind == "sigmoid":
        return sigmoid(logits)
    return logits


def _weights(config: RouterConfig, chosen: Float[Array, "R k"]) -> Float[Array, "R k"]:
    weights = softmax(chosen) if config.kind == "chosen" else chosen
    if config.normalize:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / (total + config.epsilon)
    return weights * config.scale


def best_groups(
    scores: Float[Array, "R E"], groups: int, kept: int
) -> Float[Array, "R E"]:
    """Scores with minus infinity outside the ``kept`` best of ``groups`` groups.

    A group is as good as the sum of its two best experts.
    """
    rows, experts = scores.shape
    grouped = scores.reshape(rows, groups, experts // groups)
    best, _ = jax.lax.top_k(grouped, 2)
    _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), kept)
    numbers = jnp.arange(groups, dtype=chosen.dtype)
    keep = jnp.any(chosen[:, :, None] == numbers, axis=1)
    masked = jnp.where(keep[:, :, None], grouped, -jnp.inf)
    return masked.reshape(rows, experts)
