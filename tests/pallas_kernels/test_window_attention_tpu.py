"""The TPU's kernel of window attention, emulated, against the reference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.mesh import Spread
from pallas_kernels.window_attention import api
from pallas_kernels.window_attention.interpreted import (
    BLOCK,
    TOLERANCE,
    by_kernel,
    by_reference,
)
from pallas_kernels.window_attention.plan import (
    ROW_TILE,
    make_plan,
    refusal,
    shapes_of,
)
from pallas_kernels.window_attention.problems import in_pages, random_call
from pallas_kernels.window_attention.specs import MODELS, AttentionSpec

pytestmark = pytest.mark.timeout(240)

EDGES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 211)
"""Committed lengths around the edges of a block, and a prime one."""

SMALL = AttentionSpec(q_heads=4, kv_heads=2, dim=64)


def check(spec: AttentionSpec, dtype: Any = jnp.float32, **more: Any) -> None:
    call = {"lengths": EDGES, "width": 5, "capacity": 211, **more}
    block = call.pop("block", BLOCK)
    interpret = call.pop("interpret", True)
    size = call.pop("page_size", None)
    arrays, options = random_call(spec, dtype=dtype, **call)
    wanted = by_reference(arrays, options)
    if size is not None:
        arrays = in_pages(arrays, size)
    got = by_kernel(arrays, options, block=block, interpret=interpret)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama-3-8b", jnp.bfloat16),
        ("phi-2", jnp.float32),
        ("gpt-oss-20b-local", jnp.float32),
        ("deepseek-v3", jnp.bfloat16),
    ],
)
def test_it_is_the_reference_at_real_heads(model, dtype):
    lengths = (0, 1, 127, 128, 129, 1000) if MODELS[model].reach else EDGES
    check(MODELS[model], dtype, lengths=lengths, width=3)


@pytest.mark.parametrize(("model", "size"), [("phi-2", 16), ("llama-3.2-1b", 128)])
def test_pages_are_read_through_the_table(model, size):
    check(MODELS[model], page_size=size, width=2)


def test_memories_and_copies_of_a_tpu_and_any_order_of_parallel_axes():
    """Memory starts as NaN there, and copies arrive when they are waited for."""
    spec = dataclasses.replace(SMALL, softcap=3.0, sinks=True)
    interpret = compat.tpu_interpret(detect_races=True, seed=3)
    with compat.without_races():
        check(spec, interpret=interpret, reach=40, lengths=(0, 128, 200))


def test_a_slot_too_many_or_too_few_shows():
    """What the comparisons would see if the kernel took another length."""
    arrays, options = random_call(SMALL, lengths=(60, 128), width=2, capacity=150)
    wanted = by_reference(arrays, options)
    np.testing.assert_allclose(by_kernel(arrays, options), wanted, rtol=0, atol=3e-6)
    fewer = {**arrays, "lengths": arrays["lengths"] - 1}
    more = {**arrays, "lengths": arrays["lengths"] + 1}
    assert np.abs(by_kernel(fewer, options) - wanted).max(axis=(1, 2, 3)).min() > 1e-3
    assert np.isnan(by_kernel(more, options)).any(axis=(1, 2, 3)).all()
    others = {**arrays, "ancestors": np.tril(np.ones((2, 2, 2), bool)) & False}
    others["ancestors"] = jnp.asarray(others["ancestors"] | np.eye(2, dtype=bool))
    assert np.abs(by_kernel(others, options)[:, 1] - wanted[:, 1]).max() > 1e-3


def test_the_decoders_call_can_be_interpreted():
    arrays, options = random_call(SMALL, lengths=(0, 77), width=3, capacity=100)
    got = api.window_attention(**arrays, **options, implementation="interpret")
    wanted = by_reference(arrays, options)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=3e-6)


def test_tiles_hold_all_rows_and_slots():
    for model, spec in MODELS.items():
        for width in (1, 2, 7, 16, 64):
            for capacity in (1, 127, 128, 129, 8192):
                shape = (1, spec.kv_heads, capacity, spec.dim)
                cache = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
                q = jax.ShapeDtypeStruct(
                    (1, width, spec.q_heads, spec.dim), jnp.bfloat16
                )
                shapes = shapes_of(q, cache, cache)
                plan = make_plan(shapes, jnp.dtype(jnp.bfloat16))
                assert plan.rows >= shapes.rows, model
                assert plan.row_tile % 16 == 0
                assert plan.row_tile <= ROW_TILE
                assert plan.blocks * plan.block >= capacity
                assert spec.kv_heads % plan.heads == 0
                assert refusal(q, cache, cache, narrowed=False) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"width": 65}, "65 rows"),
        ({"dim": 1024}, "1024 channels"),
        ({"cache": jnp.float16}, "float16"),
        ({"narrowed": True}, "indexer"),
        ({"value_dim": 32}, "values 32"),
        ({"table": (1, 2), "slots": 16}, "pages have 16 slots"),
        ({"table": (64, 2048)}, "65536 entries"),
    ],
)
def test_a_call_that_is_not_for_it_is_refused_by_name(change, why):
    dim = change.get("dim", 64)
    dtype = change.get("cache", jnp.float32)
    q = jax.ShapeDtypeStruct((1, change.get("width", 4), 4, dim), jnp.float32)
    slots, table = change.get("slots", 128), change.get("table")
    k = jax.ShapeDtypeStruct((1, 2, slots, dim), dtype)
    v = jax.ShapeDtypeStruct((1, 2, slots, change.get("value_dim", dim)), dtype)
    if table is not None:
        table = jax.ShapeDtypeStruct(table, jnp.int32)
    told = refusal(q, k, v, table, narrowed=change.get("narrowed", False))
    assert told is not None and why in told


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("width", [1, 8, 17, 64])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_and_width(model, width, dtype):
    lengths = (0, 127, 130, 1000) if MODELS[model].reach else (0, 1, 300, 389)
    check(MODELS[model], dtype, width=width, lengths=lengths, capacity=389)


@pytest.mark.full
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("capacity", [1, 127, 128, 129, 211, 512])
def test_every_head_size_and_capacity(dim, capacity):
    lengths = sorted({0, 1, capacity // 2, capacity - 1, capacity})
    spec = dataclasses.replace(SMALL, dim=dim)
    check(spec, capacity=capacity, lengths=lengths)


@pytest.mark.full
@pytest.mark.parametrize("reach", [1, 5, 128, 129, 1000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_option(reach, sinks, softcap, kv_heads):
    spec = AttentionSpec(
        q_heads=4, kv_heads=kv_heads, dim=128, sinks=sinks, softcap=softcap
    )
    check(spec, reach=reach, width=9, capacity=389, lengths=(0, 100, 256, 389))


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama-3.2-1b", "gpt-oss-20b-local", "qwen3.5-27b"])
@pytest.mark.parametrize("seed", [0, 1])
def test_models_on_the_memories_of_a_tpu(model, seed):
    with compat.without_races():
        check(
            MODELS[model],
            interpret=compat.tpu_interpret(detect_races=True, seed=seed),
            lengths=(0, 129),
        )


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 8, 16, 48, 128, 256])
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-oss-20b", "deepseek-v3"])
@pytest.mark.parametrize("reach", [None, 70])
def test_pages_of_every_size(model, size, reach):
    lengths = (0, size, size + 1, 300, 389)
    check(MODELS[model], page_size=size, reach=reach, capacity=389, lengths=lengths)


@pytest.mark.full
@pytest.mark.parametrize("block", [128, 256, 512, None])
@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3", "gpt-oss-20b"])
def test_every_block_and_four_of_them(model, block):
    capacity = 4 * (block or 512)
    lengths = (0, capacity - 1, capacity)
    check(MODELS[model], block=block, capacity=capacity, lengths=lengths, width=4)


@pytest.mark.parametrize(
    "model",
    [
        "gpt-oss-20b-local",
        pytest.param("llama-3.2-1b", marks=pytest.mark.full),
        pytest.param("falcon-7b", marks=pytest.mark.full),
        "deepseek-v3",
    ],
)
def test_on_a_mesh_each_device_has_its_rows_and_heads(cpu_devices, model):
    spec = dataclasses.replace(MODELS[model], q_heads=8)
    lengths = (0, 60, 128, 131)
    arrays, options = random_call(spec, lengths=lengths, width=3, capacity=150)
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:4]).reshape(2, 2), ("rows", "cols"))
    spread = Spread(mesh, batch="rows", heads="cols")
    run = jax.jit(
        lambda **x: api.window_attention(
            **x, **options, spread=spread, implementation="interpret"
        )
    )
    out = run(**arrays)
    assert out.sharding.shard_shape(out.shape) == (2, 3, 4, spec.dim)
    wanted = by_reference(arrays, options)
    np.testing.assert_allclose(np.asarray(out), wanted, rtol=0, atol=3e-6)
