"""What the Hopper kernel of latent attention has of its own: two warpgroups.

They share a tile's channels, and what passes between them is looked at.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, gpu_products, hopper
from pallas_kernels.window_attention import gpu_latent, gpu_plan
from pallas_kernels.window_attention.emulated import KINDS, by_hopper, check
from pallas_kernels.window_attention.plan import shapes_of

pytestmark = pytest.mark.timeout(240)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)


@emulated
def test_two_tiles_of_rows_and_channels_of_both():
    more = {"q_heads": 11, "dim": 128 + 64, "width": 8}
    check("latent", **more, lengths=(0, 70, 130), splits=1)


@emulated
@pytest.mark.parametrize("name", ["_refill", "_hand_over"])
def test_a_warpgroup_that_does_not_wait_for_the_other_shows(monkeypatch, name):
    """What the looking for races would see: buffers, weights that are overwritten."""
    careful = getattr(gpu_latent, name)

    def hasty(*given: Any) -> Any:
        with monkeypatch.context() as inside:
            inside.setattr(plgpu, "barrier_wait", lambda *_: None)
            return careful(*given)

    call = {"lengths": (300,), "width": 1, "capacity": 304}
    arrays, options = KINDS["latent"].call(q_heads=1, **call)
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


@pytest.mark.full
@emulated
@pytest.mark.parametrize("width", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("q_heads", [1, 3, 16])
def test_every_window_and_number_of_heads(q_heads, width):
    check("latent", q_heads=q_heads, width=width, lengths=(0, 65, 136))


@pytest.mark.full
@emulated
@pytest.mark.parametrize("dim", [16, 64, 96, 112, 192, 288, 512, 576])
def test_every_latent(dim):
    lengths = (0, 65, 136, 260)
    check("latent", q_heads=16, dim=dim, lengths=lengths, capacity=264)
