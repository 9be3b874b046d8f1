"""Keys and values that a round reserves, and those it gives back.

Source: the lecture's section on KV management. In specjax nothing is given back, for
rejected drafts are never written; what a paged engine that writes while it verifies
pays is here to compare with.
"""

from __future__ import annotations

from specjax.analysis.law.acceptance_length import chain_tau
from specjax.analysis.law.sizes import Number, at_least


def attention_kv_bytes(
    layers: int, kv_heads: int, head_dim: int, item_bytes: Number = 2.0
) -> Number:
    """Bytes a token of context: a key and a value, in each layer and head."""
    return 2 * layers * kv_heads * head_dim * item_bytes


def latent_kv_bytes(
    layers: int, latent_dim: int, rotary_dim: int, item_bytes: Number = 2.0
) -> Number:
    """The same under latent attention: one latent vector and one rotary key a layer."""
    return layers * (latent_dim + rotary_dim) * item_bytes


def reserved_bytes(k: int, kv_bytes: Number) -> Number:
    """Room a request needs before a round of ``k`` drafts, if all were accepted."""
    return (at_least("k", k, 0) + 1) * kv_bytes


def extra_blocks(k: int, block_tokens: int = 16) -> int:
    """Pages that ``k + 1`` more tokens may open, in the worst case."""
    at_least("block_tokens", block_tokens, 1)
    at_least("k", k, 0)
    return -(-(k + 1) // block_tokens)


def rolled_back_tokens(alpha: Number, k: int) -> Number:
    """Drafts a round that are rejected: k - (tau - 1)."""
    return k - (chain_tau(alpha, k) - 1)


def rolled_back_bytes(alpha: Number, k: int, kv_bytes: Number) -> Number:
    """Bytes that were written for them."""
    return rolled_back_tokens(alpha, k) * kv_bytes
