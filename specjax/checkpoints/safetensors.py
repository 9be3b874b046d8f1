"""Weights in safetensors files: one file, or shards behind an index."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import read_json
from specjax.checkpoints.tensors import TensorInfo, Tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# What parts of quantised tensors are stored as; no tensor by itself.
_PARTS: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}

# Ids and maps of ids: read as they are (``Tensors.integers``), never as weights.
_INTEGERS: dict[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
_STORED = DTYPES | _PARTS | _INTEGERS

# The format's own limit; a longer header is a lie or an attack.
_LONGEST_HEADER = 100_000_000

# JAX's CPU backend adopts an array at such an address instead of copying it.
_ADOPTED_ALIGNMENT = 64


class SafetensorsReader(Tensors):
    """The tensors of a checkpoint directory, or of one file, memory-mapped."""

    readable = frozenset(DTYPES)
    whole = frozenset(_INTEGERS)

    def __init__(self, path: str | Path) -> None:
        """Read and check every header.

        Raises ``CheckpointError`` if a file is absent, truncated or inconsistent.
        """
        path = Path(path)
        files, index = _files(path)
        self._starts: dict[str, int] = {}
        infos: dict[str, TensorInfo] = {}
        for file in files:
            for info, start in read_header(file):
                if info.name in infos:
                    raise CheckpointError(
                        f"tensor {info.name!r} is in both {infos[info.name].file} and "
                        f"{file}; remove the stale file"
                    )
                infos[info.name] = info
                self._starts[info.name] = start
        if index is not None:
            _check_index(path / INDEX, index, infos)
        super().__init__(path, infos)
        self.files = files
        self._maps: dict[Path, np.memmap] = {}

    def _mapped(self, info: TensorInfo) -> np.ndarray:
        """A stored tensor as it lies in its file, of a float type or not."""
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(info.file, np.uint8, mode="r")
        start = self._starts[info.name]
        raw = self._maps[info.file][start : start + info.nbytes]
        dtype = _STORED[info.dtype]
        return np.asarray(raw).view(dtype).reshape(info.shape)

    def _data(self, info: TensorInfo) -> np.ndarray:
        array = self._mapped(info)
        # Weights must not change, or crash the process, when somebody rewrites the
        # file: what JAX would adopt is copied here, the rest it copies itself.
        if array.ctypes.data % _ADOPTED_ALIGNMENT == 0:
            return array.copy()
        return array

    def _remedy(self, info: TensorInfo) -> str:
        if info.dtype.startswith("F8"):
            return (
                "config.json has no quantization_config that says how it is scaled: "
                "take the config.json that belongs to the weights"
            )
        return super()._remedy(info)

    def _missing(self, name: str) -> str:
        packed = self.infos.get(f"{name}_blocks")
        if packed is None:
            return super()._missing(name)
        return (
            f"tensor {name!r} is stored as MXFP4 ({packed.name!r} in {packed.file}), "
            "but config.json has no quantization_config of quant_method 'mxfp4'; take "
            "the config.json that belongs to the weights"
        )


def read_header(file: Path) -> list[tuple[TensorInfo, int]]:
    """The tensors of one file, in file order, each with its byte offset in the file.

    The format's own library checks the header; what it says of a bad one is passed on.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(
                    f"{file} is truncated or no safetensors file: its header claims "
                    f"{length} bytes and the file has {size}; download it again"
                )
            header = _parse(file, stream.read(length))
        with safe_open(file, framework="np"):
            pass
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{file} is truncated or corrupt ({error}; {size} bytes); download it again"
        ) from error
    entries = [
        _entry(file, name, entry, 8 + length, size)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return sorted(entries, key=lambda pair: pair[1])


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} has a header that is not JSON ({error}); download it again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is no JSON object")
    return header


def _entry(
    file: Path, name: str, entry: Mapping[str, Any], base: int, size: int
) -> tuple[TensorInfo, int]:
    """One tensor of a header that the library has passed, and where its bytes start."""
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
    if not 0 <= begin <= end <= size - base:
        raise CheckpointError(
            f"tensor {name!r} lies outside {file} (bytes {begin} to {end} of "
            f"{size - base}); download the file again"
        )
    known = _STORED.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - begin:
        raise CheckpointError(
            f"tensor {name!r} in {file} has {end - begin} bytes, but {dtype} "
            f"{list(shape)} takes {math.prod(shape) * known.itemsize}; download again"
        )
    return TensorInfo(name, shape, dtype, end - begin, file), base + begin


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of a checkpoint and, for shards, the index."""
    if path.is_file():
        return [path], None
    single, index = path / SINGLE, path / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(
            f"{path} holds both {SINGLE} and {INDEX}; remove the one that is stale"
        )
    if single.exists():
        return [single], None
    if not index.exists():
        raise CheckpointError(
            f"{path} holds no weights: neither {SINGLE} nor {INDEX} is there"
            f"{_other_weights(path)}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    for name, shard in weight_map.items():
        # A shard is a plain file name: anything else could point out of the folder.
        if (
            not isinstance(shard, str)
            or shard in ("", ".", "..")
            or Path(shard).name != shard
        ):
            raise CheckpointError(
                f"{index} puts tensor {name!r} into {shard!r}, which is no file name"
            )
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (path / shard).exists()]
    if absent:
        example = next(n for n, shard in weight_map.items() if shard == absent[0])
        raise CheckpointError(
            f"{index} lists {len(absent)} shards that are not there: "
            f"{', '.join(absent[:4])} (with tensor {example!r}, for one); "
            "download them into the same folder"
        )
    return [path / shard for shard in shards], weight_map


def _other_weights(path: Path) -> str:
    kinds = ("*.safetensors", "*.gguf", "*.bin", "*.pth", "*.pt")
    found = sorted(p.name for kind in kinds for p in path.glob(kind))
    if not found:
        return ""
    return (
        f" (found: {', '.join(found[:4])}; name a .gguf file itself, convert others to "
        "safetensors)"
    )


def _check_index(
    index: Path, weight_map: Mapping[str, str], infos: Mapping[str, TensorInfo]
) -> None:
    for name, shard in weight_map.items():
        if name not in infos or infos[name].file.name != shard:
            where = f"in {infos[name].file.name}" if name in infos else "nowhere"
            raise CheckpointError(
                f"{index} puts tensor {name!r} into {shard}, but it is {where}; "
                "download index and shards anew, of one revision"
            )
    for name, info in infos.items():
        if name not in weight_map:
            raise CheckpointError(
                f"tensor {name!r} in {info.file} is not listed in {index.name}; "
                "download index and shards anew, of one revision"
            )
