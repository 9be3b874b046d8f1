"""Loading and writing learned drafters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.load import Checkpoint, resolve
from specjax.checkpoints.quantised import open_reader
from specjax.checkpoints.tokenizer_files import read_config
from specjax.decoding.interfaces import Drafter
from specjax.drafters import DRAFTERS, DrafterOptions
from specjax.drafters.layouts import LAYOUTS, Host, Layout
from specjax.models.build import Builder, WeightType


@dataclasses.dataclass(frozen=True)
class LoadedPart:
    """A drafter's network, and where it came from."""

    part: Any
    """What the drafter named ``layout.method`` runs."""
    layout: Layout
    path: Path
    raw_config: dict[str, Any]


def host_of(target: Checkpoint) -> Host:
    """What of a loaded target its drafters may share."""
    decoder = target.decoder
    return Host(decoder.config, decoder.ends, decoder.norm, target.raw_config)


def load_part(
    path_or_id: str | Path,
    target: Checkpoint,
    dtype: WeightType = WeightType.FLOAT32,
) -> LoadedPart:
    """Load a drafter's folder (or hub id) for a target that is already loaded.

    The layout is told by the configuration and the names of the tensors; every tensor
    is checked and none may be left over.

    Raises ``CheckpointError``, naming the file, the tensor or field, and what to do.
    """
    try:
        path = resolve(path_or_id)
    except CheckpointError as error:
        raise CheckpointError(
            f"there is no draft head {str(path_or_id)!r}: give its folder or its hub id"
        ) from error
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder with a draft head's config.json: give the folder "
            "that holds the head's files"
        )
    raw = read_config(path)
    reader = open_reader(path, raw)
    layout = layout_of(raw, frozenset(reader.infos), path)
    try:
        part = layout.build(raw, Builder(reader, WeightType(dtype)), host_of(target))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    reader.finish(layout.ignore)
    return LoadedPart(part, layout, path, dict(raw))


def load_drafter(
    path_or_id: str | Path,
    target: Checkpoint,
    name: str | None = None,
    dtype: WeightType = WeightType.FLOAT32,
    **options: Any,
) -> Drafter:
    """Load a head and make the drafter that runs it: ``load_drafter(folder, model)``.

    ``name`` is one of ``DRAFTERS`` (the layout's own method, if ``None``), ``options``
    are fields of ``DrafterOptions`` such as ``k``. Raises as ``load_part`` does, and
    ``CheckpointError`` if the named drafter runs another kind of head.
    """
    loaded = load_part(path_or_id, target, dtype)
    name = name or loaded.layout.method
    check_runs(name, loaded)
    return DRAFTERS[name].build(DrafterOptions(part=loaded.part, **options))


def check_runs(name: str, loaded: LoadedPart) -> None:
    """Raise ``CheckpointError`` unless the drafter of this name runs such a head."""
    method = loaded.layout.method
    if name not in DRAFTERS or method not in (DRAFTERS[name].parts or (name,)):
        fitting = [n for n, e in DRAFTERS.items() if method in (e.parts or (n,))]
        raise CheckpointError(
            f"{loaded.path} is a checkpoint of {loaded.layout.name}, which "
            f"{' or '.join(fitting)} runs, and not {name}"
        )


def layout_of(raw: Mapping[str, Any], names: frozenset[str], path: Path) -> Layout:
    """The one layout that fits."""
    named = raw.get("architectures")
    listed = isinstance(named, list) and all(isinstance(n, str) for n in named)
    if named is not None and not listed:
        raise CheckpointError(
            f"{path / 'config.json'}: architectures {named!r} must be a list of names"
        )
    for layout in LAYOUTS:
        if layout.fits(raw, names):
            return layout
    known = ", ".join(layout.name for layout in LAYOUTS)
    raise CheckpointError(
        f"{path}: no known layout of a drafter (architectures "
        f"{raw.get('architectures')!r}); known are {known}. A draft model that is a "
        "whole decoder is loaded as a model"
    )


def save_part(loaded: LoadedPart, folder: str | Path) -> Path:
    """Write a drafter in the layout that it was read from, into a new folder.

    Raises ``CheckpointError`` if the folder is there already, or if the layout cannot
    be written.
    """
    folder = Path(folder)
    if loaded.layout.export is None:
        raise CheckpointError(f"layout {loaded.layout.name!r} cannot be written")
    if folder.exists():
        raise CheckpointError(f"{folder} is there already; choose another folder")
    try:
        export = loaded.layout.export(loaded.part)
    except ValueError as error:
        raise CheckpointError(f"{loaded.path} cannot be written: {error}") from error
    folder.mkdir(parents=True)
    text = json.dumps(export.config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: np.ascontiguousarray(x) for name, x in export.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
