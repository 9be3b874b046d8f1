"""Small files of a checkpoint, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specjax.checkpoints.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how far it is and how far it has to go (bytes)."""


def read_json(path: Path, fix: str = "download it again") -> dict[str, Any]:
    """A JSON object from a file, or a ``CheckpointError`` that names it and the fix."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error}); {fix}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; {fix}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As ``read_json``; an absent file is an empty object."""
    return read_json(path) if path.exists() else {}


def id_list(value: Any, where: str) -> tuple[int, ...]:
    """Ids as configurations write them: nothing, one, or a list."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise CheckpointError(f"{where}: token ids are needed, found {value!r}")
    return tuple(dict.fromkeys(values))


def cache_folder() -> Path:
    """Where specjax keeps models: ``SPECJAX_CACHE``, or the user's cache folder."""
    own = os.environ.get("SPECJAX_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "specjax"


def sha256(path: Path, progress: Progress | None = None) -> str:
    """The file's SHA-256, in hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def stamped_sha256(path: Path, progress: Progress | None = None) -> str:
    """The file's SHA-256, remembered in the cache while size and time stay the same."""
    path = path.resolve()
    status = path.stat()
    seen = {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    key = hashlib.sha256(str(path).encode()).hexdigest()[:24]
    stamp = cache_folder() / "stamps" / f"{key}.json"
    with contextlib.suppress(CheckpointError):
        known = read_optional_json(stamp)
        if {k: known.get(k) for k in seen} == seen and "sha256" in known:
            return str(known["sha256"])
    seen["sha256"] = sha256(path, progress)
    # A cache that cannot be written costs time, not the run.
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with new_file(stamp) as temporary:
            temporary.write_text(json.dumps(seen))
    return str(seen["sha256"])


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place when all went well."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``path`` when all went well.

    If another process was first, its folder stays and ours is dropped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        with contextlib.suppress(FileExistsError):
            _rename_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_folder(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        # "directory not empty" comes as one code or another
        if target.exists():
            raise FileExistsError(target) from error
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock file, so that two processes do not do the same work at once.

    Yields whether there is a lock at all.

    Without file locks (not on every system) both do it: the results appear by rename,
    so that is slower but not wrong.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield True


def remove_stale(path: Path) -> None:
    """Remove what killed processes left of ``new_file`` and ``new_folder``.

    Only for the holder of a lock: what is there may be another's work otherwise.
    """
    for stale in path.parent.glob(f".{path.name}.*"):
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)
