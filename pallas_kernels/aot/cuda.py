"""Compile for NVIDIA GPUs that are not there: XLA's compiler and ptxas need none.

A process compiles for one kind of GPU only: what Mosaic GPU has found out about the
first is taken for the next. What ptxas and Mosaic say of a kernel is read from files
that they are asked to write.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from pallas_kernels import compat
from pallas_kernels.aot.case import Case
from pallas_kernels.hopper import SHARED_BYTES


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What its compiler must know of one."""

    name: str
    memory: int
    bandwidth: int
    """Bytes a second."""


TARGETS = {"h100": Gpu("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000)}
"""All of Hopper are one program; the H100 stands for them."""

_CONFIGURATION = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared}
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  device_address_bits: 64
  name: "{name}"
  runtime_version: "12.8.0"
  driver_version: "13.0.0"
  compile_time_toolkit_version: "12.8.0"
}}
platform_name: "CUDA"
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Resources:
    """What the kernels of a program take of a multiprocessor: the largest of each."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of registers that are written to memory, and read again."""
    shared: int | None
    """Bytes of shared memory of a block of threads. JAX before 0.12 does not say, but
    refuses what does not fit."""

    def faults(self) -> tuple[str, ...]:
        """What must not be."""
        found = []
        if self.spilled:
            found.append(f"{self.spilled} bytes of registers are spilled")
        if self.shared is not None and self.shared > SHARED_BYTES:
            found.append(f"{self.shared} bytes of shared memory, of {SHARED_BYTES}")
        return tuple(found)


def missing() -> str | None:
    """Why nothing can be compiled here, and what to install."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return "CUDA: JAX's plugin is not installed: pip install -e .[aot-cuda]"
    wheel = importlib.util.find_spec("nvidia")
    folders = [] if wheel is None else list(wheel.submodule_search_locations or ())
    found = any(list(Path(folder).rglob("bin/ptxas")) for folder in folders)
    if not found and shutil.which("ptxas") is None:
        return "CUDA: ptxas is not installed: pip install -e .[aot-cuda]"
    return None


def device(name: str) -> Any:
    """A GPU of this kind. It cannot run anything."""
    return devices(name, 1)[0]


def devices(name: str, count: int) -> Any:
    """Several of one host."""
    from jax.experimental import topologies

    _dump_folder()
    gpu = TARGETS[name]
    configuration = _CONFIGURATION.format(
        **dataclasses.asdict(gpu), shared=SHARED_BYTES
    )
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=configuration, topology=f"1x1x{count}"
    )
    return topology.devices


def compile_case(case: Case, target: Any) -> Any:
    """The compiled program of a case for a device; the compiler's error if it fails."""
    sharding = SingleDeviceSharding(target)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        case.arguments,
    )
    for old in _dump_folder().iterdir():
        old.unlink()
    with compat.lowering_for("gpu", target.device_kind, target.core_count):
        jitted = jax.jit(case.function, donate_argnums=case.donated)
        with _without_disassembler():
            return jitted.lower(*arguments).compile()


_NO_DISASSEMBLER = re.compile(
    r"nvdisasm invocation failed.*\n"
    r"(=== Source Location Trace: ===\s*\n.*dump\.cc:\d+\n\s*)?"
)


@contextlib.contextmanager
def _without_disassembler() -> Iterator[None]:
    """Mosaic would disassemble what it writes, and complains of each kernel without it.

    The rest of what the compilers say is passed on.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        before = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            said.seek(0)
            rest = _NO_DISASSEMBLER.sub("", said.read().decode("utf-8", "replace"))
            sys.stderr.write(rest)


_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
_compiled: dict[str, tuple[int, int]] = {}
"""Registers and spilled bytes by the kernel's hash: each is compiled once a process."""


def resources(program: str) -> Resources | None:
    """Of the program that was compiled last, by its text; ``None``: it has no kernel.

    Raises ``ValueError`` if the compilers do not say.
    """
    hashes = set(_HASH.findall(program))
    if not hashes:
        return None
    told = [path.read_text() for path in _dump_folder().glob("*.ptxas")]
    new = hashes - _compiled.keys()
    if len(told) != len(new):
        raise ValueError(f"ptxas told of {len(told)} kernels, and {len(new)} are new")
    worst = [max(column) for column in zip(*map(registers_of, told), strict=True)]
    _compiled.update({kernel: (worst[0], worst[1]) for kernel in new})
    scratch = [path.read_text() for path in _dump_folder().glob("*.resources.txt")]
    return Resources(
        registers=max(_compiled[kernel][0] for kernel in hashes),
        spilled=max(_compiled[kernel][1] for kernel in hashes),
        shared=max(map(shared_of, scratch), default=None),
    )


def unfenced() -> list[str]:
    """What is out of order in the kernels that were compiled last, and first then."""
    return [
        fault
        for path in _dump_folder().glob("*.ptx")
        for fault in unfenced_products(path.read_text())
    ]


def unfenced_products(ptx: str) -> list[str]:
    """Products that may read shared memory before what threads wrote has reached it.

    Matrix units read it by another way than threads write it: a fence must stand
    between. Emulation does not show one that is missing. Lines are taken as they stand,
    so a store behind a branch counts as well.
    """
    found, stored = [], False
    for number, line in enumerate(ptx.splitlines(), 1):
        if "st.shared" in line or "stmatrix" in line:
            stored = True
        elif "fence.proxy.async" in line:
            stored = False
        elif stored and "wgmma.mma_async" in line:
            found.append(f"no fence before the product in line {number}")
    return found


def registers_of(ptxas: str) -> tuple[int, int]:
    """Registers and spilled bytes, from what ptxas says of a kernel."""
    stored = _number(r"(\d+) bytes spill stores", ptxas)
    return (
        _number(r"Used (\d+) registers", ptxas),
        stored + _number(r"(\d+) bytes spill loads", ptxas),
    )


def shared_of(mosaic: str) -> int:
    """Bytes of shared memory, from what Mosaic GPU says of a kernel."""
    return _number(r"smem_scratch_bytes=(\d+)", mosaic)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in what the compiler said: {text[:400]}")
    return int(match[1])


@functools.cache
def _dump_folder() -> Path:
    """Where they write. They look at the environment at their first kernel only."""
    folder = tempfile.mkdtemp(prefix="pallas_kernels_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    return Path(folder)
