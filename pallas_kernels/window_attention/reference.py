"""Window attention in plain jnp: the definition, and what runs on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_kernels.window_attention.narrow import check_scales, computed_in


def check_heads(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    reach: int | None,
    positions: jax.Array | None,
) -> None:
    """Raise ``ValueError`` for what no implementation can take."""
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}: they "
            "may differ in channels alone"
        )
    q_heads, kv_heads = q.shape[2], k_cache.shape[1]
    if not kv_heads or q_heads % kv_heads:
        raise ValueError(
            f"{q_heads} query heads, {kv_heads} KV heads: a multiple is expected"
        )
    if 0 in q.shape or 0 in k_cache.shape:
        raise ValueError(
            f"q is {list(q.shape)}, k_cache {list(k_cache.shape)}: none may be empty"
        )
    if reach is not None and (reach < 1 or positions is None):
        raise ValueError(f"reach = {reach}: it is 1 or more, and needs positions")


def window_attention(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H Dv"],
    k_cache: Real[Array, "B H T D"],
    v_cache: Real[Array, "B H T Dv"],
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    *,
    scale: float,
    positions: Int[Array, "B W"] | None = None,
    slots: Int[Array, "B T"] | None = None,
    reach: int | None = None,
    chosen: tuple[Bool[Array, "B W T"], Bool[Array, "B W W"]] | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    softcap: float | None = None,
    k_scale: Float[Array, "B H T"] | None = None,
    v_scale: Float[Array, "B H T"] | None = None,
) -> Float[Array, "B W Hq Dv"]:
    """Attention of window rows to the committed cache and to their own ancestors.

    Row ``i`` of batch row ``b`` sees the committed positions ``0 .. lengths[b] - 1``
    and window rows ``j`` with ``ancestors[b, i, j]`` (itself included). Query head
    ``h`` reads KV head ``h // (Hq / H)``. Softmax in float32 (float64 for float64
    inputs). The cache may be one array for keys and values.

    - ``slots`` says which position a cache slot holds (a negative one: none); without
      it, slot ``t`` holds position ``t``.
    - ``reach``: a row at ``positions[b, i]`` sees only positions later than that less
      ``reach`` (a sliding window). Positions count depth, so siblings share one.
    - ``chosen`` narrows what is seen, in the cache and in the window.
    - ``sinks``: one more logit a head, of a key without a value.
    - ``softcap``: scores become ``softcap * tanh(score / softcap)``.
    - ``k_scale``, ``v_scale``: of a cache in int8 or float8_e4m3fn, whose keys are
      ``k_cache * k_scale[..., None]``, and values likewise. Without them, which float8
      allows, the scales are 1. The window's own keys stay in the dtype that they come
      in, and products are computed in it: scores are scaled behind the first product,
      and weights before the second.

    Slots that hold nothing may hold anything, NaN included, and so may their scales;
    keys and values of window rows that nobody may see must be finite. That is so of the
    result, and not of its derivatives, which NaN reaches. Every row must see something,
    itself at least: ``ancestors`` has its diagonal, and ``reach`` is 1 or more.

    Raises ``ValueError`` for scales that do not go with the caches, for query heads
    that are no multiple of the KV heads, and for a ``reach`` without ``positions``.
    """
    check_scales(k_cache, v_cache, k_scale, v_scale)
    check_heads(q, k_cache, v_cache, reach, positions)
    batch, width, q_heads, _ = q.shape
    kv_heads = k_cache.shape[1]
    group = q_heads // kv_heads
    acc = np.promote_types(q.dtype, np.float32)
    key_dtype = computed_in(k_cache.dtype, k.dtype)
    value_dtype = computed_in(v_cache.dtype, v.dtype)

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=acc)

    def scores(
        keys: jax.Array,
        mask: Bool[Array, "B rows_or_1 T"],
        by_slot: Float[Array, "B H T"] | None = None,
    ) -> jax.Array:
        out = product("bhrd,bhtd->bhrt", rows, keys.astype(key_dtype))
        if by_slot is not None:
            out = out * by_slot[:, :, None].astype(acc)
        if softcap is not None:
            out = softcap * jnp.tanh(out / softcap)
        every = mask if mask.shape[1] == 1 else jnp.tile(mask, (1, group, 1))
        return jnp.where(every[:, None], out, -jnp.inf)

    # the query heads of one KV head and the window rows form the rows of one product
    rows = q.reshape(batch, width, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
    rows = rows * jnp.asarray(scale, q.dtype)
    rows = rows.reshape(batch, kv_heads, group * width, -1).astype(key_dtype)
    if slots is None:
        slots = jnp.arange(k_cache.shape[2], dtype=jnp.int32)[None]
    held = (slots >= 0) & (slots < lengths[:, None])
    masks = _masks(held, ancestors, positions, slots, reach, chosen)
    old = scores(k_cache, masks[0], k_scale)
    new = scores(k.transpose(0, 2, 1, 3), masks[1])
    if sinks is not None:
        sinks = sinks.astype(acc).reshape(kv_heads, group)
        sinks = jnp.repeat(sinks, width, axis=1)
    old, new, total = _softmax(old, new, sinks)
    if v_scale is not None:
        old = old * jnp.where(held[:, None], v_scale, 0.0)[:, :, None].astype(acc)
    out = _weighted(old.astype(value_dtype), v_cache.astype(value_dtype), held, acc)
    values = v.transpose(0, 2, 1, 3).astype(value_dtype)
    out = out + product("bhrw,bhwd->bhrd", new.astype(value_dtype), values)
    out = (out / total).reshape(batch, kv_heads, group, width, -1)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, q_heads, -1)


def _masks(
    held: Bool[Array, "B T"],
    ancestors: Bool[Array, "B W W"],
    positions: Int[Array, "B W"] | None,
    slots: Int[Array, "B_or_1 T"],
    reach: int | None,
    chosen: tuple[Bool[Array, "B W T"], Bool[Array, "B W W"]] | None,
) -> tuple[Bool[Array, "B rows_or_1 T"], Bool[Array, "B W W"]]:
    """What each row sees of the cache and of the window."""
    old, new = held[:, None], ancestors
    if reach is not None:
        assert positions is not None, "a sliding window needs the rows' positions"
        first = positions - jnp.int32(reach)
        old = old & (slots[:, None] > first[:, :, None])
        new = new & (positions[:, None] > first[:, :, None])
    if chosen is not None:
        old, new = old & chosen[0], new & chosen[1]
    return old, new


def _softmax(
    old: Float[Array, "B H R T"],
    new: Float[Array, "B H R W"],
    sinks: Float[Array, "H R"] | None,
) -> tuple[Float[Array, "B H R T"], Float[Array, "B H R W"], Float[Array, "B H R 1"]]:
    """Weights of the cache and of the window by their scores, and what to divide by."""
    top = jnp.maximum(old.max(axis=-1), new.max(axis=-1))[..., None]
    sink = None if sinks is None else sinks[None, ..., None]
    if sink is not None:
        top = jnp.maximum(top, sink)
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(axis=-1, keepdims=True) + new.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    return old, new, total


def _weighted(
    weights: Float[Array, "B H R T"],
    v_cache: Float[Array, "B H T Dv"],
    held: Bool[Array, "B T"],
    acc: np.dtype,
) -> Float[Array, "B H R Dv"]:
    """The cache's values by their weights, whatever unused slots hold."""

    def product(values: jax.Array) -> jax.Array:
        spec = "bhrt,bhtd->bhrd"
        return jnp.einsum(spec, weights, values, preferred_element_type=acc)

    def masked() -> jax.Array:
        zero = jnp.zeros((), v_cache.dtype)
        return product(jnp.where(held[:, None, :, None], v_cache, zero))

    # 0 * NaN is NaN, so an unused slot can show. To zero them costs a pass over the
    # cache (measured: +30 to +150 % of attention), so it is done only when needed.
    out = product(v_cache)
    return jax.lax.cond(jnp.all(jnp.isfinite(out)), lambda: out, masked)
