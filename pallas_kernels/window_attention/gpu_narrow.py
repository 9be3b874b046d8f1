"""A narrow cache's codes and scales on their way to a Hopper GPU's matrix units.

Codes are copied as they are. They become bfloat16, which holds all of int8 and of E4M3,
from shared memory to shared memory: keys and values of a product lie there, and no
product takes one of its sides in one byte and the other in two.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat
from pallas_kernels.window_attention.gpu_plan import SWIZZLES
from pallas_kernels.window_attention.gpu_slots import Task, held
from pallas_kernels.window_attention.gpu_tiles import BY_SLOT, shared_rows

FOUR = plgpu.Layout.WGMMA_UPCAST_2X
"""Four codes side by side in each thread: rows of codes are loaded by words, without
two threads that want the same bank."""


def shared_codes(dtype: str, stages: int, slots: int, dim: int) -> Any:
    """Scratch: steps of codes. Rows of an odd multiple of 16 lie in other banks as they
    are, and wider ones must be swizzled for that.
    """
    swizzle = _swizzle_of(dim)
    if swizzle is None:
        return plgpu.SMEM((stages, slots, dim), jnp.dtype(dtype))
    return shared_rows(swizzle, stages, slots, dim, dtype=dtype)


def _swizzle_of(dim: int) -> int | None:
    return next((n for n in SWIZZLES if dim % n == 0), None)


def widened(*steps: tuple[Any, Any]) -> list[Any]:
    """Where codes of a step, ``[64, D]``, have become bfloat16."""
    plgpu.commit_smem()  # until all threads have left the last products behind
    for codes, wide in steps:
        dim = codes.shape[1]
        width = _swizzle_of(dim) or dim
        for begin in range(0, dim, width):
            part = pl.ds(begin, width)
            found = compat.gpu_load(codes.at[:, part], FOUR)
            if found.dtype != jnp.int8:
                found = found.astype(jnp.float32)  # as all that E4M3 is converted to
            wide.at[:, part][...] = found.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return [wide for _, wide in steps]


def may_be_nan(codes: str | None) -> bool:
    """Whether a cache of such codes, or of none, may hold NaN."""
    return codes != "int8"


def scale_of_keys(t: Task, i: Any) -> Float[Array, " 64"]:
    """A step's. Those of slots that hold nothing may be NaN: nobody sees them."""
    return compat.gpu_load(t.s.k_scales.at[t.stage(i)], BY_SLOT)


def scale_of_values(t: Task, i: Any) -> Float[Array, " 64"]:
    """A step's, without those of slots that hold nothing: 0 * NaN is NaN."""
    scale = compat.gpu_load(t.s.v_scales.at[t.stage(i)], BY_SLOT)
    return jnp.where(held(t, i, BY_SLOT), scale, 0.0)
