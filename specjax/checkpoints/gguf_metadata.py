"""The keys of a GGUF file that describe its architecture, each use checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import GGUFHeader

_HARMLESS = {"tensor_data_layout", "rope.scaling.finetuned"}
# Refused unless they say nothing, or are used.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "use_parallel_residual": (True,),  # read by no graph of these architectures
}


class Metadata:
    """The ``<architecture>.*`` keys.

    Every key is used or known as harmless: one that is neither may change the maths,
    and is refused by name.
    """

    def __init__(self, header: GGUFHeader, used: Collection[str]) -> None:
        self.path = header.path
        self._prefix = f"{header.metadata['general.architecture']}."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in header.metadata.items()
            if key.startswith(self._prefix)
        }
        neutral: Mapping[str, tuple[Any, ...]] = {
            key: values for key, values in _NEUTRAL.items() if key not in used
        }
        for key, value in self._values.items():
            if key in neutral and value not in neutral[key]:
                raise self.error(key, f"not implemented (only {neutral[key][0]!r} is)")
            if key not in {*used, *_HARMLESS, *neutral}:
                raise self.error(key, "this key is not known and may change the maths")

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error about one key, to be raised."""
        value = self._values.get(key)
        return CheckpointError(
            f"{self.path}: metadata key '{self._prefix}{key}' is {value!r}: {problem}; "
            "use the safetensors checkpoint"
        )

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return key in self._values

    def is_list(self, key: str) -> bool:
        """Whether the file has a list under the key."""
        return isinstance(self._values.get(key), list)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; a list of one value, one a layer, is that value."""
        value = self._values.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "one positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, as the short decimal that its author wrote."""
        value = self._values.get(key, default)
        if not isinstance(value, float) or not value > 0:
            raise self.error(key, "a positive number is needed")
        return float(str(np.float32(value)))  # the file holds float32

    def choice(self, key: str, known: Collection[str]) -> str:
        """One of the words that are known."""
        value = self._values.get(key)
        if value not in known:
            raise self.error(key, f"not implemented ({', '.join(known)} are)")
        return str(value)

    def flags(self, key: str, count: int) -> list[bool]:
        """True or false for each layer."""
        value = self._values.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(key, f"a list of {count}, one a layer, is needed")
        if not all(isinstance(item, bool) for item in value):
            raise self.error(key, "true or false is needed for each layer")
        return value
