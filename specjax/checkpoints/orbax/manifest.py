"""What a run is made of: enough to tell whether another one would go on with it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import new_file, read_json
from specjax.decoding.engine import Engine
from specjax.decoding.requests import Request

FORMAT = 1
"""Raise when what is kept changes: older folders are then refused."""

MANIFEST = "run.json"

SAMPLED = 256
"""Elements of each array that a fingerprint looks at."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A run, by what decides its tokens."""

    run: dict[str, Any]
    """Target, drafter, rule, engine options and requests."""
    options: dict[str, Any]
    """Whatever the caller wants to find again: the command line keeps its options."""
    versions: dict[str, str]
    """Of the libraries, and the platform. Others may round otherwise."""


def describe_run(
    engine: Engine,
    requests: Sequence[Request],
    options: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a run that is about to start, or to go on."""
    settings = dataclasses.asdict(engine.options)
    # how often the host looks in changes no token
    del settings["rounds_per_call"]
    run = {
        "target": describe(engine.target),
        "drafter": describe(engine.drafter) | {"k": engine.drafter.max_depth},
        "rule": describe(engine.rule),
        "engine": settings,
        "requests": [_request(request) for request in requests],
    }
    return Manifest(
        run=_as_json(run), options=_as_json(dict(options or {})), versions=versions()
    )


def _request(request: Request) -> dict[str, Any]:
    fields = dataclasses.asdict(request)
    bias = {str(token): value for token, value in request.logit_bias.items()}
    return fields | {"logit_bias": bias}


def versions() -> dict[str, str]:
    """Of what computes the tokens."""
    return {
        "specjax": specjax.__version__,
        "jax": metadata.version("jax"),
        "platform": jax.default_backend(),
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put it into the folder, whole or not at all."""
    fields = {"format": FORMAT, **dataclasses.asdict(manifest)}
    with new_file(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(fields, indent=1), "utf-8")


def read_manifest(folder: Path) -> Manifest:
    """What run a folder holds; a ``CheckpointError`` if it holds none."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}: no run was kept there")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} holds no run ({MANIFEST} is missing): name the folder that a "
            "run was kept in, or start one"
        )
    fields = read_json(folder / MANIFEST, fix="start the run anew in another folder")
    if fields.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / MANIFEST} is of format {fields.get('format')}, this version "
            f"reads {FORMAT}: go on with the version that wrote it"
        )
    for part in ("run", "options", "versions"):
        if not isinstance(fields.get(part), dict):
            raise CheckpointError(
                f"{folder / MANIFEST} has no {part!r}: it is not as it was written, so "
                "start the run anew in another folder"
            )
    return Manifest(fields["run"], fields["options"], fields["versions"])


def difference(kept: Any, wanted: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two descriptions first differ: the path, what was kept, what is wanted."""
    if isinstance(kept, dict) and isinstance(wanted, dict):
        parts = [(f".{n}", kept.get(n), wanted.get(n)) for n in {**kept, **wanted}]
    elif isinstance(kept, list) and isinstance(wanted, list):
        if len(kept) != len(wanted):
            return path.lstrip("."), kept, wanted
        parts = [
            (f"[{i}]", *both) for i, both in enumerate(zip(kept, wanted, strict=True))
        ]
    else:
        # 1 is 1.0, but not True
        same = kept == wanted and isinstance(kept, bool) == isinstance(wanted, bool)
        return None if same else (path.lstrip("."), kept, wanted)
    for name, a, b in parts:
        found = difference(a, b, path + name)
        if found is not None:
            return found
    return None


def describe(part: Any) -> dict[str, Any]:
    """The class of a target, drafter or rule, and its fields.

    A plain value is itself; anything else is told by its ``fingerprint``.
    """
    fields = {
        name: _plain(value) if _is_plain(value) else fingerprint(value)
        for name, value in _fields(part).items()
    }
    return {"class": _name(type(part)), **fields}


def fingerprint(value: Any) -> str:
    """Tells one configuration, and one set of weights, from another.

    Of arrays it takes dtype, shape and a few elements, so it costs no full pass: it
    proves nothing about weights that were changed on purpose.
    """
    lines = "\n".join(_lines(value, ""))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _lines(value: Any, path: str) -> Iterator[str]:
    if _is_plain(value):
        yield f"{path}={_plain(value)!r}"
    elif isinstance(value, jax.Array | np.ndarray):
        yield f"{path}={value.dtype}{value.shape}:{_sample(value):08x}"
    elif isinstance(value, functools.partial):
        yield from _lines((value.func, value.args, value.keywords), path)
    elif callable(value) and hasattr(value, "__qualname__"):
        yield f"{path}={_name(value)}"
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _lines(value[key], f"{path}.{key}")
    elif isinstance(value, tuple | list | set | frozenset):
        ordered = value if isinstance(value, tuple | list) else sorted(value, key=str)
        for i, item in enumerate(ordered):
            yield from _lines(item, f"{path}[{i}]")
    else:
        yield f"{path}:{_name(type(value))}"
        for name, item in _fields(value).items():
            yield from _lines(item, f"{path}.{name}")


def _sample(array: Any) -> int:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    stride = max(1, array.size // SAMPLED)
    some = np.asarray(_every(array, stride=stride))
    return zlib.crc32(some.tobytes())


@functools.partial(jax.jit, static_argnames="stride")
def _every(array: jax.Array, *, stride: int) -> jax.Array:
    return array.reshape(-1)[::stride]


def _fields(part: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(part):
        return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return dict(getattr(part, "__dict__", {}))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    plain = bool | int | float | str | enum.Enum | np.generic | None
    return isinstance(value, plain)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value.item() if isinstance(value, np.generic) else value


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _as_json(value: Any) -> Any:
    """As it will come back from the file: tuples are lists there."""
    return json.loads(json.dumps(value, default=_plain))
