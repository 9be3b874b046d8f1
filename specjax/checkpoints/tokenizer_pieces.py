"""SentencePiece vocabularies of GGUF files (``tokenizer.ggml.model`` is ``llama``).

The pieces are those of byte-pair encoding: the two neighbours that make the piece of
the highest score become one. The file holds scores and no merges, so the merges are
worked out here, as converters to ``tokenizer.json`` do. A character that is no piece
becomes its bytes, and a space is written as ``▁``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
"""Values of ``tokenizer.ggml.token_type``."""

SPACE = "\u2581"


def pieces_tokenizer(
    strings: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    *,
    unknown: str | None,
    leading_space: bool,
) -> tokenizers.Tokenizer:
    """A tokenizer of these pieces.

    ``leading_space``: a space is put before a text that begins, or goes on after a
    piece found whole (control or user-defined), and the first one of a decoded text is
    taken away.
    """
    vocabulary = {string: index for index, string in enumerate(strings)}
    normal = {
        string: score
        for string, kind, score in zip(strings, kinds, scores, strict=True)
        if kind == NORMAL
    }
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_of(normal, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    written = normalizers.Replace(" ", SPACE)
    prefix = normalizers.Prepend(SPACE)
    inner.normalizer = (
        normalizers.Sequence([prefix, written]) if leading_space else written
    )
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if leading_space:
        parts.append(decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(parts)
    inner.add_tokens(
        [
            AddedToken(string, special=kind == CONTROL, normalized=False)
            for string, kind in zip(strings, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return inner


def merges_of(
    scores: Mapping[str, float], ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges that make each piece, of higher scores first.

    Where a piece can be made of several pairs, the one with the longer left part comes
    first: among equals SentencePiece merges what stands further left.
    """
    merges: list[tuple[str, str]] = []
    for piece in sorted(scores, key=lambda piece: (-scores[piece], ids[piece])):
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges
