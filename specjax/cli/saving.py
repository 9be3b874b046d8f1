"""Runs that survive an interruption: ``--checkpoint``, ``--every``, ``--resume``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from tyro import conf

from specjax.cli.console import stderr
from specjax.cli.errors import UsageError
from specjax.cli.options import NONE, at_least
from specjax.decoding.engine import Engine
from specjax.decoding.generate import Snapshot
from specjax.decoding.requests import Request

if TYPE_CHECKING:  # orbax takes half a second to import: only runs that are kept pay
    from specjax.checkpoints.orbax import SavedRun

Form = TypeVar("Form")

OptionalFolder = Annotated[str | None, conf.arg(metavar="DIR", help_behavior_hint=NONE)]

NO_PART_OF_THE_RUN = frozenset({"saving", "json", "report", "rounds_per_call"})
"""Options that a resumed run may change: they decide what is shown, and when."""

PLACES = frozenset({"--model", "--draft-model"})
"""Options that say where weights lie; the weights themselves are compared."""


@dataclasses.dataclass(frozen=True)
class SavingOptions:
    """Keep the run in a folder, to go on with it after an interruption."""

    checkpoint: OptionalFolder = None
    """Keep the run in this folder while it decodes, for --resume after a crash."""
    every: int = 64
    """Rounds between two saves. After a crash the rounds since are decoded again."""
    keep: int = 2
    """How many of the last saves stay."""
    resume: bool = False
    """Go on with the run in --checkpoint, with the same tokens. Options left out are
    the run's own; its text so far is printed first."""
    overwrite: bool = False
    """Drop the run that --checkpoint holds, and start anew."""

    def check(self) -> None:
        """What can be said before anything is loaded."""
        at_least("--every", self.every, 1)
        at_least("--keep", self.keep, 1)
        if self.checkpoint is None:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != field.default:
                    raise UsageError(
                        f"--{field.name} needs --checkpoint DIR, the folder that the "
                        "run is kept in"
                    )
            return
        if not self.checkpoint:
            raise UsageError("--checkpoint is empty: name a folder")
        if self.resume and self.overwrite:
            raise UsageError(
                "--resume goes on with a run and --overwrite drops it: give one of them"
            )

    def check_free(self) -> None:
        """Refuse a folder that holds something else, if the run is a new one."""
        if self.checkpoint is None or self.resume:
            return
        from specjax.checkpoints.orbax import check_free, holds_run

        if holds_run(Path(self.checkpoint)) and not self.overwrite:
            raise UsageError(
                f"--checkpoint {self.checkpoint} holds a run already: add --resume to "
                "go on with it, --overwrite to drop it, or name another folder"
            )
        check_free(Path(self.checkpoint), overwrite=self.overwrite)

    def rounds_per_call(self, wanted: int) -> int:
        """The most rounds a call, up to ``wanted``, that meet every save."""
        if self.checkpoint is None:
            return wanted
        most = min(wanted, self.every)
        return next(n for n in range(most, 0, -1) if self.every % n == 0)


@contextlib.contextmanager
def kept_run(
    saving: SavingOptions, engine: Engine, request: Request, options: dict[str, Any]
) -> Iterator[SavedRun | None]:
    """The open folder of the run; ``None`` if it is not kept."""
    if saving.checkpoint is None:
        yield None
        return
    from specjax.checkpoints.orbax import describe_run, new_run, resume_run

    folder = Path(saving.checkpoint)
    manifest = describe_run(engine, [request], options)
    if saving.resume:
        _check_places(folder, manifest.run, options)
        with resume_run(folder, manifest, keep=saving.keep) as run:
            yield run
    else:
        with new_run(
            folder, manifest, keep=saving.keep, overwrite=saving.overwrite
        ) as run:
            yield run


def restored(run: SavedRun, engine: Engine, request: Request) -> Snapshot | None:
    """Where the run goes on, which is said on standard error."""
    snapshot = run.restore(engine.start([request]))
    if snapshot is None:
        said = "nothing was saved yet: starting from the prompt"
    else:
        said = f"going on after round {snapshot.rounds}"
    stderr().print(said, style="dim", soft_wrap=True)
    return snapshot


def options_of(form: Any, prompt: str) -> dict[str, Any]:
    """The options that make the run what it is, with the text of its prompt."""
    fields = dataclasses.asdict(form) | {"prompt": prompt, "prompt_file": None}
    return {n: value for n, value in fields.items() if n not in NO_PART_OF_THE_RUN}


def resumed(form: Form, arguments: Sequence[str]) -> tuple[Form, str | None]:
    """The run's own options, with those that may change taken from the arguments.

    Also the prompt file, if one was named again. An option that contradicts the run is
    a ``UsageError``.
    """
    from specjax.checkpoints.orbax import read_manifest

    given: Any = form
    folder = Path(given.saving.checkpoint)
    own = _with_options(given, read_manifest(folder).options, folder)
    # parsed once more with the run's options for defaults: what differs was said
    said = tyro.cli(
        type(given),
        default=own,
        args=arguments[1:],
        config=(conf.OmitArgPrefixes, conf.OmitSubcommandPrefixes),
    )
    kept, now = _by_option(own), _by_option(said)
    for option in kept:
        if option not in PLACES and kept[option] != now[option]:
            raise UsageError(
                f"{option} {_told(now[option])}: the run in {folder} has "
                f"{_told(kept[option])}; leave the option out, or start another run in "
                "another folder"
            )
    return dataclasses.replace(said, prompt_file=None), said.prompt_file


def _with_options(form: Any, stored: Mapping[str, Any], folder: Path) -> Any:
    """The form with stored values in the place of its own."""
    odd = _unlike(stored, options_of(form, ""))
    if odd:
        raise UsageError(
            f"--resume: the run in {folder} was not started by this version of "
            f"`specjax generate` (its options differ in {', '.join(odd)})"
        )
    changes = {}
    for name, value in stored.items():
        current = getattr(form, name)
        if isinstance(value, dict):
            inner = {n: _tuple(v) for n, v in value.items()}
            changes[name] = dataclasses.replace(current, **inner)
        else:
            changes[name] = _tuple(value)
    return dataclasses.replace(form, **changes)


def _unlike(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Names that only one of the two has, groups of options looked into."""
    odd = set(stored) ^ set(own)
    for name in set(stored) & set(own):
        there, here = stored[name], own[name]
        if isinstance(there, dict) != isinstance(here, dict):
            odd.add(name)
        elif isinstance(here, dict):
            odd |= set(there) ^ set(here)
    return sorted(odd)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _by_option(form: Any) -> dict[str, Any]:
    """The values that make the run what it is, as ``--top-p`` names them."""
    found = {}
    for name, value in options_of(form, form.prompt).items():
        inner = value if isinstance(value, dict) else {name: value}
        found |= {f"--{n.replace('_', '-')}": v for n, v in inner.items()}
    return found


def _told(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_places(
    folder: Path, run: Mapping[str, Any], options: dict[str, Any]
) -> None:
    """Name the option if weights are other ones than the run's."""
    from specjax.checkpoints.orbax import difference, read_manifest

    found = difference(read_manifest(folder).run, run)
    if found is None:
        return
    path = found[0]
    for part, option, place in (
        ("target.", "--model", options["model"]),
        ("drafter.model", "--draft-model", options["draft"]["draft_model"]),
    ):
        if path.startswith(part):
            raise UsageError(
                f"{option} {place}: the run in {folder} had another model ({path} "
                "differs); name the one that it was started with"
            )
