"""A program that must compile, and the list of all of them.

An operation adds a module ``cases`` to its folder with ``CASES``, and a line here.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

OPERATIONS = ("delta_window", "skinny_matmul", "window_attention")
"""Folders of ``pallas_kernels`` with cases."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, or several, at the shapes of a real model."""

    operation: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Pytrees of ``array(...)``, or of ``None``."""
    donated: tuple[int, ...] = ()
    """Arguments that the program must update in place."""
    kept: tuple[tuple[int, ...], ...] = ()
    """Shapes that the program must not copy: of caches, states and weights. They must
    be shapes that nothing else in the program has."""
    calls: int = 1
    """Kernels in the program, at least."""
    unfit: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Devices that cannot run it, such as ``"v4"`` or ``"sm_80"``, and why."""
    platforms: tuple[str, ...] = ("tpu",)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """An argument of a case: a shape and a dtype, where an array is called for."""
    return jax.ShapeDtypeStruct(shape, dtype)


def nbytes(tree: Any) -> int:
    """Of all arrays in a tree."""
    return sum(
        leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )


def all_cases(platform: str, only: str = "") -> tuple[Case, ...]:
    """Of every operation, for ``"tpu"`` or ``"cuda"``; ``only``: part of a name."""
    found: list[Case] = []
    for operation in OPERATIONS:
        module = importlib.import_module(f"pallas_kernels.{operation}.cases")
        found += module.CASES
    return tuple(
        case
        for case in found
        if platform in case.platforms and only in f"{case.operation}/{case.name}"
    )
