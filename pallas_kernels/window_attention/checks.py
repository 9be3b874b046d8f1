"""Window attention to check and to time: models, batches, widths and lengths."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.check import Check, Library, Planned
from pallas_kernels.platforms import Implementation
from pallas_kernels.window_attention import api, library
from pallas_kernels.window_attention.problems import random_call
from pallas_kernels.window_attention.specs import MODELS

TIMED = ("llama-3-8b", "qwen3-4b", "gpt-oss-20b", "qwen3.5-27b", "deepseek-v3")
NARROW = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""Caches of ``TIMED[0]``, besides those in bfloat16."""
TOLERANCE = 2e-2
"""Of bfloat16: weights are rounded before the last product, values are near 1."""


def make_checks(*, quick: bool, seed: int) -> Iterator[Planned]:
    """Quick: every model once, small."""
    if quick:
        for model in MODELS:
            yield _planned(model, batch=2, width=3, length=150, seed=seed)
        for narrow in NARROW:
            yield _planned(TIMED[0], 2, 3, 150, seed, narrow=narrow)
        return
    for model in TIMED:
        for batch, length in ((1, 1024), (1, 32768), (8, 8192), (64, 2048)):
            for width in (1, 2, 4, 8, 16):
                later = width not in (1, 8) or length == 1024
                yield _planned(model, batch, width, length, seed, later)
    for narrow in NARROW:
        for batch, length in ((8, 8192), (64, 2048)):
            for width in (1, 8):
                yield _planned(TIMED[0], batch, width, length, seed, narrow=narrow)


def _planned(
    model: str,
    batch: int,
    width: int,
    length: int,
    seed: int,
    later: bool = False,
    narrow: str | None = None,
) -> Planned:
    make = functools.partial(_check, model, batch, width, length, seed, narrow)
    return Planned(f"{_family(model, batch, length, narrow)}-W{width}", make, later)


def _family(model: str, batch: int, length: int, narrow: str | None) -> str:
    kept = "" if narrow is None else f"-{narrow}"
    return f"{model}{kept}/B{batch}-T{length}"


def _check(
    model: str, batch: int, width: int, length: int, seed: int, narrow: str | None
) -> Check:
    spec = MODELS[model]
    capacity = -(-length // 256) * 256
    lengths = [length - 7 * b for b in range(batch)]
    arrays, options = random_call(
        spec,
        lengths=lengths,
        width=width,
        capacity=capacity,
        dtype=jnp.bfloat16,
        cache=None if narrow is None else NARROW[narrow],
        seed=seed,
    )
    there = _library(dict(arrays), options)
    slots = sum(min(n, spec.reach or n) for n in lengths)
    slot = spec.dim * 2 if narrow is None else spec.dim + 4  # and a scale
    slot *= 1 if spec.latent else 2
    family = _family(model, batch, length, narrow)
    return Check(
        operation="window_attention",
        name=f"{family}-W{width}",
        run=functools.partial(_run, options=options, latent=spec.latent),
        arguments=(arrays.pop("q"), arrays),
        tolerance=TOLERANCE,
        bytes=slots * spec.kv_heads * slot,
        family=family,
        width=width,
        library=there,
    )


def _library(arrays: dict[str, Any], options: dict[str, Any]) -> Library | None:
    if library.refusal(arrays, options) is not None:
        return None
    return Library(
        library.library_name(),
        library.attention(options["scale"]),
        functools.partial(library.arguments_of, arrays),
    )


def _run(
    implementation: Implementation,
    q: jax.Array,
    rest: dict[str, Any],
    *,
    options: dict[str, Any],
    latent: bool,
) -> jax.Array:
    if latent:  # one array again, which jit has taken apart
        rest = {**rest, "v": rest["k"], "v_cache": rest["k_cache"]}
    return api.window_attention(q, **rest, **options, implementation=implementation)
