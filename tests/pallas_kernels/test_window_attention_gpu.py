"""The Hopper kernel of window attention, emulated, against the reference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import compat, gpu_products, hopper, platforms
from pallas_kernels.aot import cuda
from pallas_kernels.mesh import Spread
from pallas_kernels.window_attention import api, gpu, gpu_plan
from pallas_kernels.window_attention.emulated import by_hopper, by_reference
from pallas_kernels.window_attention.plan import Options, shapes_of
from pallas_kernels.window_attention.problems import in_pages, random_call
from pallas_kernels.window_attention.specs import MODELS, AttentionSpec

pytestmark = pytest.mark.timeout(240)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)

EDGES = (0, 1, 63, 64, 65, 131)
"""Committed lengths around the edges of a step, and a prime one."""

TOLERANCE = 1.5e-2
"""Weights are rounded to bfloat16 before the last product; values are near 1."""

SMALL = AttentionSpec(q_heads=4, kv_heads=2, dim=64)


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
def test_rings_sinks_and_soft_caps():
    spec = AttentionSpec(
        q_heads=2, kv_heads=1, dim=64, reach=72, sinks=True, softcap=3.0
    )
    check(spec, lengths=(0, 5, 72, 300), width=3)


@emulated
def test_small_pages_are_read_through_the_table():
    spec = dataclasses.replace(SMALL, q_heads=2, kv_heads=1)
    check(spec, page_size=32, reach=70, lengths=(0, 32, 131), width=2)


@emulated
def test_a_slot_too_many_or_too_few_shows():
    """What the comparisons would see if the kernel took another length."""
    spec = dataclasses.replace(SMALL, kv_heads=1)
    arrays, options = random_call(
        spec, lengths=(20, 65), width=2, capacity=136, dtype=jnp.bfloat16
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
def test_a_wait_that_is_left_out_shows(monkeypatch):
    """What the looking for races would see."""
    spec = dataclasses.replace(SMALL, q_heads=1, kv_heads=1)
    arrays, options = random_call(
        spec, lengths=(70,), width=1, capacity=72, dtype=jnp.bfloat16
    )
    jax.clear_caches()  # what was traced whole would be run again
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *_: None)
    with pytest.raises(compat.RaceError), compat.without_gpu_races():
        by_hopper(arrays, options, splits=1)
    jax.clear_caches()


def test_shares_of_a_cache_are_merged_as_one_softmax():
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(3, 1, 1, 4, 9)) * 4  # shares, B, H, rows, slots
    scores[2, ..., 2, :] = -np.inf  # a share of which a row sees nothing
    values = draw.normal(size=(3, 1, 1, 9, 5))
    weights = np.exp(scores)
    totals = weights.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        read = np.nan_to_num((weights @ values) / totals[..., None])
        lse = np.log2(totals)
    got, total = gpu.merge(
        jnp.asarray(read, jnp.float32), jnp.asarray(lse, jnp.float32)
    )
    wanted = (weights @ values).sum(0) / totals.sum(0)[..., None]
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(total), np.log(totals.sum(0)), atol=1e-5)


def test_tiles_and_shares_hold_all_rows_and_slots_and_fit():
    for model, spec in MODELS.items():
        for width in (1, 2, 7, 16, 64):
            for capacity in (64, 72, 128, 8192):
                if spec.latent or spec.dim > gpu_plan.MOST_DIM:
                    continue
                q, cache = shaped(spec, width, capacity)
                shapes = shapes_of(q, cache, cache)
                plan = gpu_plan.make_plan(shapes)
                assert plan.rows >= shapes.rows, model
                assert plan.blocks * gpu_plan.TILE >= capacity
                assert plan.window >= width
                assert 1 <= plan.splits <= plan.blocks
                assert gpu_plan.shared_bytes(shapes, plan) <= hopper.SHARED_BYTES


def shaped(spec: AttentionSpec, width: int = 4, capacity: int = 128) -> tuple[Any, Any]:
    q = jax.ShapeDtypeStruct((1, width, spec.q_heads, spec.dim), jnp.bfloat16)
    cache = (1, spec.kv_heads, capacity, spec.dim)
    return q, jax.ShapeDtypeStruct(cache, jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"width": 65}, "65 rows"),
        ({"dim": 512}, "512 channels"),
        ({"dim": 72}, "72 channels"),
        ({"cache": jnp.float32}, "float32"),
        ({"narrowed": True}, "indexer"),
        ({"shared": True, "dim": 640}, "latent rows have 640"),
        ({"slots": 56}, "56 slots"),
        ({"slots": 132}, "132 slots"),
        ({"table": (1, 2), "slots": 24}, "pages have 24 slots"),
        ({"table": (1, 2), "slots": 96}, "pages have 96 slots"),
        ({}, None),
        ({"table": (1, 2), "slots": 16}, None),
        ({"shared": True, "dim": gpu_plan.MOST_LATENT}, None),
    ],
)
def test_a_call_that_is_not_for_it_is_refused_by_name(change, why):
    dim = change.get("dim", 64)
    dtype = change.get("cache", jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, change.get("width", 4), 4, dim), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((1, 2, change.get("slots", 128), dim), dtype)
    table = change.get("table")
    if table is not None:
        table = jax.ShapeDtypeStruct(table, jnp.int32)
    options = Options(scale=1.0, shared=change.get("shared", False))
    narrowed = change.get("narrowed", False)
    told = gpu_plan.refusal(q, cache, cache, table, options, narrowed=narrowed)
    assert told is why if why is None else told is not None and why in told


def lowered(kind: str, spec: AttentionSpec = SMALL) -> str:
    """Of a call with a bfloat16 cache, as the decoder makes it, for a GPU of a kind."""
    arrays, options = random_call(
        spec, lengths=(3,), width=2, capacity=128, dtype=jnp.bfloat16
    )
    run = jax.jit(lambda **x: api.window_attention(**x, **options))
    with compat.lowering_for("gpu", kind, 132):
        return run.trace(**arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_hopper_runs_the_kernel_and_other_gpus_the_reference():
    assert "mosaic_gpu" in lowered("NVIDIA H100 80GB HBM3")
    platforms.forget_choices()
    assert "mosaic_gpu" not in lowered("NVIDIA A100-SXM4-80GB")
    (choice,) = platforms.choices()
    assert "A100" in choice.on("cuda") and "Hopper" in choice.on("cuda")


def test_what_a_gpu_refuses_a_tpu_may_take():
    """And is then no error where neither is at hand, but one for the GPU."""
    spec = dataclasses.replace(SMALL, dim=512)
    q, cache = shaped(spec)
    rows = jax.ShapeDtypeStruct((1, 4, 2, 512), jnp.bfloat16)

    def run(q: Any, rows: Any, cache: Any) -> jax.Array:
        return api.window_attention(
            *(q, rows, 2 * rows, cache, 2 * cache, jnp.zeros(1, jnp.int32)),
            jnp.ones((1, 4, 4), bool),
            scale=1.0,
            implementation="require",
        )

    platforms.forget_choices()
    jax.eval_shape(run, q, rows, cache)
    (choice,) = platforms.choices()
    assert choice.on("tpu") == "kernel"
    assert choice.on("cuda").startswith("reference: ")
    with (
        compat.lowering_for("gpu", "NVIDIA H100"),
        pytest.raises(platforms.NoKernelError, match="no cuda kernel"),
    ):
        jax.eval_shape(run, q, rows, cache)


@pytest.mark.full
@pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
@pytest.mark.parametrize(
    ("model", "share"),
    [("llama-3-8b", ",2,4,64,128]"), ("deepseek-v3", ",2,1,256,576]")],
)
def test_on_a_mesh_each_gpu_has_its_rows_and_heads(model, share):
    """Compiled for four H100 that are not there: nothing is gathered.

    A share has 2 rows, and 4 KV heads or half the query heads of the only one.
    """
    spec = MODELS[model]
    arrays, options = random_call(
        spec,
        lengths=(5, 6, 7, 8),
        width=4,
        capacity=1024,
        dtype=jnp.bfloat16,
    )
    mesh = Mesh(np.array(cuda.devices("h100", 4)).reshape(2, 2), ("rows", "cols"))
    rows, cache = PartitionSpec("rows", None, "cols"), PartitionSpec("rows", "cols")
    lie = {"q": rows}
    if not spec.latent:
        lie |= {"k": rows, "v": rows, "k_cache": cache, "v_cache": cache}
    there = {
        name: None
        if x is None
        else jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, lie.get(name, PartitionSpec("rows"))),
        )
        for name, x in arrays.items()
    }

    def run(x: dict[str, Any]) -> jax.Array:
        spread = Spread(mesh, batch="rows", heads="cols")
        if spec.latent:
            x = {**x, "v": x["k"], "v_cache": x["k_cache"]}
        return api.window_attention(
            **x, **options, spread=spread, implementation="require"
        )

    with jax.set_mesh(mesh):
        text = jax.jit(run).lower(there).compile().as_text()
    (call,) = [line for line in text.splitlines() if '"mosaic_gpu' in line]
    assert share in call.split(" custom-call(")[0]
    assert "all-gather" not in text


@pytest.mark.full
@emulated
@pytest.mark.parametrize("width", [1, 8, 17, 64])
@pytest.mark.parametrize("model", [name for name, x in MODELS.items() if not x.latent])
def test_every_model_and_width(model, width):
    """Two KV heads of each, and all the query heads of these."""
    spec = MODELS[model]
    kv_heads = min(spec.kv_heads, 2)
    group = spec.q_heads // spec.kv_heads
    spec = dataclasses.replace(spec, kv_heads=kv_heads, q_heads=group * kv_heads)
    lengths = (0, 127, 130) if spec.reach else (0, 65, 136)
    check(spec, width=width, lengths=lengths)


@pytest.mark.full
@emulated
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("capacity", [64, 72, 128, 136, 256, 264])
def test_every_capacity_and_share(capacity, splits):
    lengths = sorted({0, 1, 63, 64, capacity - 65, capacity - 1, capacity} - {-1})
    check(SMALL, capacity=capacity, lengths=lengths, splits=splits)


@pytest.mark.full
@emulated
@pytest.mark.parametrize("reach", [1, 5, 64, 65, 1000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_option(reach, sinks, softcap):
    spec = dataclasses.replace(SMALL, sinks=sinks, softcap=softcap)
    check(spec, reach=reach, width=9, capacity=264, lengths=(0, 100, 256, 264))


@pytest.mark.full
@emulated
@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 112, 128, 192, 256])
def test_every_head_size(dim):
    check(dataclasses.replace(SMALL, dim=dim), lengths=(0, 65, 136))


@pytest.mark.full
@emulated
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 192])
@pytest.mark.parametrize("reach", [None, 70])
def test_pages_of_every_size(size, reach):
    lengths = (0, size, size + 1, 300)
    check(SMALL, page_size=size, reach=reach, capacity=389, lengths=lengths)
