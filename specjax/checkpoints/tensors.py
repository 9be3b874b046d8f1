"""Named tensors of a checkpoint: what every file format has in common."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.checkpoints.errors import CheckpointError, close_names

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

HARMLESS = (r"(.*\.)?rotary_emb\.inv_freq",)
"""Full-match patterns of tensors that repeat what the configuration already says."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As the file spells it: ``"BF16"``, ``"Q4_1"``."""
    nbytes: int
    """Bytes in the file."""
    file: Path

    @property
    def size(self) -> int:
        """The number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Parts(NamedTuple):
    """A tensor that is stored as two: codes, and what they are scaled by."""

    whole: TensorInfo
    codes: TensorInfo
    scales: TensorInfo


class Tensors(ABC):
    """A ``TensorReader`` that remembers what was read, so that nothing is left over.

    Subclasses say what there is (``infos``) and fetch one tensor (``_data``).
    """

    readable: frozenset[str]
    """Stored types that ``_data`` turns into a float array."""
    whole: frozenset[str] = frozenset()
    """Stored types that ``_data`` leaves as integers or truth values."""

    def __init__(self, source: Path, infos: Mapping[str, TensorInfo]) -> None:
        self.source = source
        self.infos = dict(infos)
        self._read: set[str] = set()

    @abstractmethod
    def _data(self, info: TensorInfo) -> np.ndarray:
        """The tensor as a float array of the header's shape."""

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, in its stored float type (quantised ones as their values).

        Raises ``CheckpointError`` if it is absent, has another shape, or is not stored
        as a float type.
        """
        array = self._float(self._info(name, shape))
        self._read.add(name)
        return array

    def integers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor of ids or truth values, in its stored type.

        Raises ``CheckpointError`` if it is absent, has another shape, or is of floats.
        """
        info = self._info(name, shape)
        if info.dtype not in self.whole:
            raise CheckpointError(
                f"tensor {name!r} in {info.file} is stored as {info.dtype}, where "
                f"integers are needed ({', '.join(sorted(self.whole)) or 'no'} types "
                "of them are readable here)"
            )
        self._read.add(name)
        return self._data(info)

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.infos.get(name)
        if info is None:
            raise CheckpointError(self._missing(name))
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name!r} in {info.file} has shape {list(info.shape)}, but the "
                f"configuration asks for {list(shape)}; the configuration and the "
                "weights belong to different models"
            )
        return info

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.infos

    def finish(self, ignore: Sequence[str] = ()) -> None:
        """Raise unless every tensor was read.

        Let through are the ``HARMLESS`` ones, names that fully match a pattern of
        ``ignore``, and an output head that repeats the embedding bit by bit.
        """
        patterns = [re.compile(p) for p in (*HARMLESS, *ignore)]
        left = [
            name
            for name in self.infos
            if name not in self._read and not any(p.fullmatch(name) for p in patterns)
        ]
        for head in [name for name in left if _is(HEAD, name)]:
            read = [name for name in self._read if _is("embed_tokens.weight", name)]
            if read:
                self._check_tied_copy(head, read[0])
                left.remove(head)
        if left:
            shown = ", ".join(f"{n!r} ({self.infos[n].file.name})" for n in left[:8])
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise CheckpointError(
                f"{self.source}: {len(left)} tensors are of no use to the model that "
                f"the configuration describes: {shown}{more}; the configuration and "
                "the weights do not fit (too few layers? a missing bias flag?)"
            )

    def _check_tied_copy(self, head_name: str, embedding_name: str) -> None:
        head, embedding = self.infos[head_name], self.infos[embedding_name]
        same = head.shape == embedding.shape and np.array_equal(
            _bits(self._float(head)), _bits(self._float(embedding))
        )
        if not same:
            raise CheckpointError(
                f"tensor {head_name!r} in {head.file} differs from "
                f"{embedding_name!r}, but the configuration says that they are one "
                "(tie_word_embeddings); set tie_word_embeddings to false if the head "
                "is its own"
            )

    def _float(self, info: TensorInfo) -> np.ndarray:
        if info.dtype not in self.readable:
            raise CheckpointError(
                f"tensor {info.name!r} in {info.file} is stored as {info.dtype}, where "
                f"a float type is needed (readable: {', '.join(sorted(self.readable))})"
                f"; {self._remedy(info)}"
            )
        return self._data(info)

    def _remedy(self, info: TensorInfo) -> str:
        """What to do about a stored type that is not readable."""
        return "convert the checkpoint to one of these"

    def _missing(self, name: str) -> str:
        unread = [n for n in self.infos if n not in self._read]
        hint = close_names(name, unread)
        if name == HEAD and EMBEDDING in self.infos:
            hint = (
                "; if its head is the embedding matrix, set tie_word_embeddings to true"
            )
        return (
            f"tensor {name!r} is missing from {self.source} "
            f"({len(self.infos)} tensors){hint or '; the checkpoint is incomplete'}"
        )


def _is(last: str, name: str) -> bool:
    """Whether a name ends with ``last``, under any prefix."""
    return name == last or name.endswith(f".{last}")


def _bits(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, for a comparison that takes NaN as it is."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def total_bytes(infos: Iterable[TensorInfo]) -> dict[str, int]:
    """Bytes in the file by stored type, largest first."""
    sums: dict[str, int] = {}
    for info in infos:
        sums[info.dtype] = sums.get(info.dtype, 0) + info.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
