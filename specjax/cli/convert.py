"""``specjax convert``: a model kept as the decoder holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated

import tyro

from specjax.cli import options as o
from specjax.cli.console import stderr, stdout
from specjax.cli.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert a model once, so that no later load converts it again.

    The folder holds the arrays as they are decoded with, tokenizer and configuration;
    --model takes it, with the --dtype it was converted to. A damaged one is refused.

    Example: `specjax convert smollm2-135m smol-int8 --dtype int8`
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A name of `specjax zoo`, a folder, a .gguf file or a hub id."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """A new folder for the result."""
    dtype: o.DType = "float32"
    """What the weights are stored as."""
    report: o.Debug = field(default_factory=o.Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Load and save."""
        folder = Path(self.folder)
        if not self.folder or folder.exists():
            raise UsageError(f"{self.folder or 'the folder'}: name a new folder")
        checkpoint = o.load_model("the model", self.model, self.dtype)
        from specjax.checkpoints.orbax import save_parameters

        with stderr().status("writing"):
            save_parameters(checkpoint, folder)
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        stdout().print(
            f"{folder}: {checkpoint.source} as {self.dtype}, {size / 1e6:.0f} MB",
            soft_wrap=True,
        )
        return 0
