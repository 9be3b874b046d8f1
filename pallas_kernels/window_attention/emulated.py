"""Window attention on CPU, by the emulated Hopper kernel and by the reference.

For tests: one small model of each kind that the kernel tells apart, and a comparison.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from pallas_kernels.window_attention import gpu, reference
from pallas_kernels.window_attention.plan import Options
from pallas_kernels.window_attention.problems import Call, in_pages, random_call
from pallas_kernels.window_attention.specs import AttentionSpec

EDGES = (0, 1, 63, 64, 65, 131, 136)
"""Committed lengths around the edges of a step, a prime one, and a whole cache."""

TOLERANCE = 1.5e-2
"""Weights are rounded to bfloat16 before the last product; values are near 1."""

SMALL = AttentionSpec(q_heads=4, kv_heads=2, dim=64)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A small model, and what its cache holds."""

    spec: AttentionSpec
    cache: Any = None
    """A narrow dtype; ``None``: bfloat16."""
    scaled: bool = True

    def call(self, spec: AttentionSpec | None = None, **more: Any) -> Call:
        """Of ``random_call``, among whose arguments may be changes to the model; a
        ``ring`` is one.
        """
        spec = self.spec if spec is None else spec
        names = {field.name for field in dataclasses.fields(spec)} & more.keys()
        if not more.pop("ring", False):
            names -= {"reach"}
        spec = dataclasses.replace(spec, **{name: more.pop(name) for name in names})
        call = {"lengths": EDGES, "width": 5, "capacity": 136, **more}
        narrow = {"cache": self.cache, "scaled": self.scaled}
        return random_call(spec, dtype=jnp.bfloat16, **narrow, **call)


KINDS = {
    "bfloat16": Kind(SMALL),
    "latent": Kind(AttentionSpec(q_heads=4, kv_heads=1, dim=64 + 16, latent=True)),
    "int8": Kind(SMALL, jnp.int8),
    "fp8": Kind(SMALL, jnp.float8_e4m3fn),
    "fp8-as-it-is": Kind(SMALL, jnp.float8_e4m3fn, scaled=False),
}
"""By body and cache."""


def check(
    kind: str, *, splits: int | None = 2, page_size: int | None = None, **more: Any
) -> None:
    """Hold the kernel to the reference on a call of ``Kind.call``."""
    arrays, options = KINDS[kind].call(**more)
    wanted = by_reference(arrays, options)
    if page_size is not None:
        arrays = in_pages(arrays, page_size)
    got = by_hopper(arrays, options, splits)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE)


def by_hopper(
    arrays: dict[str, Any], options: dict[str, Any], splits: int | None = 2
) -> np.ndarray:
    """Of a call as ``problems`` makes them, with races looked for: JAX 0.12 only."""
    shared = arrays["v"] is arrays["k"]
    static = Options(
        **options,
        ring=arrays["slots"] is not None,
        shared=shared,
        with_lse=arrays["sinks"] is not None,
        scaled="k_scale" in arrays,
    )
    if shared:
        arrays = {**arrays, "v": None, "v_cache": None}
    out = gpu.window_attention(
        **arrays, options=static, splits=splits, interpret=compat.gpu_interpret()
    )
    return np.asarray(out)


def by_reference(arrays: dict[str, Any], options: dict[str, Any]) -> np.ndarray:
    """Of the same call, its cache in one stretch a row."""
    run = jax.jit(lambda **x: reference.window_attention(**x, **options))
    return np.asarray(run(**arrays))
