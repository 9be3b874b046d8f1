"""Converted copies: a GGUF file turned into a Hugging Face directory, once.

Turning quantised blocks into floats takes seconds; the copy in the cache is mapped
into memory instead. It is found by the file's SHA-256 and the converter's version, and
a copy that is not whole is made again.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import (
    Progress,
    cache_folder,
    locked,
    new_folder,
    read_json,
    remove_stale,
    sha256,
    stamped_sha256,
)
from specjax.checkpoints.gguf import GGUFReader, float_bytes, float_dtype
from specjax.checkpoints.safetensors import SINGLE, SafetensorsReader
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.tokenizer_files import save_tokenizer

VERSION = 1
"""Raise when the conversion changes: older copies are then no longer found."""

LARGEST_COPY = 4 << 30
"""Bytes; a larger copy would fill disks unasked, and the file is read each time."""

MANIFEST = "specjax.json"

_log = logging.getLogger(__name__)


def copy_folder(path: Path, progress: Progress | None = None) -> Path:
    """Where the copy of this file is, or would be."""
    return cache_folder() / "converted" / f"{stamped_sha256(path, progress)}-v{VERSION}"


def find_copy(folder: Path) -> dict[str, Any] | None:
    """The manifest of a whole copy; ``None`` if there is none.

    A copy that is not whole is removed, with a note in the log.
    """
    if not folder.exists():
        return None
    try:
        manifest = read_json(folder / MANIFEST)
        size = (folder / SINGLE).stat().st_size
        if size != manifest["size"]:
            raise CheckpointError(f"{size} bytes instead of {manifest['size']}")
        SafetensorsReader(folder / SINGLE)
        for name, digest in manifest["sha256"].items():
            if sha256(folder / name) != digest:
                raise CheckpointError(f"{name} has changed")
    except (CheckpointError, OSError, KeyError, TypeError, AttributeError) as error:
        _log.warning(
            "the converted copy %s is broken, making it again: %s", folder, error
        )
        drop_copy(folder)
        return None
    return manifest


def drop_copy(folder: Path) -> None:
    """Remove a copy."""
    shutil.rmtree(folder, ignore_errors=True)


def write_copy(
    reader: GGUFReader,
    tokenizer: Tokenizer | None,
    folder: Path,
    progress: Progress | None = None,
) -> bool:
    """Write the copy; ``False``, with a note in the log, if it cannot be kept."""
    needed = float_bytes(reader.infos)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if needed > LARGEST_COPY or 2 * needed > free:
            raise OSError(
                f"it takes {needed / 1e9:.1f} GB (of at most {LARGEST_COPY / 1e9:.1f} "
                f"GB, and half of the {free / 1e9:.1f} GB free)"
            )
        with locked(folder.with_name(folder.name + ".lock")) as alone:
            if alone:
                remove_stale(folder)
            if not (folder / MANIFEST).exists():
                _write_folder(reader, tokenizer, folder, progress)
    except OSError as error:
        _log.warning(
            "%s is not kept in converted form, so every load converts it: %s",
            reader.source,
            error,
        )
        return False
    return True


def _write_folder(
    reader: GGUFReader,
    tokenizer: Tokenizer | None,
    folder: Path,
    progress: Progress | None,
) -> None:
    with new_folder(folder) as temporary:
        _write_tensors(reader, temporary / SINGLE, progress)
        (temporary / "config.json").write_text(json.dumps(reader.config), "utf-8")
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary)
        small = [p.name for p in temporary.iterdir() if p.name != SINGLE]
        manifest = {
            "source": source_of(reader),
            "size": (temporary / SINGLE).stat().st_size,
            "sha256": {name: sha256(temporary / name) for name in small},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest), "utf-8")


def source_of(reader: GGUFReader) -> str:
    """``"SmolLM2-135M-Instruct, dequantised from Q4_1"``."""
    stem = reader.source.name.removesuffix(".gguf")
    kind = reader.quantised_type
    if kind is None:
        return stem
    stem = re.sub(r"[.-](i?q\d\w*|mxfp4\w*|tq\d\w*)$", "", stem, flags=re.IGNORECASE)
    return f"{stem}, dequantised from {kind}"


def _write_tensors(reader: GGUFReader, file: Path, progress: Progress | None) -> None:
    """Write tensor by tensor, so that no more than one is held."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in reader.infos.items():
        start, end = end, end + float_bytes({name: info})
        header[name] = {
            "dtype": float_dtype(info),
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, info in reader.infos.items():
            stream.write(reader.convert(name).tobytes())
            done += info.nbytes
            if progress is not None:
                total = sum(i.nbytes for i in reader.infos.values())
                progress(f"converting {reader.source.name}", done, total)
