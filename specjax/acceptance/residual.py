"""Residual laws: what is left of the target's law once a draft was refused."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decoding.types import Proposal


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """``max(p - q, 0)``, normalised; ``p`` where nothing is left.

    Nothing is left only where p and q are equal up to rounding, and there a draft is
    refused with a probability of that rounding's size.
    """
    return normalised(jnp.maximum(p - q, 0), otherwise=p)


def normalised(
    weights: Float[Array, "B V"], *, otherwise: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """The weights as a law; ``otherwise`` for a row without weight."""
    mass = weights.sum(axis=-1, keepdims=True)
    return jnp.where(mass > 0, weights / jnp.where(mass > 0, mass, 1), otherwise)


def without(p: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, "B V"]:
    """``p`` with the token's mass taken out, not normalised."""
    ids = jnp.arange(p.shape[-1], dtype=jnp.int32)
    return jnp.where(ids == token[:, None], 0, p)


def mass_of(p: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """``p[b, token[b]]``."""
    return jnp.take_along_axis(p, token[:, None], axis=1, mode="clip")[:, 0]


def law_of_children(
    proposal: Proposal, rows: Int[Array, " B"], like: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """The law that the children of these rows were drawn from."""
    assert proposal.log_q is not None
    picked = jnp.take_along_axis(
        proposal.log_q, rows[:, None, None], axis=1, mode="clip"
    )
    return jnp.exp(picked[:, 0].astype(like.dtype))
