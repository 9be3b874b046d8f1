"""Compile for TPUs that are not there: libtpu's compiler needs no device."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from pallas_kernels import compat
from pallas_kernels.aot.case import Case

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}

_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    # else a second process waits for the first one's lock, and fails
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def missing() -> str | None:
    """Why nothing can be compiled here, and what to install."""
    if importlib.util.find_spec("libtpu") is None:
        return "TPU: libtpu is not installed: pip install -e .[aot-tpu]"
    return None


def device(generation: str) -> Any:
    """The first device of a topology of this generation. It cannot run anything."""
    return devices(generation)[0]


def devices(generation: str) -> list[Any]:
    """The four of a topology of this generation."""
    from jax.experimental import topologies

    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    name = TOPOLOGIES[generation]
    return topologies.get_topology_desc(name, platform="tpu").devices


def compile_case(case: Case, target: Any) -> Any:
    """The compiled program of a case for a device; the compiler's error if it fails."""
    sharding = SingleDeviceSharding(target)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        case.arguments,
    )
    with compat.lowering_for("tpu", target.device_kind, target.num_cores):
        jitted = jax.jit(case.function, donate_argnums=case.donated)
        return jitted.lower(*arguments).compile()
