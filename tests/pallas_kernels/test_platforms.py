"""The choice of an implementation when a call is lowered."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import compat, platforms
from pallas_kernels.platforms import Kernel, choose

X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)


def twice(x: jax.Array) -> jax.Array:
    return x * 2


def twice_by_kernel(x: jax.Array, interpret: compat.Interpret = False) -> jax.Array:
    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=interpret)(x)


def run(x: jax.Array, refusal: str | None = None, **options: Any) -> jax.Array:
    kernel = Kernel(twice_by_kernel, refusal)
    return choose("twice", (x,), reference=twice, kernels={"tpu": kernel}, **options)


def lowered(function: Any, platform: str) -> str:
    with compat.lowering_for("tpu", "TPU v5 lite"):
        traced = jax.jit(function).trace(X)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture(autouse=True)
def _empty_record():
    platforms.forget_choices()


def test_one_trace_becomes_a_kernel_on_tpu_and_the_reference_on_cpu():
    assert "tpu_custom_call" in lowered(run, "tpu")
    assert "custom_call" not in lowered(run, "cpu")
    np.testing.assert_array_equal(jax.jit(run)(X), X * 2)


def test_what_a_kernel_refuses_is_recorded_and_runs_the_reference():
    assert "custom_call" not in lowered(lambda x: run(x, "too odd"), "tpu")
    (choice,) = platforms.choices()
    assert choice.on("tpu") == "reference: too odd"
    assert choice.on("cpu") == "reference"
    assert choice.shapes == ("float32[8, 128]",)


def test_what_a_kernel_takes_is_recorded():
    jax.eval_shape(lambda x: run(x), X)
    assert [c.on("tpu") for c in platforms.choices()] == ["kernel"]


def test_a_device_with_kernels_that_runs_without_one_warns(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(platforms.KernelWarning, match="too odd"):
        run(X, "too odd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(run)(X)


def test_a_kernel_can_be_required():
    with pytest.raises(platforms.NoKernelError, match="too odd"):
        run(X, "too odd", implementation="require")
    np.testing.assert_array_equal(jax.jit(run)(X), X * 2)


def test_what_is_required_is_the_kernel_of_the_platform_at_hand():
    taken, refused = Kernel(twice_by_kernel), Kernel(twice_by_kernel, "too odd")

    def traced(**kernels: Kernel) -> None:
        def run(x: jax.Array) -> jax.Array:
            return choose(
                "twice",
                (x,),
                reference=twice,
                kernels=kernels,  # pyright: ignore[reportArgumentType]
                implementation="require",
            )

        jax.eval_shape(run, X)

    traced(tpu=taken, cuda=refused)  # neither is here: one of them is enough
    with compat.lowering_for("tpu", "TPU v5 lite"):
        traced(tpu=taken, cuda=refused)
    with compat.lowering_for("gpu", "NVIDIA H100"):
        with pytest.raises(platforms.NoKernelError, match=r"cuda.*too odd"):
            traced(tpu=taken, cuda=refused)
        with pytest.raises(platforms.NoKernelError, match=r"cuda.*there is none"):
            traced(tpu=taken)


def test_a_kernel_can_be_interpreted():
    np.testing.assert_array_equal(run(X, implementation="interpret"), X * 2)
    with pytest.raises(platforms.NoKernelError, match="too odd"):
        run(X, "too odd", implementation="interpret")


def test_the_reference_can_be_asked_for():
    text = lowered(lambda x: run(x, implementation="reference"), "tpu")
    assert "custom_call" not in text


def test_the_reference_is_differentiated_in_a_kernels_place():
    grads = jax.jit(jax.grad(lambda x: jnp.sum(run(x) ** 2)))(X)
    np.testing.assert_array_equal(grads, 8 * X)


def test_a_misspelt_override_is_refused(monkeypatch):
    monkeypatch.setattr(platforms, "_OVERRIDE", "refrence")
    with pytest.raises(ValueError, match="SPECJAX_KERNELS=refrence"):
        run(X)


def test_races_are_found():
    """A copy that is read before it was waited for, and the same with the wait."""
    from jax.experimental.pallas import tpu as pltpu

    def run(early: bool) -> np.ndarray:
        def body(x_ref: Any, out_ref: Any, buffer: Any, done: Any) -> None:
            copy = pltpu.make_async_copy(x_ref, buffer, done)
            copy.start()
            if not early:
                copy.wait()
            out_ref[...] = buffer[...]
            if early:
                copy.wait()

        call = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM(X.shape, X.dtype), pltpu.SemaphoreType.DMA],
            interpret=compat.tpu_interpret(detect_races=True),
        )
        return np.asarray(call(X))

    with compat.without_races():
        np.testing.assert_array_equal(run(early=False), X)
    with pytest.raises(compat.RaceError), compat.without_races():
        run(early=True)
    with compat.without_races():  # the record of one run does not stain the next
        np.testing.assert_array_equal(run(early=False), X)
