"""Quantised safetensors, dequantised as they are read.

How a checkpoint is quantised says ``quantization_config`` in its ``config.json``. A
scheme takes the stored parts of a tensor (codes and scales) for the one tensor that
they are, so a family reads what an unquantised checkpoint would hold, by the same name
and shape. Where such checkpoints are served, activations are often rounded as well;
that is not imitated here: the weights are what their codes say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.quantised_fp8 import BlockFP8
from specjax.checkpoints.quantised_mxfp4 import MXFP4
from specjax.checkpoints.safetensors import DTYPES, SafetensorsReader
from specjax.checkpoints.tensors import Parts, TensorInfo


@runtime_checkable
class Scheme(Protocol):
    """One way of storing a tensor as codes and scales."""

    @property
    def name(self) -> str:
        """What to call it in a report."""
        ...

    @property
    def dtype(self) -> str:
        """The type of whole tensors in listings."""
        ...

    def whole(self, infos: Mapping[str, TensorInfo]) -> Iterator[Parts]:
        """Every tensor that is stored in parts.

        Raises ``CheckpointError`` if a part is missing or they do not fit; the message
        names the tensor and its file.
        """
        ...

    def join(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The tensor, as floats."""
        ...


def scheme_of(raw: Mapping[str, Any], where: Path) -> Scheme | None:
    """How a configuration says that the weights are quantised; ``None``: not at all.

    Raises ``CheckpointError`` for what is not implemented; ``where`` is the file to
    name.
    """
    text = raw.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    settings = raw.get("quantization_config") or inner
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{where}: quantization_config {settings!r} is no object")
    method = settings.get("quant_method")
    if method == "fp8":
        return BlockFP8.from_settings(settings, where)
    if method == "mxfp4":
        return MXFP4()
    raise CheckpointError(
        f"{where}: quantization_config of quant_method {method!r} is not implemented; "
        "known are 'fp8' (in blocks, as DeepSeek-V3) and 'mxfp4' (as gpt-oss); take "
        "the unquantised checkpoint, or convert it to one"
    )


def open_reader(folder: Path, raw: Mapping[str, Any]) -> SafetensorsReader:
    """The tensors of a checkpoint, dequantised if its configuration says so.

    Raises ``CheckpointError`` as ``scheme_of`` and ``SafetensorsReader`` do, and for
    quantised tensors that lack a part.
    """
    scheme = scheme_of(raw, folder / "config.json")
    if scheme is None:
        return SafetensorsReader(folder)
    return QuantisedReader(folder, scheme)


class QuantisedReader(SafetensorsReader):
    """The tensors of a quantised checkpoint; ``infos`` lists whole ones.

    Each is joined when it is read. What is not quantised is read as it stands.
    """

    def __init__(self, path: str | Path, scheme: Scheme) -> None:
        super().__init__(path)
        self.scheme = scheme
        self.readable = frozenset({*DTYPES, scheme.dtype})
        self._parts: dict[str, Parts] = {}
        for parts in list(scheme.whole(self.infos)):
            del self.infos[parts.codes.name], self.infos[parts.scales.name]
            self.infos[parts.whole.name] = parts.whole
            self._parts[parts.whole.name] = parts

    def _data(self, info: TensorInfo) -> np.ndarray:
        parts = self._parts.get(info.name)
        if parts is None:
            return super()._data(info)
        return self.scheme.join(self._mapped(parts.codes), self._mapped(parts.scales))
