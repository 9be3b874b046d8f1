"""Numbered steps of a pytree: written in the background, whole or not at all.

Orbax writes a step into a temporary folder and renames it, so a process that is killed
leaves the last whole step as it was. What it had begun is removed at the next opening.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.orbax.leaves import (
    abstract,
    check_leaves,
    kinds_of,
    named_leaves,
    target,
    unbound,
    with_leaves,
)
from specjax.checkpoints.orbax.sums import Damaged, check_sums, write_sums

ARRAYS, NOTES = "arrays", "notes"

WRITTEN_LATER = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that orbax touches after the checksums are taken; none holds data."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A step as it was saved."""

    step: int
    tree: Any
    notes: Any


class StepStore:
    """The last ``keep`` steps of a pytree in a folder of their own.

    Use it in a ``with`` statement: the end waits for the save in flight. One process
    at a time, and every array must lie on this process's devices.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"keep = {keep}: at least one step must be kept")
        self.folder = folder.absolute()  # which tensorstore asks for
        self._saving = 0
        options = ocp.CheckpointManagerOptions(
            preservation_policy=LatestN(keep),
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        with _as_checkpoint_error(f"{folder} cannot be opened"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, item_names=(ARRAYS, NOTES)
            )

    def __enter__(self) -> StepStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._manager.close()
        except Exception as failed:
            # an error that is on its way says more
            if kind is None:
                raise CheckpointError(self._unwritten(failed)) from failed

    @property
    def steps(self) -> list[int]:
        """Whole steps, in order; waits for the save in flight."""
        self._wait()
        return sorted(self._manager.all_steps())

    def save(self, step: int, tree: Any, notes: Any) -> None:
        """Keep a pytree of arrays, and notes that JSON can hold, as ``step``.

        Returns when the arrays are read: they may be donated then. A failure of the
        save before is raised here, or at the end of the ``with`` statement.
        """
        leaves = {
            name: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
            for name, leaf in named_leaves(tree).items()
        }
        # orbax refuses arrays without elements; their shape is all there is to know
        arrays = {name: leaf for name, leaf in leaves.items() if leaf.size}
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays),
            notes=ocp.args.JsonSave({"leaves": kinds_of(leaves), "notes": notes}),
        )
        self._wait()
        self._saving = step
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise CheckpointError(self._unwritten(error)) from error

    def restore(self, like: Any) -> Restored | None:
        """The last whole step, in the structure and on the devices of ``like``.

        ``like`` is a pytree of arrays, or of ``jax.ShapeDtypeStruct``. Damaged steps
        are passed over, with a warning in the log, and removed; ``None`` if there is
        no step. A tree of other leaves, shapes or dtypes is a ``CheckpointError``.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            try:
                check_sums(self.folder / str(step))
            except Damaged as error:
                damaged[step] = f"step {step} of {self.folder} is damaged: {error}"
                continue
            found = self._read(step, like)
            for bad, said in damaged.items():
                _log.warning("%s; going on from step %d", said, step)
                shutil.rmtree(self.folder / str(bad), ignore_errors=True)
            self._manager.reload()
            return found
        if damaged:
            raise CheckpointError(
                f"no step is whole, so the run must start anew: "
                f"{'; '.join(damaged.values())}"
            )
        return None

    def _read(self, step: int, like: Any) -> Restored:
        where = f"step {step} of {self.folder}"
        wanted = {name: abstract(leaf) for name, leaf in named_leaves(like).items()}
        with _as_checkpoint_error(f"{where} cannot be read"):
            about = self._manager.restore(
                step, args=ocp.args.Composite(notes=ocp.args.JsonRestore())
            )[NOTES]
        check_leaves(about["leaves"], kinds_of(wanted), where)
        full = {name: target(leaf) for name, leaf in wanted.items() if leaf.size}
        with _as_checkpoint_error(f"{where} cannot be read"):
            arrays = self._manager.restore(
                step,
                args=ocp.args.Composite(arrays=ocp.args.StandardRestore(full)),
            )[ARRAYS]
        for name, leaf in wanted.items():
            if not leaf.size:
                arrays[name] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            else:
                # copied: a state is donated, so its memory must be its own
                arrays[name] = unbound(arrays[name], leaf, alias=False)
        return Restored(step, with_leaves(like, arrays), about["notes"])

    def _seal(self) -> None:
        """Called by orbax when a step's files are written, before it is renamed."""
        step = str(self._saving)
        for folder in self.folder.iterdir():
            if folder.name == step or folder.name.startswith(f"{step}."):
                write_sums(folder, skip=WRITTEN_LATER)

    def _wait(self) -> None:
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(self._unwritten(error)) from error

    def _unwritten(self, error: Exception) -> str:
        return f"step {self._saving} of {self.folder} was not written: {error}"


@contextlib.contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Whatever orbax raises, of which its interface says nothing."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what}: {error}") from error
