"""What tokens spell, so that two tokenizers' vocabularies can be matched."""

from __future__ import annotations

import json
from collections.abc import Hashable

from tokenizers.pre_tokenizers import ByteLevel

from specjax.checkpoints.tokenizer import Tokenizer
from specjax.drafters.vocabulary import Vocabulary, match

SPACE = "\u2581"
"""What stands for a space in vocabularies of SentencePiece's kind."""


def spellings(tokenizer: Tokenizer) -> tuple[Hashable | None, ...]:
    """What each id stands for: bytes of text, or the name of a special token.

    ``None`` for a gap. Byte-level vocabularies and those of SentencePiece's kind write
    the same bytes differently; here they are the same.
    """
    inner = tokenizer.inner
    special = {i for i, t in inner.get_added_tokens_decoder().items() if t.special}
    added = set(inner.get_added_tokens_decoder())
    letters = _byte_letters() if _is_byte_level(tokenizer) else {}
    fallback = tokenizer._byte_pieces
    found: list[Hashable | None] = []
    for index, token in enumerate(tokenizer.tokens):
        if token is None:
            found.append(None)
        elif index in special:
            found.append(("special", token))
        elif index in fallback:
            found.append(bytes([fallback[index]]))
        elif index not in added and letters and all(c in letters for c in token):
            found.append(bytes(letters[c] for c in token))
        else:
            text = token if letters else token.replace(SPACE, " ")
            found.append(text.encode("utf-8", "surrogatepass"))
    return tuple(found)


def vocabulary_between(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int
) -> Vocabulary:
    """How the target's ids read in a draft model's vocabulary.

    Ends of text match by their role. A token that the draft model does not have is fed
    to it as the last token of how it would spell it, and a special one as its end of
    text. Raises ``ValueError`` if nothing matches.
    """
    ours, theirs = spellings(target), spellings(draft)
    known = set(theirs)
    lost = {
        i: spelled.decode("utf-8", "replace")
        for i, spelled in enumerate(ours[:target_size])
        if isinstance(spelled, bytes) and spelled not in known
    }
    encoded = draft.inner.encode_batch(list(lost.values()), add_special_tokens=False)
    stand_ins = {
        i: code.ids[-1]
        for i, code in zip(lost, encoded, strict=True)
        if code.ids and code.ids[-1] < draft_size
    }
    same = list(zip(target.eos_ids[:1], draft.eos_ids[:1], strict=False))
    if target.bos_id is not None and draft.bos_id is not None:
        # first, for where one token is both: the end is what must be said
        same.insert(0, (target.bos_id, draft.bos_id))
    return match(
        ours,
        theirs,
        target_size,
        draft_size,
        same=same,
        stand_ins=stand_ins,
        stand_in=next(iter(draft.eos_ids), 0),
    )


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether characters of the vocabulary stand for bytes."""
    parts = json.loads(tokenizer.inner.to_str())
    return "ByteLevel" in json.dumps([parts.get("decoder"), parts.get("pre_tokenizer")])


def _byte_letters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves; the other bytes, in order, for
    the characters from U+0100 on.
    """
    letters = set(ByteLevel.alphabet())
    own = {chr(byte): byte for byte in range(256) if chr(byte) in letters}
    rest = [byte for byte in range(256) if byte not in own.values()]
    return own | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
