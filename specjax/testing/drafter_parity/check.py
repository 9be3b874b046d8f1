"""A drafter's directory against its ``oracle.npz``, replayed twice.

The oracle's scene is always the same: a prompt of 24 tokens, a first round of drafts,
of which two are accepted whatever the target thinks of them, and a second round.
*stored* takes the target's hidden states from the file, *own* from our own target,
which reads the same tokens.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import Checkpoint, load
from specjax.checkpoints.drafters import load_part
from specjax.decoding.windows import chunk_window
from specjax.models.build import WeightType
from specjax.testing.parity import Check, OracleError, Report
from specjax.testing.parity_arrays import FILE

ATOL_STORED, ATOL_OWN = 2e-4, 5e-4
"""Of logits and hidden states in float32, by where the features come from."""

FeatureSource = Callable[[str], np.ndarray]
"""The features that an oracle stores under a name: ``[rows, m*D]``, taps in order."""

Replay = Callable[[Any, Mapping[str, np.ndarray], FeatureSource], dict[str, np.ndarray]]
"""From a part, an oracle and features to arrays by the oracle's names."""

REPLAYS: dict[str, str] = {
    "dflash": "block",
    "dflash2": "block",
    "dspark": "block",
    "eagle1": "eagle",
    "eagle3": "eagle",
    "p-eagle": "p_eagle",
    "medusa": "medusa",
    "hydra": "hydra",
}
"""The module here that replays a layout's ``method``."""

GIVEN = (
    "prompt_ids",
    "first_token",
    "next_token",
    "accepted",
    "round2_in_ids",
    "medusa_choices",
    "tree_choices",
    "base_logits",
    "spec_generate_ids",
)
"""Arrays that say what was put in, or that the target alone decides."""

SPANS = {
    "prefill_features": (0, 24),
    "features1": (0, 24),
    "hidden": (0, 24),
    "round2_features": (24, 27),
    "features2": (24, 27),
    "hidden2": (24, 27),
}
"""The positions whose features an array holds."""


SERVED = "serve_"
"""What the names of a second scene begin with: the same weights, served otherwise."""


def is_drafter(folder: str | Path) -> bool:
    """Whether a directory's oracle is one of a drafter."""
    file = Path(folder) / FILE
    if not file.is_file():
        return False
    try:
        with np.load(file) as arrays:
            return "first_token" in arrays.files
    except (OSError, ValueError):
        return False


def check_drafter_parity(folder: str | Path, targets: str | Path | None) -> Report:
    """Load a drafter for its target (``meta.json`` names it) and replay its oracle.

    Raises ``CheckpointError`` if either does not load, and ``OracleError`` for files
    that are missing or of another scene.
    """
    path = Path(folder)
    with np.load(path / FILE) as arrays:
        oracle = {name: arrays[name] for name in arrays.files}
    target = load(_target_of(path, targets), WeightType.FLOAT32, tokenizer=False)
    loaded = load_part(path, target)
    module = REPLAYS.get(loaded.layout.method)
    if module is None:
        raise OracleError(f"{path}: nothing replays {loaded.layout.method!r}")
    replay: Replay = importlib.import_module(f"{__package__}.{module}").replay
    with jax.default_matmul_precision("highest"):
        scenes = [""] + [SERVED] * (f"{SERVED}round1_ids" in oracle)
        own = {
            which: own_features(target, loaded.part.taps, scene(oracle, path, which))
            for which in scenes
        }

        def ours(name: str) -> np.ndarray:
            plain = name.removeprefix(SERVED)
            return own[name.removesuffix(plain)][slice(*SPANS[plain])]

        # what an oracle does not store of its second round, our target says both times
        first = replay(
            loaded.part, oracle, lambda n: oracle[n] if n in oracle else ours(n)
        )
        second = replay(loaded.part, oracle, ours)
    checks = [
        compare_array(name, wanted, first.get(name), second.get(name))
        for name, wanted in oracle.items()
        # "hidden2" is what one kind is given and another one says
        if name in first or name.removeprefix(SERVED) not in (*GIVEN, *SPANS)
    ]
    return Report(
        path=str(path),
        family=loaded.layout.method,
        source=f"{loaded.layout.name}, for {target.source}",
        checks=tuple(checks),
        drafted=0,
        accepted=0,
        runs=("stored", "own"),
    )


def _target_of(path: Path, folder: str | Path | None) -> Path:
    if folder is None:
        raise OracleError(
            f"{path} is a draft head: say with --targets where its target is"
        )
    file, targets = path / "meta.json", Path(folder)
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["target"]
        if not isinstance(name, str):
            raise ValueError(f"target is {name!r}, and a name is needed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OracleError(
            f'{file} should say which target the drafter is for ({{"target": "llama"}})'
            f": {error}"
        ) from error
    if not (targets / name).is_dir():
        raise OracleError(
            f"{path} is a drafter for {name!r}, and {targets / name} is no directory; "
            "say with --targets where the targets are"
        )
    return targets / name


def scene(oracle: Mapping[str, np.ndarray], path: Path, which: str = "") -> list[int]:
    """What the target has read when the second round begins."""
    drafts = oracle.get(f"{which}round1_ids", oracle.get("draft1"))
    missing = [n for n in ("prompt_ids", "first_token", "accepted") if n not in oracle]
    if drafts is None or missing:
        what = missing[0] if missing else "drafts of a round 1 (round1_ids or draft1)"
        raise OracleError(f"{path / FILE} has no {what}")
    accepted = drafts[: int(oracle["accepted"])].tolist()
    return [*oracle["prompt_ids"].tolist(), int(oracle["first_token"]), *accepted]


def own_features(
    target: Checkpoint, taps: tuple[int, ...], ids: list[int]
) -> np.ndarray:
    """``[len(ids), m*D]``: our own target's features, taps in order."""
    decoder, count = target.decoder, len(ids)
    zero, tokens = jnp.zeros((1,), jnp.int32), jnp.asarray([ids], jnp.int32)
    window = chunk_window(tokens, zero, zero + count, count)
    verdict = decoder.verify(decoder.init(1, count), window, taps=taps, logits="none")
    rows = [np.asarray(verdict.features[tap])[0] for tap in taps]
    return np.concatenate(rows, axis=-1)


def compare_array(
    name: str, wanted: np.ndarray, stored: np.ndarray | None, own: np.ndarray | None
) -> Check:
    """One array, both times. Ids, masks and maps must be equal."""
    if stored is None or own is None:
        return Check(name, None, None, None, None, "unknown")
    exact = not np.issubdtype(wanted.dtype, np.floating)
    errors = [_error(wanted, np.asarray(got), exact) for got in (stored, own)]
    allowed = (0.0, 0.0) if exact else (ATOL_STORED, ATOL_OWN)
    # a NaN is within no tolerance
    fine = all(error <= most for error, most in zip(errors, allowed, strict=True))
    status = "pass" if fine else "FAIL"
    return Check(name, wanted.shape, errors[0], errors[1], allowed[1], status)


def _error(wanted: np.ndarray, got: np.ndarray, exact: bool) -> float:
    """The largest difference; of ids, how many differ; infinite for another shape."""
    if got.shape != wanted.shape:
        return float("inf")
    if exact:
        return float(np.sum(got != wanted))
    return float(np.max(np.abs(got.astype(np.float64) - wanted)))
