"""Safetensors in MXFP4, as gpt-oss is released."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.tensors import Parts, TensorInfo

BLOCKS, SCALES = "_blocks", "_scales"
PER_BLOCK = 32
"""Numbers that share a scale; they take 16 bytes."""


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """``X [..., n, m]`` from ``X_blocks [..., m, n / 32, 16]`` and
    ``X_scales [..., m, n / 32]``, both bytes.

    MXFP4 of the OCP's microscaling formats (2310.10537), in gpt-oss's layout: a byte
    holds two E2M1 numbers, the low half first, and 32 of them share a power of two
    (E8M0, where 255 is not a number). A row of blocks is a column of ``X``, so that
    ``X`` is what the unquantised model has. It is read as bfloat16, which holds every
    such number exactly.
    """

    name = "MXFP4"
    dtype = "MXFP4"

    def whole(self, infos: Mapping[str, TensorInfo]) -> Iterator[Parts]:
        """Every tensor that is stored in parts; see ``quantised.Scheme``."""
        for name, info in infos.items():
            for part, other in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
                twin = name.removesuffix(part) + other
                if name.endswith(part) and twin not in infos:
                    raise CheckpointError(
                        f"tensor {name!r} in {info.file} has no {twin!r} beside it; "
                        "the checkpoint is incomplete"
                    )
            if name.endswith(BLOCKS):
                base = name.removesuffix(BLOCKS)
                scales = infos[base + SCALES]
                self._check_parts(info, scales)
                self._check_single(info, infos.get(base))
                *lead, rows, blocks, _ = info.shape
                shape = (*lead, PER_BLOCK * blocks, rows)
                nbytes = info.nbytes + scales.nbytes
                whole = TensorInfo(base, shape, self.dtype, nbytes, info.file)
                yield Parts(whole, info, scales)

    def join(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """``[..., m, n / 32, 16]`` and ``[..., m, n / 32]`` -> bfloat16
        ``[..., n, m]``, a transposed view."""
        *lead, rows, blocks, _ = codes.shape
        pairs = np.empty((*lead, rows, blocks * PER_BLOCK // 2), np.uint32)
        table = _pairs()
        # an expert at a time: the places in the table take eight bytes each
        for at in np.ndindex(*lead):
            places = (scales[at].astype(np.uint16) << 8)[..., None] | codes[at]
            pairs[at] = table[places].reshape(rows, -1)
        return pairs.view(ml_dtypes.bfloat16).swapaxes(-1, -2)

    def _check_parts(self, blocks: TensorInfo, scales: TensorInfo) -> None:
        for part in (blocks, scales):
            if part.dtype != "U8":
                raise CheckpointError(
                    f"tensor {part.name!r} in {part.file} is stored as {part.dtype}, "
                    "where MXFP4 has bytes (U8)"
                )
        if len(blocks.shape) < 3 or blocks.shape[-1] != PER_BLOCK // 2:
            raise CheckpointError(
                f"tensor {blocks.name!r} in {blocks.file} has shape "
                f"{list(blocks.shape)}, where MXFP4 has [..., rows, blocks, 16]"
            )
        if scales.shape != blocks.shape[:-1]:
            raise CheckpointError(
                f"tensor {scales.name!r} in {scales.file} has shape "
                f"{list(scales.shape)}, but its blocks have {list(blocks.shape)}: one "
                f"scale a block is {list(blocks.shape[:-1])}"
            )

    def _check_single(self, blocks: TensorInfo, other: TensorInfo | None) -> None:
        if other is not None:
            raise CheckpointError(
                f"tensor {other.name!r} is in {other.file}, and once more as "
                f"{blocks.name!r} in {blocks.file}; remove the stale one"
            )


@functools.cache
def _pairs() -> np.ndarray:
    """``[65536]``: by scale and byte, the two bfloat16 numbers as one integer."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    e2m1 = np.concatenate([magnitudes, -magnitudes])
    byte = np.arange(256)
    numbers = np.stack([e2m1[byte & 15], e2m1[byte >> 4]], axis=-1)
    powers = np.where(byte < 255, np.ldexp(1.0, byte - 127), np.nan)
    with np.errstate(over="ignore"):  # 2**128 and more are infinite
        table = (powers[:, None, None] * numbers).astype(ml_dtypes.bfloat16)
    return table.view(np.uint32).reshape(-1)
