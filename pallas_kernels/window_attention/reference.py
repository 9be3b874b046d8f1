"""Window attention in plain jnp: the definition, and what runs on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def window_attention(
    q: Float[Array, "B W Hq D"],
    k: Float[Array, "B W H D"],
    v: Float[Array, "B W H D"],
    k_cache: Float[Array, "B H T D"],
    v_cache: Float[Array, "B H T D"],
    lengths: Int[Array, " B"],
    ancestors: Bool[Array, "B W W"],
    *,
    scale: float,
) -> Float[Array, "B W Hq D"]:
    """Attention of window rows to the committed cache and to their own ancestors.

    Row ``i`` of batch row ``b`` sees cache slots ``0 .. lengths[b] - 1`` and window
    rows ``j`` with ``ancestors[b, i, j]`` (itself included). Query head ``h`` reads
    KV head ``h // (Hq / H)``. Softmax in float32 (float64 for float64 inputs).

    Slots beyond ``lengths`` may hold anything, NaN included; keys and values of window
    rows that nobody may see must be finite.
    """
    batch, width, q_heads, dim = q.shape
    kv_heads, capacity = k_cache.shape[1], k_cache.shape[2]
    group = q_heads // kv_heads
    acc = np.promote_types(q.dtype, np.float32)

    def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=acc)

    # the query heads of one KV head and the window rows form the rows of one product
    rows = q.reshape(batch, width, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    rows = (rows * jnp.asarray(scale, q.dtype)).reshape(batch, kv_heads, -1, dim)
    rows = rows.astype(k_cache.dtype)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    committed = jnp.arange(capacity, dtype=jnp.int32) < lengths[:, None]
    old = product("bhrd,bhtd->bhrt", rows, k_cache)
    old = jnp.where(committed[:, None, None, :], old, -jnp.inf)
    new = product("bhrd,bhwd->bhrw", rows, keys.astype(k_cache.dtype))
    visible = jnp.tile(ancestors, (1, group, 1))[:, None]
    new = jnp.where(visible, new, -jnp.inf)

    top = jnp.maximum(old.max(axis=-1), new.max(axis=-1))[..., None]
    old, new = jnp.exp(old - top), jnp.exp(new - top)
    total = old.sum(axis=-1) + new.sum(axis=-1)
    weights = old.astype(v_cache.dtype)
    out = product("bhrt,bhtd->bhrd", weights, v_cache)

    def masked() -> jax.Array:
        held = committed[:, None, :, None]
        zero = jnp.zeros((), v_cache.dtype)
        return product("bhrt,bhtd->bhrd", weights, jnp.where(held, v_cache, zero))

    # 0 * NaN is NaN, so an unused slot can show. To zero them costs a pass over the
    # cache (measured: +30 to +150 % of this function), so it is done only when needed.
    out = jax.lax.cond(jnp.all(jnp.isfinite(out)), lambda: out, masked)
    out = out + product(
        "bhrw,bhwd->bhrd", new.astype(v_cache.dtype), values.astype(v_cache.dtype)
    )
    out = (out / total[..., None]).reshape(batch, kv_heads, group, width, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, q_heads, dim)
