"""Checksums of a folder's files, so that damage is found before anything is read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from pathlib import Path

SUMS = "sums.json"


class Damaged(ValueError):
    """A file is not what was written; the message names it."""


def write_sums(folder: Path, skip: Collection[str] = ()) -> None:
    """Note size and CRC-32 of every file below ``folder``, but for those to skip."""
    sums = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _crc32(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in skip
    }
    (folder / SUMS).write_text(json.dumps(sums), "utf-8")


def check_sums(folder: Path) -> None:
    """Raise ``Damaged`` unless every file is what it was. Against chance, not malice.

    What was skipped, or came later, is not looked at.
    """
    try:
        for name, size, crc32 in _read_sums(folder / SUMS):
            found = (folder / name).stat().st_size
            if found != size:
                raise Damaged(f"{name} has {found} bytes instead of {size}")
            if _crc32(folder / name) != crc32:
                raise Damaged(f"the bytes of {name} have changed")
    except FileNotFoundError as error:
        name = Path(error.filename).relative_to(folder)
        raise Damaged(f"{name} is missing") from error


def _read_sums(file: Path) -> list[tuple[str, int, int]]:
    try:
        sums = json.loads(file.read_text("utf-8"))
        return [(name, size, crc32) for name, (size, crc32) in sums.items()]
    except (AttributeError, TypeError, ValueError) as error:
        raise Damaged(f"{SUMS} is broken") from error


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
