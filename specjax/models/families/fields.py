"""Reading a checkpoint's configuration field by field, with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specjax.models.families.harmless import is_harmless


class ConfigError(ValueError):
    """A configuration field is missing, malformed or not implemented."""


class Fields:
    """A configuration mapping whose every use is checked, and every field used.

    A field that is absent takes the family's value in ``defaults``, or the one that the
    caller gives; without either it is an error. Where it is null the caller's comes
    first. A field that nobody has read when ``finish`` is called is an error as well:
    it might change the maths.

    A name may list spellings, old and new: ``"norm_eps|block_norm_eps"``. Where several
    are there they must agree.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._raw = raw
        self._where = where
        self._defaults = defaults or {}
        self._used: set[str] = set()

    def error(self, name: str, problem: str) -> ConfigError:
        """An error about one field, to be raised."""
        return ConfigError(f"config field {name!r} ({self._where}): {problem}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return any(self._raw.get(part) is not None for part in name.split("|"))

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null: the file says that there is none."""
        return name in self._raw and self._raw[name] is None

    def integer(
        self, name: str, default: int | None = None, *, at_least: int = 1
    ) -> int:
        """An integer, positive unless ``at_least`` says otherwise."""
        found, value = self._value(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not at_least <= value < 2**31:
            wanted = (
                "a positive integer" if at_least == 1 else f"an integer >= {at_least}"
            )
            raise self.error(found, f"{wanted} is needed, found {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A positive integer, or ``None`` where the family or a null says so."""
        self._note(name)
        if self.is_null(name) or not (self.has(name) or self._usual(name)):
            return None
        return self.integer(name)

    def count(self, name: str, *, at_most: int) -> int:
        """A positive integer of which a larger value must be a mistake."""
        value = self.integer(name)
        if value > at_most:
            raise self.error(name, f"{value} is more than {at_most}, the most there is")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        return self._between(name, default, 0.0, math.inf, "a positive number")

    def optional_number(self, name: str) -> float | None:
        """A positive number, or ``None`` where there is none."""
        self._note(name)
        return self.number(name) if self.has(name) else None

    def negative_number(self, name: str) -> float | None:
        """A negative number, or ``None`` where there is none."""
        self._note(name)
        if not self.has(name):
            return None
        return self._between(name, None, -math.inf, 0.0, "a negative number")

    def _between(
        self, name: str, default: float | None, low: float, high: float, wanted: str
    ) -> float:
        """A number strictly between the two."""
        found, value = self._value(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low < value < high:
            raise self.error(found, f"{wanted} is needed, found {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        found, value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(found, f"true or false is needed, found {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        found, value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(found, f"a string is needed, found {value!r}")
        return value

    def anything(self, name: str) -> Any:
        """The value as it stands, or ``None``."""
        self._note(name)
        return self._value(name, None)[1] if self.has(name) else None

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """An optional object."""
        self._note(name)
        value = self._raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"an object or null is needed, found {value!r}")
        return value

    def items(self, name: str, kind: type) -> list[Any] | None:
        """An optional list of values of one type."""
        self._note(name)
        if not self.has(name):
            return None
        found, value = self._value(name, None)
        sound = isinstance(value, list | tuple) and all(
            isinstance(item, kind) and not isinstance(item, bool) for item in value
        )
        if not sound:
            raise self.error(found, f"a list of {kind.__name__} is needed: {value!r}")
        return list(value)

    def expect(self, name: str, wanted: Any, default: Any) -> None:
        """A field of which one value is implemented."""
        found, value = self._value(name, default)
        if value != wanted:
            raise self.error(
                found, f"{value!r} is not implemented (only {wanted!r} is)"
            )

    def refuse(self, name: str, what: str) -> None:
        """A field that must be absent or null, because it changes the maths."""
        self._note(name)
        if self.has(name):
            raise self.error(name, f"not implemented: {what}")

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here: repeated elsewhere, or of training."""
        self._used.update(names)

    def finish(self) -> None:
        """Raise if a field is left that nobody has read and that may mean something."""
        left = [
            name
            for name, value in self._raw.items()
            if value is not None and name not in self._used and not is_harmless(name)
        ]
        if left:
            raise self.error(
                left[0],
                f"not implemented (its value is {self._raw[left[0]]!r}); if it does "
                "not change what the model computes, remove it from the configuration"
                + (f"; likewise {', '.join(map(repr, left[1:]))}" if left[1:] else ""),
            )

    def _note(self, name: str) -> None:
        self._used.update(name.split("|"))

    def _usual(self, name: str) -> Any:
        """The family's default, or ``None``."""
        known = (self._defaults.get(part) for part in name.split("|"))
        return next((value for value in known if value is not None), None)

    def _value(self, name: str, default: Any) -> tuple[str, Any]:
        """The spelling that was found, and its value."""
        self._note(name)
        names = name.split("|")
        found = [n for n in names if self._raw.get(n) is not None]
        if not found:
            usual = self._usual(name)
            null = any(part in self._raw for part in names)
            if usual is not None and not (null and default is not None):
                return names[0], usual
            if default is None:
                raise self.error(" or ".join(names), "missing")
            return names[0], default
        values = [self._raw[n] for n in found]
        if any(value != values[0] for value in values[1:]):
            told = ", ".join(f"{n} = {self._raw[n]!r}" for n in found)
            raise self.error(found[0], f"contradicts itself: {told}")
        return found[0], values[0]


def layer_kinds(
    fields: Fields,
    layers: int,
    known: Iterable[str],
    otherwise: Callable[[int], str],
) -> list[str]:
    """``layer_types``, or what the family derives for each layer number."""
    known = tuple(known)
    kinds = fields.items("layer_types", str)
    if kinds is None:
        return [otherwise(i) for i in range(layers)]
    if len(kinds) != layers:
        raise fields.error(
            "layer_types", f"{len(kinds)} entries for {layers} num_hidden_layers"
        )
    for kind in kinds:
        if kind not in known:
            raise fields.error(
                "layer_types", f"{kind!r} is not implemented ({', '.join(known)} are)"
            )
    return kinds
