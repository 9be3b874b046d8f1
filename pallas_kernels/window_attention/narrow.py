"""Caches of one byte a number, and what they are computed in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

NARROW = ("int8", "float8_e4m3fn")


def is_narrow(dtype: Any) -> bool:
    """Whether a cache of this dtype holds codes rather than numbers."""
    return jnp.dtype(dtype).name in NARROW


def computed_in(cache: Any, window: Any) -> jnp.dtype:
    """The dtype of products: the cache's own, or the window's where that is wider."""
    return jnp.dtype(window if is_narrow(cache) else cache)


def check_scales(k_cache: Any, v_cache: Any, k_scale: Any, v_scale: Any) -> None:
    """Raise ``ValueError`` unless scales go with these caches.

    int8 needs them, float8 may have them, and wider caches have none.
    """
    dtype = jnp.dtype(k_cache.dtype).name
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not is_narrow(cache.dtype) and not jnp.issubdtype(cache.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {cache.dtype}: floating numbers, or codes of "
                f"{' or '.join(NARROW)}, are expected"
            )
    if not is_narrow(k_cache.dtype) and not is_narrow(v_cache.dtype):
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"k_scale and v_scale: a {dtype} cache has no scales")
        return
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache is {v_cache.dtype}: make it {dtype}, as k_cache is")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale: give both, or neither")
    if k_scale is None:
        if dtype == "int8":
            raise ValueError("an int8 cache needs k_scale and v_scale")
        return
    for name, scale, cache in (
        ("k_scale", k_scale, k_cache),
        ("v_scale", v_scale, v_cache),
    ):
        if scale.shape != cache.shape[:3] or scale.dtype != jnp.float32:
            raise ValueError(
                f"{name} is {scale.dtype}{list(scale.shape)}: one float32 a slot and "
                f"head is expected, {list(cache.shape[:3])}"
            )
