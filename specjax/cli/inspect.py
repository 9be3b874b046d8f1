"""``specjax inspect``: what is in a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import field

import tyro
from rich.table import Table

from specjax.checkpoints import Description, describe
from specjax.checkpoints.layer_bytes import WINDOW
from specjax.cli.console import stdout
from specjax.cli.errors import UsageError
from specjax.cli.options import Debug, at_least

ROW = "row of the batch and layer"
SCRATCH = """\
matrix  the committed state itself, float32, with any strategy
others  what a strategy (--rollback) needs beside it for a pass of {rows} rows:
        a copy a row (snapshot), a record a row (replay), or those and a ring of
        records (ring; in ring-bfloat16 they take about half)"""


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Say what a checkpoint holds, without reading its weights.

    Family, layers by mixer, sizes, tied head, tokenizer, multi-token-prediction
    heads. Any family can be inspected; `implemented` says whether specjax runs it.

    Example: `specjax inspect smollm2-135m`
    """

    model: tyro.conf.Positional[str]
    """A folder, a .gguf file, a name of the zoo or a hub id (org/name)."""
    json: bool = False
    """Print one JSON object instead of a table."""
    tensors: bool = False
    """List every tensor with its type and shape."""
    window: int = WINDOW
    """Rows of a pass (drafts and the token before them) that scratch is told for."""
    report: Debug = field(default_factory=Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Describe and print."""
        if not self.model:
            raise UsageError("the model is empty: give a name or a path")
        at_least("--window", self.window, 1)
        description = describe(self.model, window=self.window)
        tensors = self.tensors or None  # by default, where the family is unknown
        fields = description.as_dict(tensors=tensors)
        if self.json:
            print(json.dumps(fields))
            return 0
        listed, scratch = fields.pop("tensors", None), fields.pop("scratch_bytes")
        stdout().print(_summary(description, fields))
        if scratch:
            stdout().print(f"\nrollback of recurrent layers, in bytes a {ROW}:")
            stdout().print(_scratch_table(scratch))
            stdout().print(SCRATCH.format(rows=self.window), soft_wrap=True)
        if listed is not None:
            stdout().print(_tensor_table(listed))
        return 0


def _summary(description: Description, fields: dict) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    special = {
        "num_parameters": f"{description.num_parameters:,}",
        "bytes_by_dtype": ", ".join(
            f"{name} {size / 1e6:,.1f} MB"
            for name, size in description.bytes_by_dtype.items()
        ),
        "layers_by_mixer": ", ".join(
            f"{count} {name}"
            for name, count in (description.layers_by_mixer or {}).items()
        ),
    }
    for name, value in fields.items():
        shown = special.get(name) or _plain(value)
        if name == "note" and not value:
            continue
        table.add_row(name.replace("_", " "), shown)
    return table


def _plain(value: object) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _scratch_table(scratch: list[dict]) -> Table:
    """What recurrent layers need for a pass, by how accepted inputs reach the state."""
    table = Table(box=None, pad_edge=False)
    table.add_column("mixer")
    columns = ("layers", "matrix", "snapshot", "replay", "ring")
    for name in columns:
        table.add_column(name, justify="right")
    for layer in scratch:
        table.add_row(layer["mixer"], *(f"{layer[name]:,}" for name in columns))
    return table


def _tensor_table(tensors: list[dict]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("type")
    table.add_column("shape")
    for tensor in tensors:
        shape = " × ".join(map(str, tensor["shape"])) or "scalar"
        table.add_row(tensor["name"], tensor["dtype"], shape)
    return table
