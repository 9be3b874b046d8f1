"""Weights in GGUF files, as a Hugging Face checkpoint has them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import id_list
from specjax.checkpoints.gguf_config import hugging_face_config
from specjax.checkpoints.gguf_header import GGUFHeader, read_gguf_header
from specjax.checkpoints.gguf_names import ARCHITECTURES, FAMILIES_ELSEWHERE
from specjax.checkpoints.tensors import TensorInfo, Tensors

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: configuration, though stored as a tensor."""

_PLAIN: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_INTEGERS = ("I8", "I16", "I32", "I64")

_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")


class GGUFReader(Tensors):
    """The tensors of a GGUF file under Hugging Face names and in that layout.

    Float types are kept, all others are turned into float32.
    """

    readable = frozenset(
        kind.name for kind in GGMLQuantizationType if kind.name not in _INTEGERS
    )

    def __init__(self, path: str | Path) -> None:
        """Read and check the header.

        Raises ``CheckpointError`` if the file is truncated, corrupt, one of several
        parts, or of another architecture.
        """
        path = Path(path)
        self.header = read_gguf_header(path)
        self._architecture = ARCHITECTURES[architecture(self.header)]
        if self.header.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path} is one part of a split GGUF file; merge the parts first "
                "(llama-gguf-split --merge)"
            )
        self._own_names: dict[str, str] = {}
        infos: dict[str, TensorInfo] = {}
        for own, info in self.header.tensors.items():
            name = self._architecture.hugging_face_name(own)
            self._own_names[name] = own
            infos[name] = TensorInfo(name, info.shape, info.dtype, info.nbytes, path)
        factors = self._rope_factors(infos.pop(ROPE_FACTORS, None))
        super().__init__(path, infos)
        self.config = hugging_face_config(self.header, infos, factors)

    def convert(self, name: str) -> np.ndarray:
        """A tensor that is known to be there, without counting as read."""
        return self._float(self.infos[name])

    def _rope_factors(self, info: TensorInfo | None) -> np.ndarray | None:
        return None if info is None else self._float(info).astype(np.float64)

    def _data(self, info: TensorInfo) -> np.ndarray:
        array, known = self._dequantised(info), self._architecture
        if known.norm_shift and info.name.endswith("norm.weight"):
            return (array.astype(np.float32) - known.norm_shift).astype(array.dtype)
        rotated = _ROTATED.fullmatch(info.name) if known.pairs else None
        if rotated is None:
            return array
        heads = "num_attention_heads" if rotated[1] == "q" else "num_key_value_heads"
        return halves_from_pairs(array, self.config[heads])

    def _dequantised(self, info: TensorInfo) -> np.ndarray:
        start = self.header.offsets[self._own_names[info.name]]
        data = np.memmap(info.file, np.uint8, "r", offset=start, shape=(info.nbytes,))
        plain = _PLAIN.get(info.dtype)
        if plain is not None:
            return np.array(data.view(plain).reshape(info.shape))
        kind = GGMLQuantizationType[info.dtype]
        block, size = GGML_QUANT_SIZES[kind]
        rows = np.asarray(data).reshape(-1, info.shape[-1] // block * size)
        try:
            array = dequantize(rows, kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {info.name!r} in {info.file} is stored as {info.dtype}, which "
                "the gguf package cannot turn into floats; use a file of another type"
            ) from error
        return np.asarray(array, np.float32).reshape(info.shape)

    @property
    def quantised_type(self) -> str | None:
        """The quantisation, or ``None`` if most elements are of a float type.

        A mixture goes by its own name ("Q4_K_M") where the file says it, else by the
        type of most elements.
        """
        sizes: dict[str, int] = {}
        for info in self.infos.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.size
        most = max(sizes, key=lambda dtype: sizes[dtype], default="F32")
        return None if most in _PLAIN else _mixture(self.header) or most


def _mixture(header: GGUFHeader) -> str | None:
    """The name of ``general.file_type``, if it is that of a quantisation."""
    try:
        name = LlamaFileType(header.metadata.get("general.file_type")).name
    except ValueError:
        return None
    prefix, _, kind = name.partition("_")
    return kind if prefix == "MOSTLY" and kind not in _PLAIN else None


def architecture(header: GGUFHeader) -> str:
    """The file's architecture; ``CheckpointError`` unless it is implemented."""
    found = header.metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has GGUF architecture {found!r}, which is not implemented "
            f"(known: {', '.join(ARCHITECTURES)}); use the safetensors checkpoint"
            f"{_instead(header, found)}"
        )
    return found


def _instead(header: GGUFHeader, found: Any) -> str:
    """What a safetensors checkpoint of the model is called here, and what of MTP."""
    families = FAMILIES_ELSEWHERE.get(found)
    if families is None:
        return ""
    ahead = [name for name in header.tensors if ".nextn." in name]
    drafts = ", whose MTP layers (nextn) draft too" if ahead else ""
    named = " or ".join(map(repr, families))
    return f" of this model (model_type {named}){drafts}"


def halves_from_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of llama-arch q and k, ``[heads * dim, ...]``.

    There rows 2i and 2i+1 of a head turn together; here rows i and i + dim/2 do.
    """
    pairs = array.shape[0] // heads // 2
    split = array.reshape(heads, pairs, 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def float_dtype(info: TensorInfo) -> str:
    """The type that ``GGUFReader.read`` returns, as safetensors spells it."""
    return info.dtype if info.dtype in _PLAIN else "F32"


def float_bytes(infos: Mapping[str, TensorInfo]) -> int:
    """Bytes that all tensors take as ``GGUFReader.read`` returns them."""
    return sum(
        math.prod(info.shape) * _PLAIN[float_dtype(info)].itemsize
        for info in infos.values()
    )


def metadata_eos_ids(header: GGUFHeader) -> tuple[int, ...]:
    """End-of-sequence ids: eos, and end-of-turn where the file has one."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    ids = [header.metadata[key] for key in keys if key in header.metadata]
    return id_list(ids, f"{header.path}, eos ids")
