"""Figures of compiled kernels, kept in a file that later ones are held to.

What a compiler makes of a kernel is the same every time, so a figure that has grown
shows a change for the worse without a device. Another version of a compiler makes other
code: a file holds for the one that made it, and for no other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Figures = tuple[int, ...]

ACCEPT = "if it is meant, --write keeps it"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A file ``{compiler: version, "figures": {kernel: [number, ...]}}``."""

    file: Path
    compiler: str
    words: tuple[str, ...]
    """What the numbers of a kernel count."""
    bounds: Callable[[Figures], Sequence[tuple[int, int]]]
    """The least and the most that each may be now, by what they were."""

    def made_by(self) -> str:
        """The version of the compiler that made the file."""
        return self._read()[0]

    def figures(self) -> dict[str, Figures]:
        """By kernel, of whatever version."""
        return self._read()[1]

    def _read(self) -> tuple[str, dict[str, Figures]]:
        """Raises ``ValueError`` for a file that a hand, or a merge, damaged."""
        try:
            found = json.loads(self.file.read_text())
            version, figures = found[self.compiler], found["figures"]
            whole = {name: tuple(map(int, row)) for name, row in figures.items()}
            if any(len(row) != len(self.words) for row in whole.values()):
                raise ValueError(f"not {len(self.words)} numbers a kernel")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.file} is damaged ({type(error).__name__}: {error}): take it "
                "from git again, or remove it and --write all kernels anew"
            ) from error
        return version, whole

    def told(self, name: str, now: Sequence[int]) -> list[str]:
        """What is not as the file says of a kernel, and how to accept it."""
        old = self.figures().get(name)
        if old is None:
            return [f"not in {self.file.name}: --write adds it"]
        columns = zip(now, self.words, old, self.bounds(old), strict=True)
        return [
            f"{new} {word}, were {was}: {ACCEPT}"
            for new, word, was, (least, most) in columns
            if not least <= new <= most
        ]

    def changes(self, now: Mapping[str, Sequence[int]], *, whole: bool) -> list[str]:
        """``told`` of all, with their names. ``whole``: none may be missing now."""
        gone = [
            f"{name}: no longer there, and --write forgets it"
            for name in self.figures()
            if whole and name not in now
        ]
        return gone + [
            f"{name}: {told}" for name in now for told in self.told(name, now[name])
        ]

    def write(
        self, version: str, found: Mapping[str, Sequence[int]], *, whole: bool
    ) -> None:
        """Keep what was found: alone if that is the ``whole``, else beside the rest.

        Raises ``ValueError`` if the rest is of another version.
        """
        figures = {name: tuple(numbers) for name, numbers in found.items()}
        if not whole:
            made_by = self.made_by()
            if made_by != version:
                raise ValueError(
                    f"nothing written: {self.file.name} is of {self.compiler} "
                    f"{made_by}, this is {version}; write all kernels, not some"
                )
            figures = self.figures() | figures
        rows = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(figures[name])}"
            for name in sorted(figures)
        )
        head = f"{json.dumps(self.compiler)}: {json.dumps(version)}"
        self.file.write_text(f'{{{head},\n "figures": {{\n{rows}\n }}}}\n')
