"""Speculative decoding in JAX: draft, verify, accept, commit."""

__version__ = "0.1.0"
