"""The pieces of a streamed text."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.checkpoints import Tokenizer
from specjax.cli.stream import TextStream
from specjax.decoding.generate import Completion, Round
from specjax.decoding.types import FinishReason


@pytest.fixture
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, source="test")


def completion(tokenizer, ids, *, text=None, drafted=()):
    rounds = tuple(Round(1, 1, 1) if i in drafted else Round(0, 0, 1) for i in ids)
    text = tokenizer.decode(ids) if text is None else text
    return Completion((0,), tuple(ids), text, FinishReason.NONE, rounds, None)


def test_a_character_of_several_tokens_is_shown_whole(tokenizer):
    ids = tokenizer.encode("a€😀é")
    stream = TextStream(tokenizer, colour=False)
    pieces = [stream.push(completion(tokenizer, ids[: n + 1])) for n in range(len(ids))]
    assert "".join(pieces) == "a€😀é"
    assert [piece for piece in pieces if piece] == ["a", "€", "😀", "é"]
    assert stream.finish(completion(tokenizer, ids)) == ""


def test_a_character_that_is_cut_shows_at_the_end(tokenizer):
    ids = tokenizer.encode("a€")[:-1]
    stream = TextStream(tokenizer, colour=False)
    shown = stream.push(completion(tokenizer, ids))
    assert shown == "a"
    rest = stream.finish(completion(tokenizer, ids))
    assert shown + rest == tokenizer.decode(ids)


def test_no_half_of_a_stop_text_is_shown(tokenizer):
    ids = tokenizer.encode("one END")
    stream = TextStream(tokenizer, ["END", "x"], colour=False)
    shown = ""
    for n in range(1, len(ids)):
        shown += stream.push(completion(tokenizer, ids[:n]))
        assert "one ".startswith(shown)
    shown += stream.push(completion(tokenizer, ids, text="one "))
    shown += stream.finish(completion(tokenizer, ids, text="one "))
    assert shown == "one "


def test_only_accepted_drafts_are_coloured(tokenizer):
    a, b, c = tokenizer.encode("abc")
    stream = TextStream(tokenizer, colour=True)
    shown = stream.push(completion(tokenizer, [a, b, c], drafted={b}))
    assert shown == "a\x1b[32mb\x1b[0mc"


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer):
    a = tokenizer.encode("a")[0]
    stream = TextStream(tokenizer, colour=False)
    assert stream.push(completion(tokenizer, [a, 300, a], text="aa")) == "aa"
