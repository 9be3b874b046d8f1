"""Which implementation of an operation runs, chosen when a call is lowered.

A call is traced once and may be lowered for any platform, so tracing cannot choose: all
implementations that could be needed are traced, and ``lax.platform_dependent`` keeps
one of them. What does not depend on the platform is decided before, from shapes and
dtypes alone: a kernel says why it cannot take a call, and then the reference stands in
its place. That is never silent: it is recorded, and on that platform it warns.

``SPECJAX_KERNELS`` in the environment overrides the choice, for a whole process:
``reference`` uses no kernel anywhere; ``interpret`` runs the TPU's kernels on CPU by
emulation, slowly; ``require`` raises where the platform's kernel would not take a call
(with neither TPU nor GPU at hand: where none would).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from pallas_kernels import compat

Platform = Literal["tpu", "cuda"]
Implementation = Literal["auto", "reference", "interpret", "require"]

KNOWN = ("auto", "reference", "interpret", "require")

REFERENCE = "reference"
VARIABLE = "SPECJAX_KERNELS"
_OVERRIDE = os.environ.get(VARIABLE, "auto")


class NoKernelError(ValueError):
    """A kernel was required for a call that it cannot take."""


class KernelWarning(UserWarning):
    """A device with kernels runs an operation in plain JAX."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One platform's kernel for one call.

    ``run`` takes the call's arrays, and with ``interpret=...`` runs on CPU. ``refusal``
    says why this call's shapes, dtypes or options are not for it; ``None``: they are.
    """

    run: Callable[..., Any]
    refusal: str | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a call was traced to run, by platform; every other runs the reference."""

    operation: str
    shapes: tuple[str, ...]
    by_platform: tuple[tuple[str, str], ...]

    def on(self, platform: str) -> str:
        """``"kernel"``, or ``"reference"`` and why."""
        return dict(self.by_platform).get(platform, REFERENCE)


_choices: dict[Choice, int] = {}


def choices() -> tuple[Choice, ...]:
    """Every distinct call traced so far in this process, in the order of the first."""
    return tuple(_choices)


def forget_choices() -> None:
    """Start the record anew. Calls that are traced already do not enter it again."""
    _choices.clear()


def choose(
    operation: str,
    arguments: tuple[Any, ...],
    *,
    reference: Callable[..., Any],
    kernels: Mapping[Platform, Kernel],
    implementation: Implementation = "auto",
) -> Any:
    """``operation`` of some arrays, by the kernel of the platform it is lowered for.

    All implementations take ``arguments`` and give results of one structure, shape and
    dtype. Raises ``NoKernelError`` if a kernel is required, or to be interpreted, and
    none takes the call.
    """
    if implementation not in KNOWN:
        raise ValueError(f"implementation={implementation!r}: {', '.join(KNOWN)}")
    if implementation == "auto":
        implementation = _override()
    if implementation == "reference":
        kernels = {}
    if implementation == "interpret":
        kernel = kernels.get("tpu", Kernel(reference, "it has none"))
        _demand(operation, "tpu", kernel)
        _record(operation, arguments, {"cpu": "kernel, interpreted"})
        run = functools.partial(kernel.run, interpret=True)
        return _with_derivative(run, reference)(*arguments)
    if implementation == "require" and kernels:  # with none, XLA is the choice
        _demand_here(operation, kernels)
    _record(operation, arguments, {name: _told(k) for name, k in kernels.items()})
    _warn(operation, kernels)
    usable = {
        platform: _with_derivative(
            _with_batches(
                jax.named_call(kernel.run, name=f"{operation}_{platform}"), reference
            ),
            reference,
        )
        for platform, kernel in kernels.items()
        if kernel.refusal is None
    }
    if not usable:
        return reference(*arguments)
    return jax.lax.platform_dependent(*arguments, default=reference, **usable)


def _with_batches(
    run: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """Under ``vmap`` the reference takes a kernel's place: calls have a batch already,
    and not all that kernels are made of can be batched.
    """

    @jax.custom_batching.custom_vmap
    def run_or_batch(*arguments: Any) -> Any:
        return run(*arguments)

    @run_or_batch.def_vmap
    def _(size: int, batched: Any, *arguments: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda mapped: 0 if mapped else None, tuple(batched))
        out = jax.vmap(reference, in_axes=axes, axis_size=size)(*arguments)
        return out, jax.tree.map(lambda _: True, out)

    return run_or_batch


def _with_derivative(
    run: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """Kernels have none of their own: the reference is differentiated in their place.

    It is needed on every platform, for what is differentiated is what was traced.
    """

    # a wrapper, for options of ``run`` with a default would be taken for arguments
    @jax.custom_jvp
    def run_or_differentiate(*arguments: Any) -> Any:
        return run(*arguments)

    @run_or_differentiate.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return jax.jvp(reference, primals, tangents)

    return run_or_differentiate


def _override() -> Implementation:
    if _OVERRIDE not in KNOWN:
        raise ValueError(f"{VARIABLE}={_OVERRIDE}: it is one of {', '.join(KNOWN)}")
    return _OVERRIDE  # pyright: ignore[reportReturnType]


def _demand_here(operation: str, kernels: Mapping[Platform, Kernel]) -> None:
    """That the platform at hand has a kernel for this; if none is at hand, any."""
    here = _platform(compat.device_at_hand().platform)
    if here is not None:
        missing = Kernel(lambda *_: None, "there is none")
        _demand(operation, here, kernels.get(here, missing))
    elif all(kernel.refusal is not None for kernel in kernels.values()):
        for platform, kernel in kernels.items():
            _demand(operation, platform, kernel)


def _platform(backend: str) -> Platform | None:
    names: dict[str, Platform] = {"tpu": "tpu", "gpu": "cuda", "cuda": "cuda"}
    return names.get(backend)


def _demand(operation: str, platform: str, kernel: Kernel) -> None:
    if kernel.refusal is not None:
        raise NoKernelError(
            f"no {platform} kernel takes this {operation}: {kernel.refusal}"
        )


def _told(kernel: Kernel) -> str:
    return "kernel" if kernel.refusal is None else f"{REFERENCE}: {kernel.refusal}"


def _record(operation: str, arguments: Any, by_platform: Mapping[str, str]) -> None:
    shapes = tuple(
        f"{x.dtype}{list(x.shape)}"
        for x in jax.tree.leaves(arguments)
        if hasattr(x, "dtype")
    )
    choice = Choice(operation, shapes, tuple(sorted(by_platform.items())))
    _choices[choice] = _choices.get(choice, 0) + 1


def _warn(operation: str, kernels: Mapping[Platform, Kernel]) -> None:
    """Where the device at hand has kernels, and not for this."""
    here = jax.default_backend()
    platform = _platform(here)
    kernel = None if platform is None else kernels.get(platform)
    if kernel is not None and kernel.refusal is not None:
        warnings.warn(
            f"{operation} runs in plain JAX on this {here}: {kernel.refusal}",
            KernelWarning,
            stacklevel=4,
        )
