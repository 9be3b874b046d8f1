"""The decoder's rounds, compiled for devices that are not here."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import compat
from pallas_kernels.skinny_matmul import gpu_body, gpu_plan
from specjax.decoding.engine import Engine
from specjax.decoding.loop import run_rounds
from specjax.models.mixers import attention, latent_attention


class Rounds:
    """The programs of an engine's rounds."""

    @staticmethod
    def shapes_of(tree: Any, sharding: Any = None) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    @staticmethod
    def compile(engine: Engine, target: Any, state: Any) -> Any:
        """For the devices of these shapes."""
        lowered = run_rounds.lower(
            target,
            engine.drafter,
            engine.rule,
            state,
            options=engine.round_options,
            max_rounds=4,
            kinds=engine.kinds,
        )
        return lowered.compile()

    def compile_for(self, device: Any, engine: Engine, state: Any) -> Any:
        """For one device, of a TPU or of a GPU."""
        there = SingleDeviceSharding(device)
        shapes = [self.shapes_of(x, there) for x in (engine.target, state)]
        on_tpu = device.platform == "tpu"
        cores = device.num_cores if on_tpu else device.core_count
        kind = device.device_kind
        with compat.lowering_for("tpu" if on_tpu else "gpu", kind, cores):
            return self.compile(engine, *shapes)


@pytest.fixture
def rounds(monkeypatch):
    for mixer in (attention, latent_attention):
        # on CPU, where this runs, a bfloat16 cache would be made float32
        monkeypatch.setattr(mixer, "cache_dtype", lambda _: jnp.dtype(jnp.bfloat16))
    # programs for a device that is not here are looked at, not kept
    jax.config.update("jax_enable_compilation_cache", False)
    yield Rounds()
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def refilled_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skinny products on Hopper ask for a step while its place is multiplied."""
    wait, fetch = gpu_body.Steps.wait, gpu_body.Steps.fetch

    def early(steps: Any, i: Any) -> Any:
        found = wait(steps, i)
        fetch(steps, i + gpu_plan.STAGES)
        return found

    def only_the_first(steps: Any, i: Any) -> None:
        if isinstance(i, int):
            fetch(steps, i)

    monkeypatch.setattr(gpu_body.Steps, "wait", early)
    monkeypatch.setattr(gpu_body.Steps, "fetch", only_the_first)
