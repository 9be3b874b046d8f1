"""What differs between JAX 0.10.2 and 0.12, hidden in one place.

Kernels import Pallas' stable names (``pl.pallas_call``, ``pl.BlockSpec``, ``pltpu``'s
memory spaces and copies) themselves, and from here what has moved or changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

Semantics = Literal["parallel", "arbitrary"]
Interpret = Any
"""``False``: compile; ``True``: quick emulation; or what ``tpu_interpret`` returns."""


class RaceError(AssertionError):
    """A kernel touches memory that a copy of its own may be writing or reading."""


def tpu_params(
    semantics: Sequence[Semantics], *, vmem_limit_bytes: int | None = None
) -> pltpu.CompilerParams:
    """For Mosaic TPU: how each grid axis may be walked, and the memory it may take."""
    return pltpu.CompilerParams(
        dimension_semantics=tuple(semantics), vmem_limit_bytes=vmem_limit_bytes
    )


def left_in_hbm(x: jax.Array) -> jax.Array:
    """An operand that a TPU kernel is to copy by itself, a block at a time.

    Without it XLA brings whatever fits into a core's own memory whole, and writes it
    back whole once something in it was updated.
    """
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def tpu_interpret(
    *,
    detect_races: bool = False,
    copies: Literal["on_wait", "eager"] = "on_wait",
    seed: int | None = None,
) -> pltpu.InterpretParams:
    """A TPU's memories and copies on CPU; memory starts as NaN.

    Unlike ``interpret=True`` this shows a read before its copy has been waited for.
    Axes that are ``parallel`` are walked in an order drawn from ``seed``. With
    ``detect_races`` run the kernel inside ``without_races``.
    """
    return pltpu.InterpretParams(
        detect_races=detect_races, dma_execution_mode=copies, random_seed=seed
    )


@contextlib.contextmanager
def without_races() -> Iterator[None]:
    """Raise ``RaceError`` if a kernel run inside with ``detect_races`` has a race.

    Older JAX only prints that it found one; newer JAX raises, which a jitted call
    reports as an error of the runtime. The results must be waited for inside.
    """
    pltpu.reset_tpu_interpret_mode_state()
    try:
        yield
        if _tpu_races_found():
            raise RaceError("a race was found: what was printed above says where")
    except RaceError:
        raise
    except Exception as error:
        # the interpreter's record is gone after some failures: ask the error as well
        if "RACE DETECTED" in str(error):
            raise RaceError(str(error)) from error
        raise
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def _tpu_races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    return races is not None and races.races_found


def gpu_interpret(*, detect_races: bool = True) -> Any:
    """A GPU's shared memory, barriers and copies on CPU, for Mosaic GPU kernels.

    Races between copies and stores are found by JAX 0.12 only.
    """
    if VERSION >= (0, 12):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.InterpretGPUParams(detect_races=detect_races)  # pyright: ignore
    # 0.10.2 needs absl-py to import this, and does not say so
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=detect_races)


@contextlib.contextmanager
def without_gpu_races() -> Iterator[None]:
    """As ``without_races``, for a kernel run inside with ``gpu_interpret``."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    try:
        yield
    except Exception as error:
        if "race" in str(error).lower():
            raise RaceError(str(error)) from error
        raise
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def gpu_kernel(
    body: Any,
    *,
    interpret: Interpret = False,
    in_place: bool = False,
    reduction_bytes: int = 2048,
    **options: Any,
) -> Any:
    """``plgpu.kernel`` by its newer names, which all versions take.

    Layouts are those that the body asks for. Newer JAX would rather infer them. Among
    the arrays of an ``in_place`` kernel may be references, as ``pl.run_state`` makes
    them, which it writes. ``reduction_bytes`` of shared memory are for sums that cross
    warps.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret is not False:
        options["interpret"] = interpret
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        reduction_scratch_bytes=reduction_bytes,
    )
    if in_place and VERSION < (0, 12):
        return _gpu_kernel_of_references(body, params, **options)
    return plgpu.kernel(body, compiler_params=params, **options)


def _gpu_kernel_of_references(
    body: Any, params: Any, *, out_type: Any, scratch_types: Any, **grid: Any
) -> Any:
    """What ``plgpu.kernel`` is beside its rule for ``vmap``, which knows no
    references."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch_types)

    return pl.kernel(
        scoped,
        out_type=out_type,
        mesh=plgpu.Mesh(**grid),
        compiler_params=params,
        name=body.__name__,
    )


def gpu_load(ref: Any, layout: Any) -> jax.Array:
    """An array in registers, laid out as asked, from either memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if VERSION >= (0, 12):
        return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore
    return plgpu.load(ref, (), layout=layout, optimized=False)  # pyright: ignore


def gpu_store(ref: Any, x: jax.Array) -> None:
    """To a device's memory, from registers."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if VERSION >= (0, 12):
        plgpu.store(ref, x, optimized=False)  # pyright: ignore
    else:
        ref[...] = x


def reciprocal(x: jax.Array, *, approx: bool = False) -> jax.Array:
    """``1 / x`` inside a TPU kernel."""
    home = pltpu if hasattr(pltpu, "reciprocal") else pl
    return home.reciprocal(x, approx=approx)  # pyright: ignore


def lowering_for(
    platform: Literal["tpu", "gpu"], device_kind: str, num_cores: int | None = 1
) -> contextlib.AbstractContextManager[Any]:
    """Lower kernels for a device that is not there, such as ``"TPU v5 lite"``.

    Without it Pallas refuses: it asks the current device what it is. The axis is
    ``Auto``, for newer JAX would take it as explicit, which kernels do not know.
    """
    device = AbstractDevice(
        device_kind=device_kind, num_cores=num_cores, platform=platform
    )
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device)
    return use_abstract_mesh(mesh)


def device_at_hand() -> Any:
    """What a program is lowered for: a device, or one that is not here.

    Both have a ``platform`` and a ``device_kind``; see ``lowering_for``.
    """
    elsewhere = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0] if elsewhere is None else elsewhere
