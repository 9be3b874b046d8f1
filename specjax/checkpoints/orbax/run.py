"""A run kept in a folder: saved as it goes, and taken up again by another process.

::

    folder/run.json     what the run is (see ``manifest``)
    folder/steps/64/    the state after 64 rounds, and the rows so far

Seeds and positions decide every draw, so a state is all that a run needs: restored, it
goes on with the same tokens, also on another number of devices.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.orbax.manifest import (
    MANIFEST,
    Manifest,
    difference,
    read_manifest,
    write_manifest,
)
from specjax.checkpoints.orbax.steps import StepStore
from specjax.decoding.generate import (
    Completion,
    Generation,
    Round,
    Snapshot,
    Times,
    TokenLogprob,
)
from specjax.decoding.types import DecodeState, FinishReason

STEPS, LOCK = "steps", ".lock"

_log = logging.getLogger(__name__)


class SavedRun:
    """A run whose folder is open: made by ``new_run`` and ``resume_run``."""

    def __init__(self, store: StepStore, requests: list[dict[str, Any]]) -> None:
        self._store = store
        self._requests = requests
        self.saved: int | None = None
        """Rounds of the last snapshot that was saved or restored."""

    def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; it is written while the run goes on."""
        self._store.save(snapshot.rounds, snapshot.state, notes_of(snapshot))
        self.saved = snapshot.rounds

    def restore(self, like: DecodeState) -> Snapshot | None:
        """The last whole step; ``None`` if the run was ended before the first.

        ``like`` is ``engine.start(requests)``, on the devices that the run shall go on
        with. For errors see ``StepStore.restore``.
        """
        found = self._store.restore(like)
        if found is None:
            return None
        self.saved = found.step
        return snapshot_of(found.tree, found.notes, found.step, self._requests)

    def saving(self, generation: Generation, every: int) -> Iterator[list[Completion]]:
        """Iterate over a generation, with a save every so many rounds and at its end.

        Rounds run in calls of ``rounds_per_call``: the save comes after the call that
        completes ``every`` of them.
        """
        for completions in generation:
            yield completions
            if generation.snapshot.rounds - (self.saved or 0) >= every:
                self.save(generation.snapshot)
        if self.saved != generation.snapshot.rounds:
            self.save(generation.snapshot)


@contextlib.contextmanager
def new_run(
    folder: Path, manifest: Manifest, *, keep: int = 2, overwrite: bool = False
) -> Iterator[SavedRun]:
    """Open a folder for a run that starts; its last ``keep`` steps stay.

    A folder that holds another run is refused, unless its steps are to be dropped
    (``overwrite``); one that holds anything else is always refused.
    """
    check_free(folder, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        check_free(folder, overwrite=overwrite)
        shutil.rmtree(folder / STEPS, ignore_errors=True)
        write_manifest(folder, manifest)
        with StepStore(folder / STEPS, keep) as store:
            yield SavedRun(store, manifest.run["requests"])


@contextlib.contextmanager
def resume_run(
    folder: Path, manifest: Manifest, *, keep: int = 2
) -> Iterator[SavedRun]:
    """Open the folder of a run that goes on, which must be the run it holds.

    Raises ``CheckpointError`` naming what differs: ``drafter.k``, ``requests[0].seed``.
    """
    kept = read_manifest(folder)
    found = difference(kept.run, manifest.run)
    if found is not None:
        path, there, here = found
        raise CheckpointError(
            f"{folder} holds another run: {path} is {_short(there)} there and "
            f"{_short(here)} here; go on with what the run was started with"
        )
    if kept.versions != manifest.versions:
        _log.warning(
            "%s was written by %s, this is %s: at near-ties tokens may differ",
            folder,
            _listed(kept.versions),
            _listed(manifest.versions),
        )
    with _alone(folder), StepStore(folder / STEPS, keep) as store:
        yield SavedRun(store, manifest.run["requests"])


def check_free(folder: Path, *, overwrite: bool = False) -> None:
    """Raise ``CheckpointError`` if a new run may not use this folder."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: name a folder")
    if not folder.exists():
        return
    if holds_run(folder):
        if not overwrite:
            raise CheckpointError(
                f"{folder} holds a run already: resume it, overwrite it, or name "
                "another folder"
            )
        return
    # a process that is killed leaves hidden files
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        raise CheckpointError(
            f"{folder} holds files that are no run's: name a new or an empty folder"
        )


def holds_run(folder: Path) -> bool:
    """Whether a run was kept in this folder."""
    return (folder / MANIFEST).is_file()


def notes_of(snapshot: Snapshot) -> dict[str, Any]:
    """What the host knows of the rows, for JSON."""
    return {
        "rows": [_row(completion) for completion in snapshot.completions],
        "seconds": [snapshot.times.prefill, snapshot.times.decode],
    }


def snapshot_of(
    state: DecodeState, notes: dict[str, Any], rounds: int, requests: list[Any]
) -> Snapshot:
    """The snapshot that such notes were made of."""
    rows = zip(notes["rows"], requests, strict=True)
    return Snapshot(
        state=state,
        completions=tuple(_completion(row, r["prompt_ids"]) for row, r in rows),
        times=Times(*notes["seconds"]),
        rounds=rounds,
    )


def _row(completion: Completion) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "ids": list(completion.ids),
        "text": completion.text,
        "finish_reason": int(completion.finish_reason),
        "rounds": [[r.drafted, r.accepted, r.committed] for r in completion.rounds],
        "logprobs": None
        if logprobs is None
        else [
            [entry.logprob, [list(pair) for pair in entry.top]] for entry in logprobs
        ],
    }


def _completion(row: dict[str, Any], prompt_ids: list[int]) -> Completion:
    logprobs = row["logprobs"]
    return Completion(
        prompt_ids=tuple(prompt_ids),
        ids=tuple(row["ids"]),
        text=row["text"],
        finish_reason=FinishReason(row["finish_reason"]),
        rounds=tuple(Round(*counts) for counts in row["rounds"]),
        logprobs=None
        if logprobs is None
        else tuple(
            TokenLogprob(value, tuple((index, p) for index, p in top))
            for value, top in logprobs
        ),
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or say that another process does."""
    try:
        import fcntl
    except ImportError:  # no file locks here: then it is the user's to see to
        yield
        return
    with (folder / LOCK).open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{folder} is in use by another process: wait for its end, or name "
                "another folder"
            ) from error
        yield


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())
