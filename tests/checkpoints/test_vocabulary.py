"""What tokens spell, in vocabularies of both kinds."""

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.vocabulary import spellings, vocabulary_between


def byte_level() -> Tokenizer:
    words = ["Ġthe", "the", "Ċ", "Ã©", "t", "h", "e", "Ġ", "<s>"]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(inner, source="here", eos_ids=[9])


def sentence_pieces() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", "▁the", "the", "é", "<0x0A>", "▁", "th", "e"]
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [AddedToken(w, special=True) for w in ("<unk>", "<s>", "</s>")]
    inner.add_special_tokens(special)
    return Tokenizer(inner, source="there", eos_ids=[2])


def test_both_kinds_spell_the_same_bytes():
    got = spellings(byte_level())
    assert got[:4] == (b" the", b"the", b"\n", "é".encode())
    assert got[7:] == (b" ", b"<s>", ("special", "<|end|>"))
    got = spellings(sentence_pieces())
    assert got[:3] == tuple(("special", w) for w in ("<unk>", "<s>", "</s>"))
    assert got[3:] == (b" the", b"the", "é".encode(), b"\n", b" ", b"th", b"e")


def test_the_maps_between_them():
    ours, theirs = byte_level(), sentence_pieces()
    got = vocabulary_between(ours, theirs, 12, 10)
    # "t", "h" and the text "<s>" are not there; the ends of text are one another
    assert got.said.tolist() == [3, 4, 6, 5, -1, -1, 9, 7, -1, 2, -1, -1]
    fed = got.fed.tolist()
    assert fed[:4] == [3, 4, 6, 5] and fed[9] == 2
    assert fed[10:] == [2, 2]  # padding: an end of text
    back = vocabulary_between(theirs, ours, 10, 12)
    assert back.said.tolist() == [-1, -1, 9, 0, 1, 3, 2, 7, -1, 6]
    assert back.fed.tolist()[8] == 5  # "th" is spelled "t", "h"
