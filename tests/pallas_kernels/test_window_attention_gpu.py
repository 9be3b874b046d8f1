"""How the Hopper kernel of window attention is cut, what it takes, where it runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import compat, hopper, platforms
from pallas_kernels.aot import cuda
from pallas_kernels.mesh import Spread
from pallas_kernels.window_attention import api, gpu, gpu_plan
from pallas_kernels.window_attention.emulated import KINDS, SMALL, by_hopper
from pallas_kernels.window_attention.plan import Options, shapes_of
from pallas_kernels.window_attention.problems import random_call
from pallas_kernels.window_attention.specs import MODELS, AttentionSpec

pytestmark = pytest.mark.timeout(240)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)


CACHES = (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)


@emulated
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_wait_that_is_left_out_shows(monkeypatch, kind):
    """What the looking for races would see."""
    call = {"lengths": (70,), "width": 1, "capacity": 72}
    arrays, options = KINDS[kind].call(q_heads=1, kv_heads=1, **call)
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


@pytest.mark.parametrize("dtype", CACHES)
def test_tiles_and_shares_hold_all_rows_and_slots_and_fit(dtype):
    for model, spec in MODELS.items():
        for width in (1, 2, 7, 16, 64):
            for capacity in (64, 72, 128, 8192):
                if spec.latent or spec.dim > gpu_plan.MOST_DIM:
                    continue
                q, cache = shaped(spec, width, capacity)
                shapes = shapes_of(q, cache, cache)
                plan = gpu_plan.make_plan(
                    shapes, cache=dtype, scaled=dtype != jnp.bfloat16
                )
                assert plan.rows >= shapes.rows, model
                assert plan.blocks * gpu_plan.TILE >= capacity
                assert plan.window >= width
                assert 1 <= plan.splits <= plan.blocks
                assert gpu_plan.shared_bytes(shapes, plan) <= hopper.SHARED_BYTES


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "fp8-as-it-is"])
def test_what_pallas_takes_of_shared_memory_has_room_too(kind):
    """Of all heads and windows the ones that leave least: Pallas refuses too much."""
    call = {"q_heads": 1, "kv_heads": 1, "dim": 240, "width": 64, "capacity": 128}
    arrays, options = KINDS[kind].call(lengths=(3,), **call)
    run = jax.jit(lambda x: api.window_attention(**x, **options))
    with compat.lowering_for("gpu", "NVIDIA H100 80GB HBM3", 132):
        text = run.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


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
        ({"cache": jnp.float32}, "its cache is float32"),
        ({"cache": jnp.float8_e5m2}, "its cache is float8_e5m2"),
        ({"cache": jnp.int8, "window": jnp.dtype("float32")}, "its window is float32"),
        ({"cache": jnp.int8, "shared": True}, "not known of int8 caches"),
        ({"cache": jnp.int8, "table": (1, 2), "slots": 16}, "scales are copied"),
        ({"narrowed": True}, "indexer"),
        ({"shared": True, "dim": 640}, "latent rows have 640"),
        ({"slots": 56}, "56 slots"),
        ({"slots": 132}, "132 slots"),
        ({"table": (1, 2), "slots": 24}, "pages have 24 slots"),
        ({"table": (1, 2), "slots": 96}, "pages have 96 slots"),
        ({}, None),
        ({"table": (1, 2), "slots": 16}, None),
        ({"cache": jnp.int8, "table": (1, 2), "slots": 32}, None),
        ({"cache": jnp.float8_e4m3fn, "dim": 256, "width": 64}, None),
        (
            {
                "cache": jnp.float8_e4m3fn,
                "table": (1, 2),
                "slots": 8,
                "scaled": False,
            },
            None,
        ),
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
    narrow = jnp.dtype(dtype).itemsize == 1
    options = Options(
        scale=1.0,
        shared=change.get("shared", False),
        scaled=change.get("scaled", narrow),
    )
    told = gpu_plan.refusal(
        *(q, cache, cache, table, options),
        narrowed=change.get("narrowed", False),
        window=change.get("window", jnp.bfloat16),
    )
    assert told is why if why is None else told is not None and why in told


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
