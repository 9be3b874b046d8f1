"""Runs and converted weights kept with orbax: see ``docs/checkpoints.md``."""

from __future__ import annotations

from specjax.checkpoints.orbax.manifest import (
    Manifest,
    describe_run,
    difference,
    read_manifest,
)
from specjax.checkpoints.orbax.parameters import load_parameters, save_parameters
from specjax.checkpoints.orbax.run import (
    SavedRun,
    check_free,
    holds_run,
    new_run,
    resume_run,
)
from specjax.checkpoints.orbax.steps import Restored, StepStore

__all__ = [
    "Manifest",
    "Restored",
    "SavedRun",
    "StepStore",
    "check_free",
    "describe_run",
    "difference",
    "holds_run",
    "load_parameters",
    "new_run",
    "read_manifest",
    "resume_run",
    "save_parameters",
]
