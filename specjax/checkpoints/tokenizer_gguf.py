"""Making a ``Tokenizer`` from GGUF metadata, with the ``tokenizers`` library alone.

The file names its pre-tokenizer (``tokenizer.ggml.pre``) without saying what it does:
the rules are written down here, one line a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import id_list
from specjax.checkpoints.gguf import metadata_eos_ids
from specjax.checkpoints.gguf_header import GGUFHeader
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.tokenizer_pieces import (
    CONTROL,
    USER_DEFINED,
    pieces_tokenizer,
)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORDS.format(digits=digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
    ),
}
"""By ``tokenizer.ggml.pre``."""


def tokenizer_from_gguf(header: GGUFHeader) -> Tokenizer | None:
    """The file's tokenizer, or ``None`` if it has none.

    Raises ``CheckpointError`` naming the kind, if it is not implemented.
    """
    metadata, path = header.metadata, header.path
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    if not isinstance(model, str) or model not in _KINDS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model {model!r} is not implemented (known: "
            f"{', '.join(_KINDS)}); load with tokenizer=False, or use the safetensors "
            "checkpoint"
        )
    strings = _strings(header, "tokenizer.ggml.tokens")
    if len(set(strings)) != len(strings):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens repeats a token")
    special = _special_tokens(metadata, strings)
    try:
        inner = _KINDS[model](header, strings, special)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: the vocabulary is broken ({error})") from error
    return Tokenizer(
        inner,
        source=str(path),
        bos_id=_leading_bos(header),
        eos_ids=metadata_eos_ids(header),
        special_tokens=special,
        template=_template(header),
    )


def _byte_level(
    header: GGUFHeader, strings: list[str], special: dict[str, str]
) -> tokenizers.Tokenizer:
    """Byte-pair encoding of bytes, ``gpt2``."""
    pre = header.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.pre {pre!r} is not implemented (known: "
            f"{', '.join(PRE_TOKENIZERS)}); load with tokenizer=False, or use the "
            "safetensors checkpoint"
        )
    kinds = _numbers(header, "token_type", len(strings), [1] * len(strings))
    vocabulary = {string: index for index, string in enumerate(strings)}
    merges = _strings(header, "tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    model = models.BPE(
        vocab=vocabulary,
        merges=pairs,  # type: ignore[arg-type]
        ignore_merges=pre == "llama-bpe",
    )
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()  # as Qwen's own tokenizer has it
    # Both kinds are found in text before it is split; only control tokens are special,
    # that is, left out of decoded text.
    inner.add_tokens(
        [
            AddedToken(string, special=kind == CONTROL, normalized=False)
            for string, kind in zip(strings, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return inner


def _pieces(
    header: GGUFHeader, strings: list[str], special: dict[str, str]
) -> tokenizers.Tokenizer:
    """SentencePiece, ``llama``."""
    count = len(strings)
    return pieces_tokenizer(
        strings,
        _numbers(header, "token_type", count),
        _numbers(header, "scores", count),
        unknown=special.get("unk_token"),
        leading_space=header.metadata.get("tokenizer.ggml.add_space_prefix", True),
    )


_KINDS = {"gpt2": _byte_level, "llama": _pieces}
"""By ``tokenizer.ggml.model``."""


def _numbers(
    header: GGUFHeader, key: str, count: int, default: list[Any] | None = None
) -> list[Any]:
    value = header.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, list) or len(value) != count:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.{key} is no list of {count}, one a token"
        )
    return value


def _strings(header: GGUFHeader, key: str) -> list[str]:
    value = header.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise CheckpointError(f"{header.path}: {key} is missing or no list of strings")
    return value


def _template(header: GGUFHeader) -> str | None:
    value = header.metadata.get("tokenizer.chat_template")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{header.path}: tokenizer.chat_template is no text")
    return value


def _leading_bos(header: GGUFHeader) -> int | None:
    """The bos id if texts begin with it; two kinds imply that unless it is denied."""
    metadata = header.metadata
    implied = (
        metadata.get("tokenizer.ggml.model") == "llama"
        or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    if not metadata.get("tokenizer.ggml.add_bos_token", implied):
        return None
    bos = id_list(metadata.get("tokenizer.ggml.bos_token_id"), f"{header.path}, bos id")
    if not bos:
        raise CheckpointError(
            f"{header.path} wants a bos token first but has no bos_token_id"
        )
    return bos[0]


def _special_tokens(metadata: dict[str, Any], strings: list[str]) -> dict[str, str]:
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {}
    for key, role in roles.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and 0 <= index < len(strings):
            found[f"{role}_token"] = strings[index]
    return found
