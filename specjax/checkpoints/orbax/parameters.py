"""Converted weights kept as the decoder holds them: read once, never converted again.

::

    folder/parameters.json   the decoder without its arrays, and where it came from
    folder/arrays/           the arrays, in orbax's format
    folder/config.json       the configuration that it was built from
    folder/tokenizer...      as in any checkpoint folder
    folder/sums.json         checksums of all of these
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import new_folder, read_json
from specjax.checkpoints.load import PARAMETERS, Checkpoint, decoder_config
from specjax.checkpoints.orbax.leaves import kinds_of, target, unbound
from specjax.checkpoints.orbax.manifest import difference
from specjax.checkpoints.orbax.structure import rebuild, unbuild
from specjax.checkpoints.orbax.sums import Damaged, check_sums, write_sums
from specjax.checkpoints.tokenizer_files import save_tokenizer, tokenizer_from_folder
from specjax.models.build import WeightType
from specjax.models.decoder import Decoder

FORMAT = 1
"""Raise when what is kept changes: older folders are then refused."""

ARRAYS = "arrays"


def save_parameters(checkpoint: Checkpoint, folder: Path) -> None:
    """Keep a loaded checkpoint, with its tokenizer, in a new folder.

    An array that two layers share is kept once. The folder appears whole or not at all.
    How a decoder remembers (``specjax.models.memory``) is chosen after loading.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists: name a new folder")
    if checkpoint.decoder.config != checkpoint.config:
        raise CheckpointError(
            "the decoder's configuration was changed after it was loaded: save it as "
            "it was, and change it after each load"
        )
    structure, arrays = unbuild(checkpoint.decoder)
    about = {
        "format": FORMAT,
        "dtype": weight_type(checkpoint.decoder).value,
        "source": checkpoint.source,
        "eos_ids": list(checkpoint.eos_ids),
        "leaves": kinds_of(arrays),
        "decoder": structure,
    }
    with new_folder(folder) as temporary:
        # compressed, float32 weights took three times as long to write and to read
        with ocp.PyTreeCheckpointer(use_compression=False) as writer:
            path = (temporary / ARRAYS).absolute()
            writer.save(path, args=ocp.args.PyTreeSave(arrays))
        if checkpoint.tokenizer is not None:
            save_tokenizer(checkpoint.tokenizer, temporary)
        raw = json.dumps(checkpoint.raw_config)
        (temporary / "config.json").write_text(raw, "utf-8")
        (temporary / PARAMETERS).write_text(json.dumps(about), "utf-8")
        write_sums(temporary)


def load_parameters(
    folder: Path, dtype: WeightType | None = None, *, tokenizer: bool = True
) -> Checkpoint:
    """A checkpoint that ``save_parameters`` wrote, bit for bit.

    ``dtype``, if given, must be what was kept: nothing is converted here. Raises
    ``CheckpointError`` for a damaged file, and if this version of the library would
    build another decoder out of the configuration.
    """
    about = read_json(folder / PARAMETERS, fix="convert the model again")
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / PARAMETERS} is of format {about.get('format')}, this version "
            f"reads {FORMAT}: convert the model again"
        )
    try:
        check_sums(folder)
    except Damaged as error:
        raise CheckpointError(
            f"{folder} is damaged: {error}; convert the model again"
        ) from error
    if dtype is not None and dtype.value != about["dtype"]:
        raise CheckpointError(
            f"{folder} holds {about['dtype']} weights, not {dtype.value}: ask for "
            f"{about['dtype']}, or convert the model again"
        )
    raw = read_json(folder / "config.json", fix="convert the model again")
    _, config = decoder_config(raw, folder / "config.json")
    found = difference(about["decoder"]["config"], unbuild(config)[0])
    if found is not None:
        path, there, here = found
        raise CheckpointError(
            f"{folder} was converted with {path} = {there!r}, config.json says "
            f"{here!r}: convert the model again"
        )
    try:
        decoder = rebuild(about["decoder"], _read(folder / ARRAYS, about["leaves"]))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}; convert the model again") from error
    return Checkpoint(
        decoder=decoder,
        tokenizer=tokenizer_from_folder(folder) if tokenizer else None,
        config=config,
        raw_config=raw,
        source=about["source"],
        path=folder,
        eos_ids=tuple(about["eos_ids"]),
    )


def weight_type(decoder: Decoder) -> WeightType:
    """What the decoder was loaded as."""
    return next(t for t in WeightType if t.stored == decoder.head.weight.dtype)


def _read(folder: Path, leaves: dict[str, str]) -> dict[str, Any]:
    wanted = {name: _abstract(kind) for name, kind in leaves.items()}
    with ocp.StandardCheckpointer() as reader:
        found = reader.restore(
            folder.absolute(), {name: target(leaf) for name, leaf in wanted.items()}
        )
    # one at a time: a large model is not held twice
    return {n: unbound(found.pop(n), leaf, alias=True) for n, leaf in wanted.items()}


def _abstract(kind: str) -> jax.ShapeDtypeStruct:
    """``"float32[2,64]"`` as JAX has it."""
    dtype, _, shape = kind.rstrip("]").partition("[")
    sizes = tuple(int(size) for size in shape.split(",") if size)
    return jax.ShapeDtypeStruct(sizes, dtype)
