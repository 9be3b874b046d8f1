"""Drafters of the user's own: ``--drafter FILE.py:CLASS``."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from specjax.checkpoints.errors import close_names
from specjax.cli.errors import UsageError
from specjax.decoding.interfaces import Drafter
from specjax.drafters import DRAFTERS, DrafterEntry, DrafterOptions


def drafter_entry(name: str, option: str = "--drafter") -> DrafterEntry:
    """The drafter of this name, or the class in a file of the user's."""
    if name in DRAFTERS:
        return DRAFTERS[name]
    path, _, attribute = name.partition(".py:")
    path = name if name.endswith(".py") else f"{path}.py" if attribute else ""
    if not path:
        known = list(DRAFTERS)
        raise UsageError(
            f"{option} {name}: it must be one of {', '.join(known)}, or FILE.py:CLASS"
            f"{close_names(name, known)}; combinations are written in Python (see "
            "docs/drafters.md)"
        )
    module = _module(path, option)
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        defined = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        what = (
            f"has no class {attribute!r}" if attribute else "may hold several classes"
        )
        raise UsageError(
            f"{option} {name}: {path} {what}: give {path}:CLASS, of "
            f"{', '.join(defined) or 'a file that defines one'}"
        )
    return DrafterEntry(
        build=functools.partial(_build, found, f"{option} {name}"),
        summary=f"{attribute} of {path}",
    )


@functools.cache
def _module(path: str, option: str) -> ModuleType:
    """The file, imported once: two copies of a class would be compiled twice."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{option}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"specjax_own_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _build(drafter: type, where: str, options: DrafterOptions) -> Drafter:
    """Give it ``k``, if it has such a field."""
    fields = (
        {field.name for field in dataclasses.fields(drafter)}
        if dataclasses.is_dataclass(drafter)
        else set()
    )
    made: Any = drafter(**({"k": options.k} if "k" in fields else {}))
    if not isinstance(made, Drafter):
        wanted = ["taps", "max_nodes", "max_depth", "law", "init", "propose", "observe"]
        missing = [name for name in wanted if not hasattr(made, name)]
        raise UsageError(f"{where} is no drafter: it lacks {', '.join(missing)}")
    return made
