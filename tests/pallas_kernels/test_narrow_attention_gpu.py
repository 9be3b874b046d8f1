"""What narrow caches have of their own in the Hopper kernel: codes and scales.

All else they share with other caches: ``test_hopper_attention``.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.window_attention import gpu_body, gpu_narrow, gpu_tiles
from pallas_kernels.window_attention.emulated import (
    KINDS,
    TOLERANCE,
    by_hopper,
    by_reference,
)
from pallas_kernels.window_attention.gpu_plan import TILE, swizzle_of

pytestmark = pytest.mark.timeout(240)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)

INT8, FP8 = jnp.int8, jnp.float8_e4m3fn
every_code = pytest.mark.parametrize("dtype", [INT8, FP8])


def all_codes(dtype: Any, *shape: int) -> jax.Array:
    """All 256 over and over, NaN among those of E4M3."""
    numbers = np.resize(np.arange(256, dtype=np.uint8), shape)
    return jax.lax.bitcast_convert_type(jnp.asarray(numbers), dtype)


@emulated
@every_code
@pytest.mark.parametrize("dim", [80, 96, 192, 256])
def test_every_code_is_widened_to_its_own_number(dtype, dim):
    """Rows of codes that are swizzled in either way, and that are not."""

    def body(codes: Any, out: Any, kept: Any, wide: Any, arrived: Any) -> None:
        plgpu.copy_gmem_to_smem(codes, kept.at[0], arrived)
        plgpu.barrier_wait(arrived)
        (found,) = gpu_narrow.widened((kept.at[0], wide))
        plgpu.copy_smem_to_gmem(found, out)
        plgpu.wait_smem_to_gmem(0)

    codes = all_codes(dtype, TILE, dim)
    run = compat.gpu_kernel(
        body,
        out_type=jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16),
        scratch_types=[
            gpu_narrow.shared_codes(codes.dtype.name, 1, TILE, dim),
            gpu_tiles.shared_rows(swizzle_of(dim), TILE, dim),
            plgpu.Barrier(),
        ],
        grid=(1,),
        grid_names=("one",),
        interpret=compat.gpu_interpret(),
    )
    wanted = np.asarray(codes).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(run(codes), np.float32), wanted)


@emulated
@every_code
def test_every_code_is_read_as_it_is(dtype):
    """Values of a slot that gets all the weight, by two heads of 128 channels."""
    kind = {INT8: "int8", FP8: "fp8"}[dtype]
    arrays, options = KINDS[kind].call(dim=128, lengths=(1,), width=1)
    ones = jnp.ones_like
    arrays |= {
        "q": ones(arrays["q"]),
        "k": -4 * ones(arrays["k"]),  # leaves e ** -90 for the row itself
        "k_cache": ones(arrays["k_cache"]) * jnp.asarray(4, dtype),
        "k_scale": ones(arrays["k_scale"]),
        "v_cache": arrays["v_cache"].at[0, :, 0].set(all_codes(dtype, 2, 128)),
        "v_scale": arrays["v_scale"].at[0, :, 0].set(0.5),
    }
    got = by_hopper(arrays, options)[0, 0, ::2]
    codes = np.asarray(all_codes(dtype, 2, 128)).astype(np.float32)
    np.testing.assert_array_equal(got, codes / 2)
    assert np.isnan(got).sum() == (2 if dtype == FP8 else 0)


@emulated
@pytest.mark.parametrize(
    "kind",
    [
        "fp8",
        pytest.param("int8", marks=pytest.mark.full),
        pytest.param("fp8-as-it-is", marks=pytest.mark.full),
    ],
)
def test_what_stands_in_unused_slots_and_scales_changes_no_bit(kind):
    arrays, options = KINDS[kind].call(lengths=(0, 1, 70, 131), width=2)
    slots = np.arange(arrays["k_cache"].shape[2])
    held = slots < np.asarray(arrays["lengths"])[:, None, None]
    clean = dict(arrays)
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if name in clean:
            x = np.asarray(clean[name], np.float32)
            mask = held if x.ndim == 3 else held[..., None]
            clean[name] = jnp.asarray(np.where(mask, x, 0), clean[name].dtype)
    np.testing.assert_array_equal(by_hopper(arrays, options), by_hopper(clean, options))


@emulated
def test_scales_that_are_left_out_or_anothers_show():
    """One of a slot and head in that head alone."""
    arrays, options = KINDS["int8"].call(lengths=(90, 131), width=2)
    wanted = by_reference(arrays, options)
    clean = by_hopper(arrays, options)
    assert np.abs(clean - wanted).max() < TOLERANCE
    for name in ("k_scale", "v_scale"):
        scale = arrays[name]
        broken = by_hopper({**arrays, name: scale.at[1, 1, 90].set(jnp.nan)}, options)
        assert np.isnan(broken[1, :, 2:]).all(), name
        np.testing.assert_array_equal(broken[1, :, :2], clean[1, :, :2])
        np.testing.assert_array_equal(broken[0], clean[0])
        mean = jnp.full_like(scale, jnp.nanmean(scale))
        for other in (scale[:, ::-1], mean):
            got = by_hopper({**arrays, name: other}, options)
            assert not np.abs(got - wanted).max() < 2 * TOLERANCE, name


@emulated
def test_a_buffer_of_codes_that_is_refilled_too_early_shows(monkeypatch):
    """What the looking for races would see."""
    fetch, read = gpu_body._fetch, gpu_body._cached

    def hasty(t: Any, i: Any, state: Any) -> Any:
        fetch(t, i + t.plan.stages)
        return read(t, i, state)

    def only_at_first(t: Any, i: Any) -> None:
        if isinstance(i, int):
            fetch(t, i)

    call = {"lengths": (500,), "width": 1, "capacity": 504}
    arrays, options = KINDS["int8"].call(q_heads=1, kv_heads=1, **call)
    jax.clear_caches()  # what was traced whole would be run again
    by_hopper(arrays, options, splits=1)
    jax.clear_caches()
    monkeypatch.setattr(gpu_body, "_cached", hasty)
    monkeypatch.setattr(gpu_body, "_fetch", only_at_first)
    with pytest.raises(compat.RaceError), compat.without_gpu_races():
        by_hopper(arrays, options, splits=1)
    jax.clear_caches()


def test_rows_of_codes_are_swizzled_as_wide_as_they_are_widened():
    for dim in range(16, 257, 16):
        kept = gpu_narrow.shared_codes("int8", 2, TILE, dim)
        if dim % 32:  # an odd multiple of 16 bytes: rows begin in other banks
            assert not kept.transforms
            continue
        tiling, swizzle = kept.transforms
        assert tiling.tiling == (8, swizzle.swizzle)
        assert swizzle.swizzle == next(n for n in (128, 64, 32) if dim % n == 0)
