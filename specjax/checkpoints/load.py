"""Loading a checkpoint: weights, tokenizer, configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.checkpoints import zoo
from specjax.checkpoints.converted import (
    copy_folder,
    drop_copy,
    find_copy,
    source_of,
    write_copy,
)
from specjax.checkpoints.errors import CheckpointError, close_names
from specjax.checkpoints.files import Progress
from specjax.checkpoints.gguf import GGUFReader, metadata_eos_ids
from specjax.checkpoints.hub import looks_like_hub_id, snapshot
from specjax.checkpoints.quantised import QuantisedReader, open_reader, scheme_of
from specjax.checkpoints.tensors import Tensors
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.tokenizer_files import (
    folder_eos_ids,
    read_config,
    tokenizer_from_folder,
)
from specjax.checkpoints.tokenizer_gguf import tokenizer_from_gguf
from specjax.models.build import Builder, WeightType
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.families import FAMILIES, Family

PARAMETERS = "parameters.json"
"""In a folder that ``orbax.save_parameters`` wrote."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded model and what is known of it."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    config: DecoderConfig
    raw_config: dict[str, Any]
    """``config.json``, or its equivalent made from GGUF metadata."""
    source: str
    """What to call these weights in a report: "X, dequantised from Q4_1"."""
    path: Path
    """The directory or GGUF file that was asked for."""
    eos_ids: tuple[int, ...]
    """Ids that end a text; may be empty."""


def load(
    path_or_name: str | Path,
    dtype: WeightType = WeightType.FLOAT32,
    *,
    progress: Progress | None = None,
    tokenizer: bool = True,
) -> Checkpoint:
    """Load a model of the zoo, a directory, a ``.gguf`` file or a hub id.

    Every tensor is checked for name, shape and type, and none may be left over.
    Linear layers are stored as ``dtype``. ``progress`` is called while something is
    downloaded or converted; ``tokenizer=False`` loads the weights alone.

    Raises ``CheckpointError``, naming the file, the tensor or field, and what to do.
    """
    dtype = WeightType(dtype)
    if dtype is WeightType.FLOAT64 and not jax.config.read("jax_enable_x64"):
        raise CheckpointError(
            "float64 weights need JAX's 64-bit types, or they would become float32; "
            'call jax.config.update("jax_enable_x64", True) first'
        )
    path = resolve(path_or_name, progress)
    if path.is_file():
        loaded = _load_gguf(path, dtype, progress, tokenizer)
        if loaded.tokenizer is not None and loaded.tokenizer.template is None:
            loaded.tokenizer.template = zoo.template(str(path_or_name))
        return loaded
    if (path / PARAMETERS).is_file():
        # it imports this module, and orbax, which takes half a second
        from specjax.checkpoints.orbax.parameters import load_parameters

        return load_parameters(path, dtype, tokenizer=tokenizer)
    loaded = _load_folder(path, dtype, tokenizer)
    if path == Path(path_or_name).expanduser():
        return loaded
    # A hub checkpoint's folder is named by its commit.
    return dataclasses.replace(loaded, source=str(path_or_name))


def resolve(path_or_name: str | Path, progress: Progress | None = None) -> Path:
    """The directory or GGUF file that is meant, downloaded if need be.

    A name of the zoo comes first, then a path that exists, then a hub id.
    """
    name = str(path_or_name)
    if name in zoo.MODELS:
        return zoo.weights(name, progress)
    try:
        path = Path(path_or_name).expanduser()
    except RuntimeError as error:  # no such user
        raise CheckpointError(f"there is no {name!r}: {error}") from error
    if path.is_dir() or path.is_file():
        return path
    if isinstance(path_or_name, str) and looks_like_hub_id(name):
        return snapshot(name)
    hint = close_names(name, zoo.MODELS) or (
        f"; give a folder, a .gguf file, a hub id such as org/name, or one of the zoo: "
        f"{', '.join(zoo.MODELS)}"
    )
    raise CheckpointError(f"there is no {name!r}{hint}")


def decoder_config(raw: Mapping[str, Any], where: Path) -> tuple[Family, DecoderConfig]:
    """A configuration translated by its family.

    Raises ``CheckpointError`` naming the family or the field that is not implemented,
    missing or contradictory; ``where`` is the file to name.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type {kind!r} is not implemented; known are "
            f"{', '.join(sorted(FAMILIES))}{close_names(str(kind), FAMILIES)}"
        )
    family = FAMILIES[kind]
    scheme_of(raw, where)  # raises for one that is not implemented
    # how weights are stored is the reader's affair: families see what is read
    plain = {key: raw[key] for key in raw if key != "quantization_config"}
    try:
        return family, family.config(plain)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _load_folder(path: Path, dtype: WeightType, with_tokenizer: bool) -> Checkpoint:
    raw = read_config(path)
    family, config = decoder_config(raw, path / "config.json")
    tokenizer = tokenizer_from_folder(path) if with_tokenizer else None
    eos_ids = folder_eos_ids(path) or (tokenizer.eos_ids if tokenizer else ())
    _check_ids(path, config, tokenizer, eos_ids)
    reader = open_reader(path, raw)
    decoder = _build(family, config, reader, dtype)
    source = path.resolve().name
    if isinstance(reader, QuantisedReader):
        source += f", dequantised from {reader.scheme.name}"
    return Checkpoint(decoder, tokenizer, config, raw, source, path, eos_ids)


def _load_gguf(
    path: Path, dtype: WeightType, progress: Progress | None, with_tokenizer: bool
) -> Checkpoint:
    """From the converted copy, which is made now if there is none yet."""
    folder = copy_folder(path, progress)
    manifest = find_copy(folder)
    # Without the tokenizer a copy would be incomplete for the next caller.
    if manifest is None and with_tokenizer:
        reader, tokenizer, _, _, _ = _open_gguf(path, with_tokenizer)
        if write_copy(reader, tokenizer, folder, progress):
            manifest = find_copy(folder)
    if manifest is not None:
        try:
            loaded = _load_folder(folder, dtype, with_tokenizer)
            return dataclasses.replace(loaded, source=manifest["source"], path=path)
        except CheckpointError:
            # The file itself is asked, so that the message names it and not the copy.
            drop_copy(folder)
    reader, tokenizer, family, config, eos_ids = _open_gguf(path, with_tokenizer)
    decoder = _build(family, config, reader, dtype)
    return Checkpoint(
        decoder, tokenizer, config, reader.config, source_of(reader), path, eos_ids
    )


def _open_gguf(
    path: Path, with_tokenizer: bool
) -> tuple[GGUFReader, Tokenizer | None, Family, DecoderConfig, tuple[int, ...]]:
    """All of a file but its weights, checked."""
    reader = GGUFReader(path)
    tokenizer = tokenizer_from_gguf(reader.header) if with_tokenizer else None
    family, config = decoder_config(reader.config, path)
    eos_ids = metadata_eos_ids(reader.header)
    _check_ids(path, config, tokenizer, eos_ids)
    return reader, tokenizer, family, config, eos_ids


def _build(
    family: Family, config: DecoderConfig, reader: Tensors, dtype: WeightType
) -> Decoder:
    decoder = family.build(config, Builder(reader, dtype))
    reader.finish(family.left_alone(config))
    return decoder


def _check_ids(
    path: Path,
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    eos_ids: tuple[int, ...],
) -> None:
    """Ids beyond the embedding would silently read another token's row."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model's "
            f"vocabulary {config.vocab_size}; they belong to different models"
        )
    for index in eos_ids:
        if not 0 <= index < config.vocab_size:
            raise CheckpointError(
                f"{path}: eos id {index} is outside the vocabulary of "
                f"{config.vocab_size}"
            )
