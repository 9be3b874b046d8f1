"""Window attention over caches of one byte a number: definition and TPU kernel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.mesh import Spread
from pallas_kernels.platforms import NoKernelError
from pallas_kernels.window_attention import api, reference
from pallas_kernels.window_attention.interpreted import (
    BLOCK,
    TOLERANCE,
    by_kernel,
    by_reference,
)
from pallas_kernels.window_attention.narrow import check_scales
from pallas_kernels.window_attention.plan import refusal
from pallas_kernels.window_attention.problems import in_pages, random_call
from pallas_kernels.window_attention.specs import MODELS, AttentionSpec

pytestmark = pytest.mark.timeout(240)

INT8, FP8 = jnp.int8, jnp.float8_e4m3fn
NARROW = {"int8": (INT8, True), "fp8": (FP8, True), "fp8-as-it-is": (FP8, False)}
EDGES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 211)
SMALL = AttentionSpec(q_heads=4, kv_heads=2, dim=128)


def call_of(spec: AttentionSpec, kind: str, **more: Any):
    cache, scaled = NARROW[kind]
    call = {"lengths": EDGES, "width": 5, "capacity": 211, **more}
    return random_call(spec, cache=cache, scaled=scaled, **call)


def check(
    spec: AttentionSpec,
    kind: str,
    dtype: Any = jnp.float32,
    *,
    page_size: int | None = None,
    interpret: compat.Interpret = True,
    **more: Any,
) -> None:
    arrays, options = call_of(spec, kind, dtype=dtype, **more)
    wanted = by_reference(arrays, options)
    if page_size is not None:
        arrays = in_pages(arrays, page_size)
    got = by_kernel(arrays, options, interpret=interpret)
    assert np.isfinite(wanted).all()
    limit = TOLERANCE[dtype] * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=limit)


@pytest.mark.parametrize("kind", list(NARROW))
@pytest.mark.parametrize("spec", [SMALL, MODELS["gpt-oss-20b-local"]], ids=["", "ring"])
def test_it_is_attention_over_codes_times_scales(kind, spec):
    """Over the cache written out in float32."""
    arrays, options = call_of(spec, kind, lengths=(0, 1, 130, 200), width=3)
    wide = dict(arrays)
    for name in ("k", "v"):
        scale = wide.pop(f"{name}_scale", jnp.ones(arrays["k_cache"].shape[:3]))
        codes = arrays[f"{name}_cache"].astype(jnp.float32)
        wide[f"{name}_cache"] = codes * scale[..., None]
    wanted = by_reference(wide, options)
    got = by_reference(arrays, options)
    assert np.isfinite(got).all()
    limit = 2e-6 * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=limit)


@pytest.mark.parametrize("kind", list(NARROW))
def test_what_stands_in_unused_slots_and_scales_changes_no_bit(kind):
    arrays, options = call_of(SMALL, kind)
    held = np.arange(211) < np.asarray(arrays["lengths"])[:, None, None]
    clean = dict(arrays)
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if name in clean:
            x = np.asarray(clean[name], np.float32)
            mask = held if x.ndim == 3 else held[..., None]
            clean[name] = jnp.asarray(np.where(mask, x, 0), clean[name].dtype)
    np.testing.assert_array_equal(
        by_reference(arrays, options), by_reference(clean, options)
    )
    np.testing.assert_array_equal(by_kernel(arrays, options), by_kernel(clean, options))


def test_a_scale_that_is_committed_shows():
    """NaN, or another head's: of one slot and one head, in that head alone."""
    arrays, options = call_of(SMALL, "int8", lengths=(90, 200), width=2)
    for run in (by_reference, by_kernel):
        clean = run(arrays, options)
        for name in ("k_scale", "v_scale"):
            at = (1, 1, 150)
            broken = {**arrays, name: arrays[name].at[at].set(jnp.nan)}
            got = run(broken, options)
            assert np.isnan(got[1, :, 2:]).all(), name
            np.testing.assert_array_equal(got[1, :, :2], clean[1, :, :2])
            np.testing.assert_array_equal(got[0], clean[0])
            other = {**arrays, name: arrays[name][:, ::-1]}
            assert np.abs(run(other, options) - clean).max() > 1e-2, name


@pytest.mark.parametrize(
    ("model", "kind", "dtype", "page_size"),
    [
        ("llama-3-8b", "int8", jnp.bfloat16, None),
        ("llama-3-8b", "fp8", jnp.float32, 128),
        ("llama-3-8b", "fp8-as-it-is", jnp.bfloat16, 16),
        ("phi-2", "fp8", jnp.float32, None),
        ("gpt-oss-20b-local", "int8", jnp.float32, None),
    ],
)
def test_the_kernel_is_the_reference_at_real_heads(model, kind, dtype, page_size):
    lengths = (0, 1, 127, 128, 129, 1000) if MODELS[model].reach else EDGES
    check(MODELS[model], kind, dtype, page_size=page_size, lengths=lengths, width=3)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_memories_and_copies_of_a_tpu_and_any_order_of_parallel_axes(kind):
    spec = dataclasses.replace(SMALL, softcap=3.0, sinks=True)
    interpret = compat.tpu_interpret(detect_races=True, seed=3)
    with compat.without_races():
        check(spec, kind, interpret=interpret, reach=40, lengths=(0, 128, 200))


@pytest.mark.full
@pytest.mark.parametrize("kind", list(NARROW))
@pytest.mark.parametrize("seed", [0, 1])
def test_pages_on_the_memories_of_a_tpu(kind, seed):
    interpret = compat.tpu_interpret(detect_races=True, seed=seed)
    with compat.without_races():
        check(SMALL, kind, page_size=128, interpret=interpret, lengths=(0, 129))


def test_the_decoders_call_can_be_interpreted():
    arrays, options = call_of(SMALL, "int8", lengths=(0, 77), width=3, capacity=100)
    got = api.window_attention(**arrays, **options, implementation="interpret")
    wanted = by_reference(arrays, options)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=1e-5)


def test_pages_are_gathered_with_their_scales():
    arrays, options = call_of(SMALL, "int8")
    wanted = by_reference(arrays, options)
    pages = in_pages(arrays, 16)
    got = api.window_attention(**pages, **options, implementation="reference")
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=1e-6)
    with pytest.raises(NoKernelError, match=r"pages have 16 slots: scales"):
        api.window_attention(**pages, **options, implementation="interpret")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k_scale": None}, "give both, or neither"),
        ({"k_scale": None, "v_scale": None}, "an int8 cache needs k_scale"),
        ({"v_scale": jnp.ones((2, 2, 100), jnp.bfloat16)}, "v_scale is bfloat16"),
        ({"v_cache": jnp.ones((2, 2, 100, 128), FP8)}, "v_cache is float8_e4m3fn"),
        (
            {n: jnp.ones((2, 2, 100, 128)) for n in ("k_cache", "v_cache")},
            "a float32 cache has no scales",
        ),
    ],
)
@pytest.mark.parametrize("attend", [api, reference], ids=["api", "reference"])
def test_scales_that_do_not_go_with_a_cache_are_refused(attend, change, why):
    arrays, options = call_of(SMALL, "int8", lengths=(0, 77), capacity=100)
    with pytest.raises(ValueError, match=why):
        attend.window_attention(**{**arrays, **change}, **options)


def test_a_scale_of_another_shape_is_refused():
    cache = jnp.zeros((2, 2, 100, 128), INT8)
    scales = jnp.ones((2, 2, 100)), jnp.ones((2, 2, 99))
    with pytest.raises(
        ValueError, match=r"v_scale is float32\[2, 2, 99\].*\[2, 2, 100\]"
    ):
        check_scales(cache, cache, *scales)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"window": jnp.float16}, "its window is"),
        ({"shared": True}, "its keys are its values too"),
        ({"size": 64}, "its pages have 64 slots"),
        ({"dtype": jnp.uint8}, "its cache is uint8"),
        ({"dim": 64}, "its heads have 64 channels: in int8 newer compilers copy"),
    ],
)
def test_a_call_that_is_not_for_the_kernel_is_refused_by_name(change, why):
    dim, slots = change.get("dim", 128), change.get("size", 128)
    q = jax.ShapeDtypeStruct((1, 2, 4, dim), jnp.float32)
    cache = jax.ShapeDtypeStruct((1, 2, slots, dim), change.get("dtype", INT8))
    table = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    options = {"window": change.get("window", jnp.bfloat16)}
    options |= {"shared": change.get("shared", False), "scaled": True}
    told = refusal(q, cache, cache, table, narrowed=False, **options)
    assert told is not None and why in told
    q = jax.ShapeDtypeStruct((1, 2, 4, 128), jnp.float32)
    options = {"narrowed": False, "window": jnp.bfloat16}
    for size, scaled in ((128, True), (16, False)):
        cache = jax.ShapeDtypeStruct((1, 2, size, 128), FP8)
        assert refusal(q, cache, cache, table, scaled=scaled, **options) is None


def test_on_a_mesh_each_device_has_its_scales(cpu_devices):
    spec = dataclasses.replace(SMALL, kv_heads=4)
    arrays, options = call_of(spec, "int8", lengths=(0, 60, 128, 131), width=3)
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:4]).reshape(2, 2), ("rows", "cols"))
    spread = Spread(mesh, batch="rows", heads="cols")
    run = jax.jit(
        lambda **x: api.window_attention(
            **x, **options, spread=spread, implementation="interpret"
        )
    )
    out = run(**arrays)
    assert out.sharding.shard_shape(out.shape) == (2, 3, 2, 128)
    wanted = by_reference(arrays, options)
    np.testing.assert_allclose(np.asarray(out), wanted, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", list(NARROW))
@pytest.mark.parametrize("model", [m for m in MODELS if not MODELS[m].latent])
def test_every_model(model, kind, dtype):
    lengths = (0, 127, 130, 1000) if MODELS[model].reach else (0, 1, 300, 389)
    check(MODELS[model], kind, dtype, width=8, lengths=lengths, capacity=389)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3.2-1b", "gpt-oss-20b"])
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("reach", [None, 70])
def test_pages_of_every_size(model, kind, size, reach):
    lengths = (0, size, size + 1, 300, 389)
    more = {"reach": reach, "capacity": 389, "lengths": lengths}
    check(MODELS[model], kind, page_size=size, **more)


@pytest.mark.full
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("capacity", [1, 127, 129, 211, 512])
@pytest.mark.parametrize("kind", list(NARROW))
def test_every_head_size_and_capacity(dim, capacity, kind):
    lengths = sorted({0, 1, capacity // 2, capacity - 1, capacity})
    spec = dataclasses.replace(SMALL, dim=dim)
    check(spec, kind, capacity=capacity, lengths=lengths)
