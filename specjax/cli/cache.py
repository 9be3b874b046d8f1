"""Compiled programs are kept in the user's cache: the second start is a fast one."""

from __future__ import annotations

import os

import jax

from specjax.checkpoints.files import cache_folder


def turn_on_compilation_cache() -> None:
    """Use JAX's persistent cache, unless the user or a program has set one up."""
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    defaults = {
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in defaults.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
