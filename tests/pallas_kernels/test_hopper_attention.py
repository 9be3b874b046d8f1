"""Both bodies of the Hopper kernel of window attention, emulated, with every cache.

Against the reference, with NaN in every slot and scale that holds nothing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, gpu_products, platforms
from pallas_kernels.window_attention import api
from pallas_kernels.window_attention.emulated import (
    KINDS,
    TOLERANCE,
    by_hopper,
    by_reference,
    check,
)
from pallas_kernels.window_attention.specs import MODELS

pytestmark = pytest.mark.timeout(240)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)

every_kind = pytest.mark.parametrize("kind", KINDS)
with_keys = pytest.mark.parametrize("kind", [x for x in KINDS if x != "latent"])


def sampled(*names: str) -> pytest.MarkDecorator:
    """These kinds in the normal run; the rest differ in a conversion."""
    rest = [pytest.param(x, marks=pytest.mark.full) for x in KINDS if x not in names]
    return pytest.mark.parametrize("kind", [*names, *rest])


@emulated
@sampled("bfloat16", "latent", "int8", "fp8")
def test_it_is_the_reference_around_the_edges_of_a_step(kind):
    check(kind)


@emulated
@sampled("bfloat16", "latent", "int8")
def test_rings_sinks_and_soft_caps(kind):
    more = {"ring": True, "reach": 72, "sinks": True, "softcap": 3.0}
    lengths = (0, 5, 72, 300)
    check(kind, **more, q_heads=2, kv_heads=1, lengths=lengths, width=3)


@emulated
@sampled("bfloat16", "latent", "int8")
def test_small_pages_are_read_through_the_table(kind):
    more = {"q_heads": 2, "kv_heads": 1, "lengths": (0, 32, 131), "width": 2}
    check(kind, page_size=32, reach=70, **more)


@emulated
@sampled("bfloat16", "latent", "int8")
def test_a_slot_too_many_or_too_few_shows(kind):
    """What the comparisons would see if the kernel took another length."""
    arrays, options = KINDS[kind].call(kv_heads=1, lengths=(20, 65), width=2)
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
@sampled("bfloat16", "latent", "int8")
def test_no_buffer_is_refilled_while_it_is_multiplied(kind):
    with gpu_products.watched():
        check(kind, lengths=(300,), width=2, capacity=304, splits=1)


def lowered(kind: str, device: str) -> str:
    """Of a call as the decoder makes it, for a GPU."""
    arrays, options = KINDS[kind].call(lengths=(3,), width=2, capacity=128)
    shared = arrays["v"] is arrays["k"]
    twice = {"v": "k", "v_cache": "k_cache"} if shared else {}
    rest = {name: x for name, x in arrays.items() if name not in twice}

    def run(rest: dict[str, Any]) -> jax.Array:
        more = {name: rest[source] for name, source in twice.items()}
        return api.window_attention(**rest, **more, **options)

    with compat.lowering_for("gpu", device, 132):
        return jax.jit(run).trace(rest).lower(lowering_platforms=("cuda",)).as_text()


@every_kind
def test_hopper_runs_the_kernel_and_other_gpus_the_reference(kind):
    assert "mosaic_gpu" in lowered(kind, "NVIDIA H100 80GB HBM3")
    platforms.forget_choices()
    assert "mosaic_gpu" not in lowered(kind, "NVIDIA A100-SXM4-80GB")
    (choice,) = platforms.choices()
    assert "A100" in choice.on("cuda") and "Hopper" in choice.on("cuda")


@pytest.mark.full
@emulated
@every_kind
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("capacity", [64, 72, 128, 136, 256, 264, 520])
def test_every_capacity_and_share(kind, capacity, splits):
    lengths = sorted({0, 1, 63, 64, capacity - 65, capacity - 1, capacity} - {-1})
    check(kind, capacity=capacity, lengths=lengths, splits=splits)


@pytest.mark.full
@emulated
@every_kind
@pytest.mark.parametrize("reach", [1, 5, 64, 65, 1000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_option(kind, reach, sinks, softcap):
    more = {"reach": reach, "sinks": sinks, "softcap": softcap}
    check(kind, **more, width=9, capacity=264, lengths=(0, 100, 256, 264))


@pytest.mark.full
@emulated
@every_kind
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 192])
@pytest.mark.parametrize("reach", [None, 70])
def test_pages_of_every_size(kind, size, reach):
    if size < 32 and kind in ("int8", "fp8"):
        pytest.skip("whose scales are not copied")
    lengths = (0, size, size + 1, 300)
    check(kind, page_size=size, reach=reach, capacity=389, lengths=lengths)


@pytest.mark.full
@emulated
@with_keys
@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 112, 128, 192, 256])
def test_every_head_size(kind, dim):
    check(kind, dim=dim, lengths=(0, 65, 136))


@pytest.mark.full
@emulated
@with_keys
@pytest.mark.parametrize("width", [1, 8, 17, 64])
@pytest.mark.parametrize("model", [name for name, x in MODELS.items() if not x.latent])
def test_every_model_and_width(kind, model, width):
    """Two KV heads of each, and all the query heads of these."""
    spec = MODELS[model]
    kv_heads = min(spec.kv_heads, 2)
    group = spec.q_heads // spec.kv_heads
    spec = dataclasses.replace(spec, kv_heads=kv_heads, q_heads=group * kv_heads)
    lengths = (0, 127, 130) if spec.reach else (0, 65, 136)
    check(kind, spec=spec, width=width, lengths=lengths)
