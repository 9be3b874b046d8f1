"""Calls that users make of the operations, beyond what the decoder does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, platforms
from pallas_kernels.delta_window import api as delta
from pallas_kernels.delta_window.problems import Problem
from pallas_kernels.delta_window.specs import DeltaSpec
from pallas_kernels.skinny_matmul import api as skinny
from pallas_kernels.skinny_matmul.problems import weight_of
from pallas_kernels.window_attention import tpu
from pallas_kernels.window_attention.api import window_attention
from pallas_kernels.window_attention.pages import gather_pages
from pallas_kernels.window_attention.plan import Options
from pallas_kernels.window_attention.problems import in_pages, random_call
from pallas_kernels.window_attention.reference import check_heads
from pallas_kernels.window_attention.specs import AttentionSpec

SPEC = AttentionSpec(q_heads=2, kv_heads=1, dim=64)
CLOSE = {"rtol": 0, "atol": 1e-5}


def call(**more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    given = {"lengths": (5, 130), "width": 2, "capacity": 136} | more
    return random_call(SPEC, **given)


def clean(arrays: dict[str, Any]) -> dict[str, Any]:
    """Without NaN, which derivatives do not keep out."""
    caches = {name: jnp.nan_to_num(arrays[name]) for name in ("k_cache", "v_cache")}
    return {**arrays, **caches}


def test_a_batch_of_calls_is_each_of_them():
    arrays, options = call()
    other = {**arrays, "q": arrays["q"] * 2}
    stacked = {
        name: None if x is None else jnp.stack([x, other[name]])
        for name, x in arrays.items()
    }
    run = jax.jit(jax.vmap(lambda x: window_attention(**x, **options)))
    wanted = [window_attention(**x, **options) for x in (arrays, other)]
    np.testing.assert_allclose(np.asarray(run(stacked)), np.stack(wanted), **CLOSE)


def test_a_batch_of_folds_is_each_of_them():
    """Their kernel for a GPU is made of what cannot be batched."""
    problem = Problem(DeltaSpec(heads=4, key_heads=2), 3, 2, 0)
    rows, num = problem.records(3), jnp.asarray([2, 0], jnp.int32)
    states = jnp.stack([problem.state, problem.state * 2])
    run = jax.jit(jax.vmap(lambda state: delta.delta_fold(state, rows, num)))
    wanted = [delta.delta_fold(state, rows, num) for state in states]
    np.testing.assert_allclose(np.asarray(run(states)), np.stack(wanted), **CLOSE)


@pytest.mark.parametrize("by", ["auto", "interpret"])
def test_derivatives_are_the_references(by):
    arrays, options = call()
    arrays = clean(arrays)

    def total(q: jax.Array, how: Any) -> jax.Array:
        out = window_attention(**{**arrays, "q": q}, **options, implementation=how)
        return jnp.sum(out**2)

    got, wanted = (jax.grad(total)(arrays["q"], how) for how in (by, "reference"))
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16])
def test_narrow_integers_are_lengths_too(dtype):
    arrays, options = call(lengths=(5, 100), capacity=128)
    wanted = window_attention(**arrays, **options, implementation="reference")
    arrays["lengths"] = arrays["lengths"].astype(dtype)
    got = window_attention(**arrays, **options, implementation="interpret")
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), **CLOSE)


def test_entries_that_stand_for_no_page_are_zeros():
    """A negative one is not the last page, as an index of JAX would have it."""
    pages = jnp.arange(1.0, 13.0).reshape(3, 1, 2, 2)
    got = gather_pages(pages, jnp.array([[-1, 1], [3, -3]]))
    wanted = np.zeros((2, 1, 4, 2), np.float32)
    wanted[0, 0, 2:] = pages[1, 0]
    np.testing.assert_array_equal(np.asarray(got), wanted)


def test_a_row_without_pages_may_name_none():
    arrays, options = call(lengths=(0, 130))
    paged = in_pages(arrays, 128)
    wanted = window_attention(**paged, **options, implementation="reference")
    paged["table"] = paged["table"].at[0].set(-1)
    got = tpu.window_attention(
        **paged, options=Options(**options), interpret=compat.tpu_interpret()
    )
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), **CLOSE)


@pytest.mark.parametrize("by", ["auto", "reference", "interpret"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slots": jnp.zeros((2, 136), jnp.int32), "table": True}, "a ring does not"),
        ({"reach": 0}, "reach = 0: it is 1 or more"),
        ({"reach": 3, "positions": None}, "reach = 3: .* needs positions"),
        ({"cache": jnp.uint8}, "k_cache is uint8: floating numbers, or codes"),
    ],
)
def test_what_nobody_can_take_is_refused_by_all(by, change, told):
    arrays, options = call()
    change = dict(change)
    if change.pop("table", False):
        arrays = in_pages(arrays, 128)
    if (dtype := change.pop("cache", None)) is not None:
        arrays = clean(arrays)
        arrays["k_cache"] = arrays["k_cache"].astype(dtype)
    with pytest.raises(ValueError, match=told):
        window_attention(**{**arrays, **options, **change}, implementation=by)


def test_heads_that_do_not_share_evenly_and_empty_arrays_are_refused():
    cache = jnp.zeros((2, 2, 8, 64))
    with pytest.raises(ValueError, match="3 query heads, 2 KV heads"):
        check_heads(jnp.zeros((2, 1, 3, 64)), cache, cache, None, None)
    with pytest.raises(ValueError, match="none may be empty"):
        check_heads(jnp.zeros((2, 0, 2, 64)), cache, cache, None, None)
    with pytest.raises(ValueError, match="may differ in channels alone"):
        check_heads(jnp.zeros((2, 1, 2, 64)), cache, cache[:, :, :4], None, None)
    check_heads(jnp.zeros((2, 1, 2, 64)), cache, cache[..., :16], None, None)


@pytest.mark.parametrize("by", ["auto", "reference", "interpret"])
@pytest.mark.parametrize("shape", [(256, 1), (1,), (128,), (5, 256), (3, 256)])
def test_scales_that_fit_no_weight_are_refused(by, shape):
    kind = "int4" if len(shape) == 2 and shape[1] == 256 else "int8"
    weight = weight_of(kind, 256, 256)._replace(scale=jnp.ones(shape, jnp.float32))
    with pytest.raises(ValueError, match=r"a scale of .* for a weight of \[256, 256\]"):
        skinny.skinny_matmul(jnp.ones((2, 256)), weight, implementation=by)


@pytest.mark.parametrize("rows", [0, 17])
def test_rows_are_one_to_sixteen(rows):
    weight = weight_of("bfloat16", 256, 256)
    with pytest.raises(ValueError, match="1 to 16 rows are multiplied"):
        skinny.skinny_matmul(jnp.ones((rows, 256)), weight)


def test_names_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="implementation='tpu': auto, reference"):
        platforms.choose.__wrapped__(  # past the checks of types
            "x",
            (),
            reference=lambda: None,
            kernels={},
            implementation="tpu",
        )
    weight = weight_of("bfloat16", 256, 256)
    with pytest.raises(ValueError, match="activation='gelu': one of silu, gelu_tanh"):
        skinny.skinny_gated.__wrapped__(  # past the checks of types
            jnp.ones((2, 256)),
            weight,
            weight,
            activation="gelu",  # pyright: ignore
        )
