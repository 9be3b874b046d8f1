"""Window attention to compile ahead of time: single calls, and caches in a loop."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot.case import Case, array
from pallas_kernels.window_attention import api
from pallas_kernels.window_attention.gpu_plan import MOST_DIM, MOST_LATENT
from pallas_kernels.window_attention.specs import MODELS, AttentionSpec

BATCH = 3
"""With it no cache has the shape of something else."""


TPU, GPU = ("tpu",), ("cuda",)
BOTH = TPU + GPU

NARROW = {jnp.int8: "-int8", jnp.float8_e4m3fn: "-fp8"}


def _call(
    x: dict[str, Any], lengths: jax.Array, spec: AttentionSpec, scale: float = 0.125
) -> jax.Array:
    """One layer's attention, kernel or error."""
    k, k_cache = x["k"], x["k_cache"]
    return api.window_attention(
        x["q"],
        k,
        k if spec.latent else x["v"],
        k_cache,
        k_cache if spec.latent else x["v_cache"],
        lengths,
        x["ancestors"],
        scale=scale,
        positions=lengths[:, None] + jnp.sum(x["ancestors"], -1, dtype=jnp.int32) - 1,
        slots=x["slots"],
        table=x["table"],
        reach=spec.reach,
        sinks=x["sinks"],
        softcap=spec.softcap,
        k_scale=x["k_scale"],
        v_scale=x["v_scale"],
        implementation="require",
    )


def _inputs(
    spec: AttentionSpec,
    width: int,
    capacity: int,
    dtype: Any,
    size: int | None = None,
    narrow: Any = None,
    batch: int = BATCH,
) -> dict[str, Any]:
    capacity = capacity if spec.reach is None else spec.reach
    heads, dim = spec.kv_heads, spec.dim
    rows = array(batch, width, heads, dim, dtype=dtype)
    places = (batch, heads, capacity)
    table = None
    if size is not None:
        blocks = capacity // size
        places = (batch * blocks + 5, heads, size)
        table = array(batch, blocks, dtype=jnp.int32)
    cache = array(*places, dim, dtype=dtype if narrow is None else narrow)
    scales = None if narrow is None else array(*places, dtype=jnp.float32)
    return {
        "table": table,
        "q": array(batch, width, spec.q_heads, dim, dtype=dtype),
        "k": rows,
        "v": None if spec.latent else rows,
        "k_cache": cache,
        "v_cache": None if spec.latent else cache,
        "k_scale": scales,
        "v_scale": scales,
        "ancestors": array(batch, width, width, dtype=jnp.bool_),
        "slots": None
        if spec.reach is None
        else array(batch, capacity, dtype=jnp.int32),
        "sinks": array(spec.q_heads, dtype=jnp.float32) if spec.sinks else None,
    }


def _case(
    model: str,
    width: int = 8,
    capacity: int = 8192,
    dtype: Any = jnp.bfloat16,
    size: int | None = None,
    narrow: Any = None,
    platforms: tuple[str, ...] = BOTH,
    batch: int = BATCH,
) -> Case:
    spec = MODELS[model]
    x = _inputs(spec, width, capacity, dtype, size, narrow, batch)
    name = f"{model}-w{width}" + ("" if dtype == jnp.bfloat16 else "-f32")
    name += NARROW.get(narrow, "")
    name += "" if size is None else f"-pages-{size}"
    name += "" if batch == BATCH else f"-b{batch}"
    return Case(
        operation="window_attention",
        name=name,
        function=functools.partial(_call, spec=spec),
        arguments=(x, array(batch, dtype=jnp.int32)),
        kept=_kept(x),
        platforms=_able(spec, platforms),
    )


def _able(spec: AttentionSpec, platforms: tuple[str, ...]) -> tuple[str, ...]:
    """Older JAX makes no kernel of the widest for a GPU."""
    most = MOST_LATENT if spec.latent else MOST_DIM
    return platforms if spec.dim <= most else TPU


def _kept(caches: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of what must not be copied."""
    arrays = (caches["k_cache"], caches["k_scale"])
    return tuple(x.shape for x in arrays if x is not None)


def _rounds(
    caches: dict[str, jax.Array | None],
    rest: dict[str, Any],
    lengths: jax.Array,
    spec: AttentionSpec,
) -> tuple[dict[str, Any], jax.Array]:
    """A few rounds as the decoder makes them: read, and write a row behind the rest.

    Which row is written follows from what was read. If nothing did, a program would
    be free to write first, and a GPU's compiler copies what it might write too early.
    """

    def write(
        cache: jax.Array, rows: jax.Array, lengths: jax.Array, chosen: jax.Array
    ) -> jax.Array:
        for b in range(BATCH):
            new = jax.lax.dynamic_slice_in_dim(rows[b], chosen[b], 1, 0)
            ends = (jnp.int32(0),) * (cache.ndim - 3)
            at = (jnp.int32(b), jnp.int32(0), lengths[b], *ends)
            cache = jax.lax.dynamic_update_slice(cache, new.swapaxes(0, 1)[None], at)
        return cache

    def added(name: str, cache: jax.Array) -> jax.Array:
        """Whatever has the shape of what a codec makes of the window's rows."""
        rows = rest[name[0]]
        return (rows if cache.ndim == 4 else rows[..., 0]).astype(cache.dtype)

    def one(_: jax.Array, carry: Any) -> Any:
        caches, lengths, read = carry
        found = _call({**rest, **caches}, lengths, spec)
        chosen = (found[:, 0, 0, 0] > 0).astype(jnp.int32)
        caches = {
            name: None
            if cache is None
            else write(cache, added(name, cache), lengths, chosen)
            for name, cache in caches.items()
        }
        return caches, lengths + 1, read + found

    start = jnp.zeros(rest["q"].shape, jnp.float32)
    caches, _, read = jax.lax.fori_loop(0, 4, one, (caches, lengths, start))
    return caches, read


def _loop(
    model: str,
    width: int = 4,
    capacity: int = 4096,
    narrow: Any = None,
    platforms: tuple[str, ...] = BOTH,
) -> Case:
    spec = MODELS[model]
    x = _inputs(spec, width, capacity, jnp.bfloat16, narrow=narrow)
    caches = {
        name: x.pop(name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")
    }
    return Case(
        operation="window_attention",
        name=f"{model}{NARROW.get(narrow, '')}-loop",
        function=functools.partial(_rounds, spec=spec),
        arguments=(caches, x, array(BATCH, dtype=jnp.int32)),
        donated=(0,),
        kept=_kept(caches),
        platforms=_able(spec, platforms),
    )


CASES = [
    _case("llama-3-8b", width=1),
    _case("llama-3-8b"),
    _case("llama-3-8b", width=16),
    _case("llama-3-8b", width=64, capacity=32768),
    _case("llama-3-8b", dtype=jnp.float32, platforms=TPU),
    _case("llama-3.2-1b"),
    _case("qwen3.5-27b"),
    _case("phi-2", capacity=2003, platforms=TPU),
    _case("phi-2", width=5, capacity=2008),
    _case("phi-3-mini"),
    _case("gemma-2-2b"),
    _case("gpt-oss-20b"),
    _case("gpt-oss-20b-local"),
    _case("falcon-7b"),
    _case("deepseek-v3", width=1),
    _case("deepseek-v3"),
    _case("llama-3-8b", size=16),
    _case("llama-3-8b", size=128),
    _case("llama-3.2-1b", size=128),
    _case("deepseek-v3", size=128),
    # of one row, whose caches two cores share
    _case("llama-3-8b", batch=1, platforms=TPU),
    _case("llama-3-8b", batch=1, size=128, platforms=TPU),
    _case("llama-3-8b", batch=1, capacity=16384, narrow=jnp.int8, platforms=TPU),
    _case("deepseek-v3", batch=1, width=1, capacity=32768, platforms=TPU),
    _loop("llama-3-8b"),
    _loop("llama-3.2-1b"),
    _loop("deepseek-v3"),
    *[
        case
        for narrow in (jnp.int8, jnp.float8_e4m3fn)
        for case in (
            _case("llama-3-8b", narrow=narrow),
            _case("llama-3-8b", narrow=narrow, size=128),
            _loop("llama-3-8b", narrow=narrow),
            _case("llama-3-8b", narrow=narrow, width=64, platforms=GPU),
            _case("llama-3-8b", narrow=narrow, size=32, platforms=GPU),
            _case("llama-3.2-1b", narrow=narrow, platforms=GPU),
            _case("phi-2", width=5, capacity=2008, narrow=narrow, platforms=GPU),
            _case("qwen3.5-27b", narrow=narrow, platforms=GPU),
            _case("qwen3.5-27b", narrow=narrow, width=64, platforms=GPU),
            _case("gpt-oss-20b-local", narrow=narrow, platforms=GPU),
            _loop("llama-3.2-1b", narrow=narrow, platforms=GPU),
        )
    ],
    _case("llama-3-8b", dtype=jnp.float32, narrow=jnp.int8, platforms=TPU),
]
