"""The Hopper kernel of latent attention, emulated, against the reference.

Two warpgroups share a tile's channels, so what passes between them is looked at too.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, gpu_products, hopper, platforms
from pallas_kernels.window_attention import api, gpu_latent, gpu_plan
from pallas_kernels.window_attention.emulated import by_hopper, by_reference
from pallas_kernels.window_attention.plan import shapes_of
from pallas_kernels.window_attention.problems import in_pages, random_call
from pallas_kernels.window_attention.specs import AttentionSpec

pytestmark = pytest.mark.timeout(240)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)

EDGES = (0, 1, 63, 64, 65, 136)
"""Committed lengths around the edges of a step, and a whole cache."""

TOLERANCE = 1.5e-2
"""Weights are rounded to bfloat16 before the last product; values are near 1."""

SMALL = AttentionSpec(q_heads=4, kv_heads=1, dim=64 + 16, latent=True)


def check(spec: AttentionSpec, **more: Any) -> None:
    call = {"lengths": EDGES, "width": 5, "capacity": 136, **more}
    splits, size = call.pop("splits", 2), call.pop("page_size", None)
    arrays, options = random_call(spec, dtype=jnp.bfloat16, **call)
    wanted = by_reference(arrays, options)
    if size is not None:
        arrays = in_pages(arrays, size)
    got = by_hopper(arrays, options, splits)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE)


@emulated
def test_it_is_the_reference_around_the_edges_of_a_step():
    check(SMALL)


@emulated
def test_two_tiles_of_rows_and_channels_of_both():
    spec = dataclasses.replace(SMALL, q_heads=11, dim=128 + 64)
    check(spec, width=8, lengths=(0, 70, 130), splits=1)


@emulated
def test_rings_sinks_and_soft_caps():
    spec = dataclasses.replace(SMALL, q_heads=2, reach=72, sinks=True, softcap=3.0)
    check(spec, lengths=(0, 72, 300), width=3)


@emulated
def test_small_pages_are_read_through_the_table():
    spec = dataclasses.replace(SMALL, q_heads=2)
    check(spec, page_size=32, lengths=(0, 32, 131), width=2)


@emulated
def test_a_slot_too_many_or_too_few_shows():
    """What the comparisons would see if the kernel took another length."""
    arrays, options = random_call(
        SMALL, lengths=(20, 65), width=2, capacity=136, dtype=jnp.bfloat16
    )
    wanted = by_reference(arrays, options)

    def off_by(change: dict[str, Any]) -> np.ndarray:
        return np.abs(by_hopper({**arrays, **change}, options) - wanted)

    assert off_by({}).max() < TOLERANCE
    fewer = off_by({"lengths": arrays["lengths"] - 1})
    assert fewer.max(axis=(1, 2, 3)).min() > 2 * TOLERANCE
    more = off_by({"lengths": arrays["lengths"] + 1})
    assert np.isnan(more).any(axis=(1, 2, 3)).all()
    alone = jnp.broadcast_to(jnp.eye(2, dtype=bool), (2, 2, 2))
    assert off_by({"ancestors": alone})[:, 1].max() > 2 * TOLERANCE


@emulated
def test_no_buffer_is_refilled_while_it_is_multiplied():
    with gpu_products.watched():
        check(SMALL, lengths=(300,), width=2, capacity=304, splits=1)


@emulated
@pytest.mark.parametrize("name", ["_refill", "_hand_over"])
def test_a_warpgroup_that_does_not_wait_for_the_other_shows(monkeypatch, name):
    """What the looking for races would see: buffers, weights that are overwritten."""
    careful = getattr(gpu_latent, name)

    def hasty(*given: Any) -> Any:
        with monkeypatch.context() as inside:
            inside.setattr(plgpu, "barrier_wait", lambda *_: None)
            return careful(*given)

    spec = dataclasses.replace(SMALL, q_heads=1)
    arrays, options = random_call(
        spec, lengths=(300,), width=1, capacity=304, dtype=jnp.bfloat16
    )
    monkeypatch.setattr(gpu_latent, name, hasty)
    with (
        gpu_products.watched(),
        pytest.raises(compat.RaceError),
        compat.without_gpu_races(),
    ):
        by_hopper(arrays, options, splits=1)


@pytest.mark.parametrize("dim", [80, 192, 576])
@pytest.mark.parametrize("q_heads", [16, 32, 64, 128])
def test_tiles_and_shares_hold_all_rows_and_slots_and_fit(q_heads, dim):
    for width in (1, 2, 7, 16, 64):
        for capacity in (64, 72, 128, 8192, 65536):
            q = jax.ShapeDtypeStruct((1, width, q_heads, dim), jnp.bfloat16)
            cache = jax.ShapeDtypeStruct((1, 1, capacity, dim), jnp.bfloat16)
            shapes = shapes_of(q, cache, cache)
            plan = gpu_plan.make_plan(shapes, latent=True)
            assert plan.rows >= shapes.rows
            assert plan.blocks * gpu_plan.TILE >= capacity
            assert plan.window >= width
            assert plan.stages >= 2
            assert 1 <= plan.splits <= plan.blocks
            assert gpu_plan.shared_bytes(shapes, plan) <= hopper.SHARED_BYTES


def test_both_warpgroups_have_all_channels_between_them():
    for dim in range(16, gpu_plan.MOST_LATENT + 1, 16):
        first, second = gpu_latent.shares_of(dim)
        channels = [n for x in first + second for n in range(x.start, x.start + x.size)]
        assert channels == list(range(dim))
        widths = [sum(x.size for x in half) for half in (first, second)]
        assert widths[0] <= 256
        assert widths[1] <= 320


def lowered(kind: str) -> str:
    """Of a call as the decoder makes it, for a GPU of a kind."""
    arrays, options = random_call(
        SMALL, lengths=(3,), width=2, capacity=128, dtype=jnp.bfloat16
    )
    rest = {name: x for name, x in arrays.items() if name not in ("v", "v_cache")}

    def run(rest: dict[str, Any]) -> jax.Array:
        k, k_cache = rest["k"], rest["k_cache"]
        return api.window_attention(v=k, v_cache=k_cache, **rest, **options)

    with compat.lowering_for("gpu", kind, 132):
        return jax.jit(run).trace(rest).lower(lowering_platforms=("cuda",)).as_text()


def test_hopper_runs_the_kernel_and_other_gpus_the_reference():
    assert "mosaic_gpu" in lowered("NVIDIA H100 80GB HBM3")
    platforms.forget_choices()
    assert "mosaic_gpu" not in lowered("NVIDIA A100-SXM4-80GB")
    (choice,) = platforms.choices()
    assert "A100" in choice.on("cuda") and "Hopper" in choice.on("cuda")


@pytest.mark.full
@emulated
@pytest.mark.parametrize("width", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("q_heads", [1, 3, 16])
def test_every_window_and_number_of_heads(q_heads, width):
    spec = dataclasses.replace(SMALL, q_heads=q_heads)
    check(spec, width=width, lengths=(0, 65, 136))


@pytest.mark.full
@emulated
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("capacity", [64, 72, 128, 136, 256, 264, 520])
def test_every_capacity_and_share(capacity, splits):
    lengths = sorted({0, 1, 63, 64, capacity - 65, capacity - 1, capacity} - {-1})
    check(SMALL, capacity=capacity, lengths=lengths, splits=splits)


@pytest.mark.full
@emulated
@pytest.mark.parametrize("dim", [16, 64, 96, 112, 192, 288, 512, 576])
def test_every_latent(dim):
    spec = dataclasses.replace(SMALL, q_heads=16, dim=dim)
    check(spec, lengths=(0, 65, 136, 260), capacity=264)


@pytest.mark.full
@emulated
@pytest.mark.parametrize("reach", [1, 64, 65, 1000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_option(reach, sinks, softcap):
    spec = dataclasses.replace(SMALL, sinks=sinks, softcap=softcap)
    check(spec, reach=reach, width=9, capacity=264, lengths=(0, 100, 256, 264))


@pytest.mark.full
@emulated
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 192])
@pytest.mark.parametrize("reach", [None, 70])
def test_pages_of_every_size(size, reach):
    lengths = (0, size, size + 1, 300)
    check(SMALL, page_size=size, reach=reach, capacity=389, lengths=lengths)
