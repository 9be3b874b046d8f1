"""Kernels on a mesh: each device runs one on the batch rows and heads that it holds.

The compiler's partitioner cannot look into a kernel, and does not try.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where batch rows and heads lie; ``None``: whole on every device."""

    mesh: Mesh
    batch: str | None = None
    heads: str | None = None

    def narrowed(self, batch: int, heads: int) -> Spread:
        """Without the axes that do not divide what they should share."""
        sizes = dict(self.mesh.shape)

        def fits(axis: str | None, extent: int) -> str | None:
            known = axis is not None and axis in sizes
            return axis if known and extent % sizes[axis] == 0 else None

        return Spread(self.mesh, fits(self.batch, batch), fits(self.heads, heads))

    def by_rows(self, function: Callable[..., Any], batch: int) -> Callable[..., Any]:
        """The function on the batch rows of each device, all else whole.

        Every array that it takes or gives has the batch's rows first.
        """
        rows = PartitionSpec(self.narrowed(batch, 1).batch)

        def spread(*arguments: Any) -> Any:
            return self.run(function, (rows,) * len(arguments), rows)(*arguments)

        return spread

    def run(
        self,
        function: Callable[..., Any],
        inputs: tuple[PartitionSpec, ...],
        outputs: Any,
    ) -> Callable[..., Any]:
        """The function of whole arrays that runs ``function`` on each device's part."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=inputs,
            out_specs=outputs,
            check_vma=False,  # of a kernel it cannot be known
        )
