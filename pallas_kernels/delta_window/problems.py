"""Random calls of gated delta windows, for tests and timings.

All numbers are of the order of 1, keys have length 1, and decays and rates are such as
trained models have. Rows that nobody may take can be made NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_window.calls import Window
from pallas_kernels.delta_window.reference import Records
from pallas_kernels.delta_window.specs import DeltaSpec


def parents_of(width: int, row: int) -> list[int]:
    """By number of the batch row a chain, a star, and then random trees.

    Entry ``i`` is the parent of node ``i + 1``; the anchor is node 0.
    """
    if row == 0:
        return list(range(width - 1))
    if row == 1:
        return [0] * (width - 1)
    draw = np.random.default_rng((width, row))
    return [int(draw.integers(max(0, i - 3), i + 1)) for i in range(width - 1)]


def path_to(parents: list[int], node: int) -> list[int]:
    """From the anchor, and with it."""
    return [0] if node == 0 else [*path_to(parents, parents[node - 1]), node]


def ancestor_masks(width: int, batch: int) -> np.ndarray:
    """``[B, W, W]``."""
    mask = np.zeros((batch, width, width), bool)
    for b in range(batch):
        parents = parents_of(width, b)
        for node in range(width):
            mask[b, node, path_to(parents, node)] = True
    return mask


@dataclasses.dataclass
class Problem:
    """One call's arrays, in float32: a state, and a window on it.

    They are numpy's, so that a test may spoil some of them.
    """

    spec: DeltaSpec
    width: int
    batch: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)
        spec = self.spec
        self.state = self.normal(spec.heads, spec.key_dim, spec.value_dim)
        self.window: Any = Window(*self._window())

    def _window(self) -> tuple[Any, ...]:
        spec, width = self.spec, self.width
        q = self.normal(width, spec.key_heads, spec.key_dim)
        return (
            q / np.float32(spec.key_dim**0.5),
            self.keys(width),
            self.normal(width, spec.heads, spec.value_dim),
            self.decay(width),
            self.rates(width) if spec.delta else None,
            ancestor_masks(width, self.batch),
        )

    def normal(self, *sizes: int) -> np.ndarray:
        """``[B, *sizes]``."""
        return self.draw.standard_normal((self.batch, *sizes), dtype=np.float32)

    def keys(self, rows: int) -> np.ndarray:
        """``[B, rows, G, dk]``, of length 1."""
        k = self.normal(rows, self.spec.key_heads, self.spec.key_dim)
        return k / np.linalg.norm(k, axis=-1, keepdims=True)

    def decay(self, rows: int) -> np.ndarray:
        """Logarithms: ``[B, rows, H]``, or also by channel."""
        sizes = (self.batch, rows, *self.spec.decays)
        return -self.draw.exponential(0.3, size=sizes).astype(np.float32)

    def rates(self, rows: int) -> np.ndarray:
        """``[B, rows, H]`` between 0 and 1."""
        sizes = (self.batch, rows, self.spec.heads)
        return self.draw.uniform(size=sizes).astype(np.float32)

    def records(self, rows: int, dtype: Any = np.float32) -> Records:
        """Of rows that an earlier window wrote."""
        updates = self.normal(rows, self.spec.heads, self.spec.value_dim)
        return Records(
            k=jnp.asarray(self.keys(rows), dtype),
            updates=jnp.asarray(updates, dtype),
            log_decay=jnp.asarray(self.decay(rows)),
        )

    def paths(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """To the last row, to a middle one, to none at all, and so on.

        Behind a path's end stand numbers that are no row's.
        """
        path = np.full((self.batch, rows), rows + 77, np.int32)
        num = np.zeros(self.batch, np.int32)
        for b in range(self.batch):
            end = (rows - 1, rows // 2, None)[b % 3]
            if end is not None:
                # a chain, or a tree in which steps are skipped
                steps = path_to(parents_of(rows, 0 if b == 0 else b + 1), end)
                path[b, : len(steps)], num[b] = steps, len(steps)
        return path, num


def spoilt(records: Records, path: np.ndarray, num: np.ndarray) -> Records:
    """With NaN in all rows that are not taken."""
    kept = np.zeros(records.k.shape[:2], bool)
    for b, count in enumerate(num):
        kept[b, path[b, :count]] = True

    def spoil(x: jax.Array) -> jax.Array:
        mask = kept.reshape(*kept.shape, *[1] * (x.ndim - 2))
        return jnp.where(mask, x, jnp.asarray(np.nan, x.dtype))

    return jax.tree.map(spoil, records)
