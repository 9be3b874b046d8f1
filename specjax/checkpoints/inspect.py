"""What a checkpoint is, without reading its weights."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import read_optional_json
from specjax.checkpoints.gguf import ARCHITECTURES, GGUFReader
from specjax.checkpoints.gguf_header import GGUFHeader, read_gguf_header
from specjax.checkpoints.layer_bytes import (
    WINDOW,
    Scratch,
    kind_of,
    kv_bytes_per_token,
    scratch_bytes,
    state_bytes_per_row,
    window_bytes_per_row,
)
from specjax.checkpoints.load import decoder_config, resolve
from specjax.checkpoints.quantised import open_reader
from specjax.checkpoints.safetensors import SafetensorsReader
from specjax.checkpoints.tensors import HEAD, TensorInfo, total_bytes
from specjax.checkpoints.tokenizer_files import (
    TOKENIZER_CONFIG,
    has_tokenizer,
    read_config,
    template_from_folder,
)
from specjax.drafters.layouts import LAYOUTS
from specjax.models.config import AttentionConfig, DecoderConfig, MixerConfig
from specjax.models.families import FAMILIES


@dataclasses.dataclass(frozen=True)
class Description:
    """What the headers and the configuration of a checkpoint say.

    A field is ``None`` where they do not say it, or where the family is not
    implemented and guessing would be all that could be done.
    """

    path: str
    format: str
    """``"safetensors"`` or ``"gguf"``."""
    family: str
    """``model_type``, or the GGUF architecture."""
    implemented: bool
    note: str
    """Empty, or why some fields are ``None``."""
    num_layers: int | None
    layers_by_mixer: dict[str, int] | None
    hidden_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    tied: bool | None
    context_length: int | None
    kv_bytes_per_token: int | None
    """What one more token takes in the layers that keep all of them: keys and values,
    or a latent, its rotary part and an indexer's key. Of two-byte numbers; a float32
    cache takes twice."""
    window_bytes_per_row: int | None
    """The most that layers with a sliding window keep of a row, however long it gets;
    two-byte numbers."""
    state_bytes_per_row: int | None
    """What recurrent layers keep of a row, however long it gets: matrices and the last
    inputs of convolutions, in float32."""
    scratch_bytes: tuple[Scratch, ...] | None
    """What a pass needs beside these states, by how accepted inputs reach them."""
    num_parameters: int
    """Elements of the tensors, each with its scales for one; of a family that is not
    implemented, elements of whatever is stored."""
    bytes_by_dtype: dict[str, int]
    """By stored type; scales count as what they scale."""
    num_tensors: int
    num_files: int
    mtp_tensors: int
    """Tensors of multi-token-prediction heads."""
    has_tokenizer: bool
    has_chat_template: bool
    tensors: tuple[TensorInfo, ...]

    def as_dict(self, *, tensors: bool | None = None) -> dict[str, Any]:
        """Plain values, for printing or JSON.

        ``tensors`` adds name, type and shape of each; by default that is done for a
        family that is not implemented.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["tensors"]
        if self.scratch_bytes is not None:
            fields["scratch_bytes"] = list(map(dataclasses.asdict, self.scratch_bytes))
        if tensors if tensors is not None else not self.implemented:
            fields["tensors"] = [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)}
                for t in self.tensors
            ]
        return fields


def describe(path_or_name: str | Path, *, window: int = WINDOW) -> Description:
    """Describe a checkpoint of any family from its headers; see ``load`` for names.

    ``window`` is how many rows a pass has, for what it needs beside recurrent states.
    Raises ``CheckpointError`` if it is not there, truncated or corrupt.
    """
    path = resolve(path_or_name)
    if path.is_file():
        return _describe_gguf(path, window)
    raw = read_config(path)
    reader = _open(path, raw)
    settings = read_optional_json(path / TOKENIZER_CONFIG)
    description = _description(
        path,
        raw,
        reader.infos,
        window,
        format="safetensors",
        num_files=len(reader.files),
        has_tokenizer=has_tokenizer(path),
        has_chat_template=template_from_folder(path, settings) is not None,
    )
    names = frozenset(reader.infos)
    head = next((each for each in LAYOUTS if each.fits(raw, names)), None)
    if head is None or description.implemented:
        return description
    note = (
        f"a draft head, {head.name}: it is loaded beside its target "
        f"(--drafter {head.method}:{path}); listing the tensors"
    )
    return dataclasses.replace(
        description, family=head.method, implemented=True, note=note
    )


def _open(path: Path, raw: Mapping[str, Any]) -> SafetensorsReader:
    """Whole tensors of a model that can be loaded; else whatever is stored."""
    config, _ = _decoder_config(path, str(raw.get("model_type")), raw)
    return SafetensorsReader(path) if config is None else open_reader(path, raw)


def _describe_gguf(path: Path, window: int) -> Description:
    header = read_gguf_header(path)
    if header.metadata.get("general.architecture") in ARCHITECTURES:
        reader = GGUFReader(path)
        raw, infos = reader.config, reader.infos
    else:
        raw, infos = _foreign_config(header), header.tensors
    return _description(
        path,
        raw,
        infos,
        window,
        format="gguf",
        num_files=1,
        has_tokenizer="tokenizer.ggml.tokens" in header.metadata,
        has_chat_template="tokenizer.chat_template" in header.metadata,
    )


def _foreign_config(header: GGUFHeader) -> dict[str, Any]:
    """The sizes that every architecture's metadata has."""
    architecture = str(header.metadata.get("general.architecture"))
    names = {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "context_length": "max_position_embeddings",
    }
    sizes = {
        new: header.metadata.get(f"{architecture}.{k}") for k, new in names.items()
    }
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    vocab = len(tokens) if isinstance(tokens, list) else None
    return {"model_type": architecture, "vocab_size": vocab, **sizes}


def _description(
    path: Path,
    raw: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    window: int,
    **rest: Any,
) -> Description:
    family = str(raw.get("model_type"))
    text = raw.get("text_config")
    text = {**raw, **text} if isinstance(text, Mapping) else raw
    config, note = _decoder_config(path, family, raw)
    attention = config and _attention(config)
    layers = _integer(text, "num_hidden_layers")
    return Description(
        path=str(path),
        family=family,
        implemented=config is not None,
        note=note,
        num_layers=len(config.blocks) if config else layers,
        layers_by_mixer=_mixers(config) if config else None,
        hidden_size=_integer(text, "hidden_size"),
        num_heads=_integer(text, "num_attention_heads"),
        num_kv_heads=_integer(text, "num_key_value_heads", "num_attention_heads"),
        head_dim=attention.head_dim if attention else _integer(text, "head_dim"),
        vocab_size=_integer(text, "vocab_size"),
        tied=config.tied if config else _tied(text, infos),
        context_length=_integer(text, "max_position_embeddings", "model_max_length"),
        kv_bytes_per_token=_sum(config, kv_bytes_per_token),
        window_bytes_per_row=_sum(config, window_bytes_per_row),
        state_bytes_per_row=_sum(config, state_bytes_per_row),
        scratch_bytes=scratch_bytes(config, window) if config else None,
        num_parameters=sum(info.size for info in infos.values()),
        bytes_by_dtype=total_bytes(infos.values()),
        num_tensors=len(infos),
        mtp_tensors=_mtp_tensors(infos, layers),
        tensors=tuple(infos.values()),
        **rest,
    )


def _decoder_config(
    path: Path, family: str, raw: Mapping[str, Any]
) -> tuple[DecoderConfig | None, str]:
    """The configuration, or ``None`` and why there is none."""
    if family not in FAMILIES:
        return None, f"family {family!r} is not implemented yet: listing the tensors"
    try:
        return decoder_config(raw, path)[1], ""
    except CheckpointError as error:
        return None, f"not implemented: {error}; listing the tensors"


def _attention(config: DecoderConfig) -> AttentionConfig | None:
    mixers = [block.mixer for block in config.blocks]
    return next((m for m in mixers if isinstance(m, AttentionConfig)), None)


def _mixers(config: DecoderConfig) -> dict[str, int]:
    """How many blocks have which mixer: ``{"attention": 30}``."""
    return dict(Counter(kind_of(block.mixer) for block in config.blocks))


def _sum(
    config: DecoderConfig | None, size: Callable[[MixerConfig], int]
) -> int | None:
    """Of the mixers of all blocks, if they are known."""
    if config is None:
        return None
    return sum(size(block.mixer) for block in config.blocks if block.mixer is not None)


def _tied(raw: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> bool | None:
    said = raw.get("tie_word_embeddings", raw.get("tie_embedding"))
    if isinstance(said, bool):
        return said
    return not any(name.endswith((HEAD, "output.weight")) for name in infos)


def _mtp_tensors(infos: Mapping[str, TensorInfo], layers: int | None) -> int:
    """Tensors under ``mtp.``, or of layers beyond the model's own."""
    count = 0
    for name in infos:
        layer = re.match(r"(?:model\.(?:language_model\.)?layers|blk)\.(\d+)\.", name)
        beyond = layer is not None and layers is not None and int(layer[1]) >= layers
        count += beyond or name.startswith("mtp.") or ".nextn." in name
    return count


def _integer(raw: Mapping[str, Any], *names: str) -> int | None:
    values = [raw.get(name) for name in names]
    return next((v for v in values if isinstance(v, int)), None)
