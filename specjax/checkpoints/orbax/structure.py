"""A decoder without its arrays, as JSON: classes, settings, and the leaves' names.

What a family built may depend on more than the configuration (names that vary from file
to file), so the result itself is written down, and building is not needed to read it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import jax

from specjax.checkpoints.errors import CheckpointError

MODELS = "specjax.models."
"""Classes of these modules may be named in a file, and no others."""


def unbuild(value: Any, path: str = "") -> tuple[Any, dict[str, jax.Array]]:
    """The structure of a decoder for JSON, and its arrays by name.

    Names are paths, such as ``blocks[3].mixer.body.q.weight``. An array that stands in
    two places has the name of the first, in both.
    """
    leaves: dict[str, jax.Array] = {}
    names: dict[int, str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, jax.Array):
            name = names.setdefault(id(value), path)
            leaves[name] = value
            return {"array": name}
        if isinstance(value, tuple):
            return [walk(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if value is None or type(value) in (bool, int, float, str):
            return value
        kind = type(value)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith(MODELS):
            fields = {
                f.name: walk(getattr(value, f.name), f"{path}.{f.name}".lstrip("."))
                for f in dataclasses.fields(kind)
            }
            return {"class": f"{kind.__module__}:{kind.__qualname__}"} | fields
        raise CheckpointError(f"{path} is a {kind.__name__}, which cannot be kept")

    return walk(value, path), leaves


def rebuild(structure: Any, leaves: Mapping[str, jax.Array]) -> Any:
    """What ``unbuild`` took apart.

    Raises ``CheckpointError`` if a class has other fields now.
    """
    if isinstance(structure, list):
        return tuple(rebuild(item, leaves) for item in structure)
    if not isinstance(structure, dict):
        return structure
    if "array" in structure:
        return leaves[structure["array"]]
    name = structure["class"]
    kind = _class(name)
    given = {n: value for n, value in structure.items() if n != "class"}
    known = {f.name for f in dataclasses.fields(kind)}
    if set(given) != known:
        odd = ", ".join(sorted(known ^ set(given)))
        raise CheckpointError(f"{name} has other fields now ({odd})")
    return kind(**{n: rebuild(value, leaves) for n, value in given.items()})


def _class(name: str) -> type:
    module, _, qualname = name.partition(":")
    if module.startswith(MODELS):
        try:
            found = getattr(importlib.import_module(module), qualname)
        except (ImportError, AttributeError):
            found = None
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            return found
    raise CheckpointError(f"there is no class {name} here")
