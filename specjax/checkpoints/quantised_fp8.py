"""Safetensors in FP8 with one scale a block, as DeepSeek-V3 is released."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.safetensors import DTYPES
from specjax.checkpoints.tensors import Parts, TensorInfo

CODES = "F8_E4M3"
SCALE = "_scale_inv"
BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class BlockFP8:
    """``X`` in E4M3, and ``X_scale_inv`` with one number for each block of its two
    last axes.

    The layout of DeepSeek-V3 (2412.19437, section 3.3), which GLM's and Qwen's
    releases in FP8 share: despite its name the scale is what a code is multiplied by.
    The product is rounded to float32. Blocks at the edges may be smaller.
    """

    block: tuple[int, int] = BLOCK
    name = "FP8"
    dtype = CODES

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: Path) -> BlockFP8:
        """What a ``quantization_config`` of ``fp8`` in the file ``where`` describes."""
        block = settings.get("weight_block_size", BLOCK)
        sizes = block if isinstance(block, list | tuple) else ()
        if len(sizes) != 2 or not all(type(b) is int and b > 0 for b in sizes):
            raise CheckpointError(
                f"{where}: weight_block_size {block!r} of quantization_config is not "
                "implemented: two positive integers are needed, the sides of a block"
            )
        for field, known in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
            value = settings.get(field, known)
            if value != known:
                raise CheckpointError(
                    f"{where}: {field} {value!r} of quantization_config is not "
                    f"implemented (only {known!r} is)"
                )
        return cls((sizes[0], sizes[1]))

    def whole(self, infos: Mapping[str, TensorInfo]) -> Iterator[Parts]:
        """Every tensor that is stored in parts; see ``quantised.Scheme``."""
        for name, info in infos.items():
            if name.endswith(SCALE):
                self._check_scaled(info, infos.get(name.removesuffix(SCALE)))
            if info.dtype != CODES:
                continue
            scale = infos.get(name + SCALE)
            if scale is None:
                raise CheckpointError(
                    f"tensor {name!r} in {info.file} is stored as {CODES} without its "
                    f"scale {name + SCALE!r}; the checkpoint is incomplete, or "
                    "scaled in another way (only scales of blocks are implemented)"
                )
            self._check_scale(info, scale)
            nbytes = info.nbytes + scale.nbytes
            yield Parts(dataclasses.replace(info, nbytes=nbytes), info, scale)

    def join(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """``[..., out, in]`` codes times ``[..., out / block, in / block]`` scales."""
        rows, columns = self.block
        values = np.empty(codes.shape, np.float32)
        table = _values()
        # a row of blocks at a time: nothing else becomes as large as the weight
        for lead in np.ndindex(*codes.shape[:-2]):
            for i, scale in enumerate(scales[lead].astype(np.float32)):
                band = (*lead, slice(i * rows, (i + 1) * rows))
                across = np.repeat(scale, columns)[: codes.shape[-1]]
                np.multiply(table[codes[band].view(np.uint8)], across, out=values[band])
        return values

    def _check_scaled(self, scale: TensorInfo, codes: TensorInfo | None) -> None:
        if codes is None or codes.dtype != CODES:
            stored = "is not there" if codes is None else f"is stored as {codes.dtype}"
            raise CheckpointError(
                f"tensor {scale.name!r} in {scale.file} scales "
                f"{scale.name.removesuffix(SCALE)!r}, which {stored}, not {CODES}; the "
                "checkpoint is incomplete, or put together from two"
            )

    def _check_scale(self, codes: TensorInfo, scale: TensorInfo) -> None:
        if len(codes.shape) < 2:
            raise CheckpointError(
                f"tensor {codes.name!r} in {codes.file} is {CODES} of shape "
                f"{list(codes.shape)}, but blocks have two axes"
            )
        sides = zip(codes.shape[-2:], self.block, strict=True)
        wanted = (*codes.shape[:-2], *(-(-size // side) for size, side in sides))
        if scale.shape != wanted:
            raise CheckpointError(
                f"tensor {scale.name!r} in {scale.file} has shape {list(scale.shape)}, "
                f"but {list(codes.shape)} has {list(wanted)} blocks of "
                f"{list(self.block)}; the weight_block_size of config.json is not that "
                "of the weights"
            )
        if scale.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {scale.name!r} in {scale.file} is stored as {scale.dtype}, "
                f"where a float type is needed ({', '.join(sorted(DTYPES))})"
            )


@functools.cache
def _values() -> np.ndarray:
    """``[256]``: each code's value. Looking up is twice as fast as the type's cast."""
    codes = np.arange(256, dtype=np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
