"""The header of a GGUF file: metadata and where the tensors lie.

The ``gguf`` package's own reader trusts the file: a corrupt count sends it into a loop
without end, and a vocabulary of 49 000 words takes it seconds. This one checks every
length against the file's size before it believes it.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.tensors import TensorInfo

_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself."""

    path: Path
    version: int
    metadata: dict[str, Any]
    """Scalars, strings and lists of either, by key."""
    tensors: dict[str, TensorInfo]
    """By the file's own names; shapes as numpy has them (outermost first)."""
    offsets: dict[str, int]
    """Where each tensor's bytes start, in bytes from the start of the file."""


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header; ``CheckpointError`` if the file is truncated or corrupt."""
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty; download it again")
        data = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _Parser(path, memoryview(data)).header()  # type: ignore[arg-type]


class _Parser:
    """Walks through the bytes; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GGUFHeader:
        version, tensor_count, pair_count = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._kind())
        raw = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise self._corrupt(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        offsets: dict[str, int] = {}
        for info, offset in raw:
            if info.name in tensors:
                raise self._corrupt(f"tensor {info.name!r} occurs twice")
            if offset % alignment or start + offset + info.nbytes > len(self._data):
                raise self._corrupt(
                    f"tensor {info.name!r} should end at byte "
                    f"{start + offset + info.nbytes}, the file at {len(self._data)}"
                )
            tensors[info.name] = info
            offsets[info.name] = start + offset
        return GGUFHeader(self._path, version, metadata, tensors, offsets)

    def _preamble(self) -> tuple[int, int, int]:
        if self._number("<I") != GGUF_MAGIC:
            raise CheckpointError(
                f"{self._path} is no GGUF file (it does not start with 'GGUF'); name a "
                "GGUF file or a folder with config.json"
            )
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self._path} is big-endian GGUF: not implemented")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF version {version}; 2 and 3 can be read"
            )
        return version, self._count(16), self._count(13)

    def _corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is truncated or corrupt: {what}; download it again"
        )

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise self._corrupt(
                f"{count} bytes are announced at byte {self._at}, but the file ends at "
                f"{len(self._data)}"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, layout: str) -> int:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _count(self, smallest: int) -> int:
        """A count of things that take at least ``smallest`` bytes each."""
        count = self._number("<Q")
        if count * smallest > len(self._data) - self._at:
            raise self._corrupt(f"{count} entries are announced at byte {self._at}")
        return count

    def _string(self) -> str:
        raw = bytes(self._take(self._number("<Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"a string before byte {self._at} is no UTF-8") from (
                error
            )

    def _kind(self) -> GGUFValueType:
        number = self._number("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self._corrupt(f"unknown value type {number}") from error

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is GGUFValueType.ARRAY:
            return self._array()
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _array(self) -> list[Any]:
        kind = self._kind()
        if kind is GGUFValueType.ARRAY:
            raise self._corrupt("an array of arrays")
        if kind is GGUFValueType.STRING:
            return [self._string() for _ in range(self._count(8))]
        dtype = np.dtype(_SCALARS[kind])
        count = self._count(dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _tensor(self) -> tuple[TensorInfo, int]:
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        number = self._number("<I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(
                f"tensor {name!r} in {self._path} has type {number}, which the "
                "installed gguf package does not know; update it (pip install -U gguf)"
            ) from error
        block, size = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise self._corrupt(
                f"tensor {name!r} has rows of {shape[-1]} in blocks of {block}"
            )
        nbytes = math.prod(shape) // block * size
        info = TensorInfo(name, shape, kind.name, nbytes, self._path)
        return info, self._number("<Q")
