"""Reading a checkpoint's configuration field by field, with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration field is missing, malformed or not implemented."""


class Fields:
    """A configuration mapping whose every use is checked.

    A field that is absent takes the family's default; without one it is an error.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def error(self, name: str, problem: str) -> ConfigError:
        """An error about one field, to be raised."""
        return ConfigError(f"config field {name!r} ({self._where}): {problem}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= value < 2**31:
            raise self.error(name, f"a positive integer is needed, found {value!r}")
        return value

    def count(self, name: str, *, at_most: int) -> int:
        """A positive integer of which a larger value must be a mistake."""
        value = self.integer(name)
        if value > at_most:
            raise self.error(name, f"{value} is more than {at_most}, the most there is")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self.error(name, f"a positive number is needed, found {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"true or false is needed, found {value!r}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """An optional object."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"an object or null is needed, found {value!r}")
        return value

    def expect(self, name: str, wanted: Any, default: Any) -> None:
        """A field of which one value is implemented."""
        value = self._raw.get(name)
        value = default if value is None else value
        if value != wanted:
            raise self.error(name, f"{value!r} is not implemented (only {wanted!r} is)")

    def refuse(self, name: str, what: str) -> None:
        """A field that must be absent or null, because it changes the maths."""
        if self._raw.get(name) is not None:
            raise self.error(name, f"not implemented: {what}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "missing")
        return default
