"""The classes that a pytree is made of, as part of what a program is compiled for.

JAX (seen in 0.10.2 and 0.12) takes two pytrees for equal if their dataclasses have
equal fields and static values, whatever their classes; their hashes differ. A drafter
may then be handed the program that was compiled for another one, now and then, as
chance will have it. With ``kinds`` among the static arguments it cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def kinds(part: Any) -> Hashable:
    """The class of an object and of everything in it: equal only for equal classes."""
    inside: Sequence[Any] = ()
    if dataclasses.is_dataclass(part):
        inside = [getattr(part, field.name) for field in dataclasses.fields(part)]
    elif isinstance(part, Mapping):
        inside = list(part.values())
    elif isinstance(part, tuple | list):
        inside = part
    return (type(part), *map(kinds, inside)) if inside else type(part)
