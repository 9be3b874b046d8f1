"""Tokenizers: ids against llama.cpp's, streaming, chat templates."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.checkpoints import CheckpointError, StreamDecoder, Tokenizer, prompt_ids
from specjax.checkpoints.gguf import GGUFReader
from specjax.checkpoints.gguf_header import GGUFHeader, read_gguf_header
from specjax.checkpoints.tokenizer_files import save_tokenizer, tokenizer_from_folder
from specjax.checkpoints.tokenizer_gguf import tokenizer_from_gguf
from specjax.prompts import Prompt

TEXTS = [
    "",
    "hello 12 a\n",
    "<|im_start|>user\nhello<|im_end|>",
    "a<tool>b",
    "Grüße, 世界! \U0001f44d\U0001f3fd",
    "\x00\x7f\u200b\ufffd",
]


@pytest.fixture
def tokenizer(tiny):
    return tokenizer_from_gguf(read_gguf_header(tiny.gguf()))


def with_metadata(tiny, **changes):
    header = read_gguf_header(tiny.gguf())
    metadata = header.metadata | {
        f"tokenizer.{key}": value for key, value in changes.items()
    }
    metadata = {k: v for k, v in metadata.items() if v is not None}
    return GGUFHeader(header.path, header.version, metadata, {}, {})


def stream(tokenizer, ids, **options):
    decoder = StreamDecoder(tokenizer, **options)
    return [*(decoder.push([i]) for i in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, special=True) == text
    assert "".join(stream(tokenizer, ids, special=True)) == text


def test_special_tokens_are_found_and_left_out(tokenizer):
    ids = tokenizer.encode("<|im_start|>hello<tool><|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert [tokenizer.tokens[i] for i in ids[1:3]] == ["hello", "<tool>"]
    assert tokenizer.decode(ids) == "hello<tool>"


def test_digits_stand_alone(tokenizer):
    """There is a merge of 1 and 2, and the pre-tokenizer keeps it from happening."""
    assert len(tokenizer.encode("12")) == 2


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 1234", ["ab", "Ġ1234"]),
        ("smollm", "ab 1234", ["ab", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "ab 1234\n\n!", ["ab", "Ġ", "123", "4", "ĊĊ", "!"]),
        ("qwen2", "ab 1234\n\n!", ["ab", "Ġ", "1", "2", "3", "4", "ĊĊ", "!"]),
        ("llama-bpe", "it'S-x", ["it", "'S", "-x"]),
        ("gpt-2", "it's-x", ["it", "'s", "-", "x"]),
    ],
)
def test_pre_tokenizers(tiny, pre, text, pieces):
    tokenizer = tokenizer_from_gguf(
        with_metadata(tiny, **{"ggml.pre": pre, "ggml.add_bos_token": False})
    )
    split = tokenizer.inner.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


def test_a_whole_word_of_the_vocabulary_needs_no_merges_in_llama_bpe(tiny):
    header = with_metadata(
        tiny, **{"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}
    )
    header.metadata["tokenizer.ggml.merges"] = []
    assert len(tokenizer_from_gguf(header).encode("hello")) == 1
    header.metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert len(tokenizer_from_gguf(header).encode("hello")) == 5


def test_bos(tiny, tokenizer):
    assert tokenizer.encode("a")[0] != 1
    wanted = tokenizer_from_gguf(with_metadata(tiny, **{"ggml.add_bos_token": True}))
    assert wanted.encode("a")[0] == 1
    assert wanted.chat(["a"]).count(1) == 2  # one a turn: the template's own
    implied = tokenizer_from_gguf(with_metadata(tiny, **{"ggml.pre": "llama-bpe"}))
    assert implied.encode("a")[0] == 1


def test_eos_ids(tiny, tokenizer):
    assert tokenizer.eos_ids == (2,)
    both = tokenizer_from_gguf(with_metadata(tiny, **{"ggml.eot_token_id": 0}))
    assert both.eos_ids == (2, 0)
    with pytest.raises(CheckpointError, match=r"names 9999 as eos id"):
        tokenizer_from_gguf(with_metadata(tiny, **{"ggml.eos_token_id": 9999}))


def test_no_tokenizer(tiny):
    assert tokenizer_from_gguf(with_metadata(tiny, **{"ggml.model": None})) is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("ggml.pre", "deepseek-coder", "'deepseek-coder' is not implemented"),
        ("ggml.pre", None, "pre None is not implemented"),
        ("ggml.model", "bert", "'bert' is not implemented"),
        ("ggml.model", "llama", "scores is no list of 266"),
        ("ggml.tokens", None, "tokens is missing"),
        ("ggml.merges", None, "merges is missing"),
        ("ggml.merges", ["no such"], "the vocabulary is broken"),
        ("ggml.merges", ["nospace"], "the vocabulary is broken"),
        ("ggml.token_type", [1, 2, 3], "token_type is no list of 266"),
        ("ggml.tokens", ["a", "a"], "tokens repeats a token"),
        ("ggml.tokens", ["a", "b"], "token_type is no list of 2"),
    ],
)
def test_what_is_not_known_is_named(tiny, key, value, said):
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf.*({said})"):
        tokenizer_from_gguf(with_metadata(tiny, **{key: value}))


def test_ids_outside_the_vocabulary(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"id {bad} is not in the vocabulary"):
            tokenizer.decode([bad])


class TestStream:
    def test_never_half_a_character(self, tokenizer):
        ids = tokenizer.encode("a\U0001f44db")
        assert len(ids) == 6
        assert stream(tokenizer, ids) == ["a", "", "", "", "\U0001f44d", "b", ""]

    def test_a_cut_character_shows_at_the_end(self, tokenizer):
        ids = tokenizer.encode("a\U0001f44d")[:-1]
        assert stream(tokenizer, ids) == ["a", "", "", "", "\ufffd"]

    def test_broken_bytes_do_not_hold_up_the_text(self, tokenizer):
        broken = tokenizer.encode("\U0001f44d")[-1]  # a continuation byte
        pieces = stream(tokenizer, [broken] * 50)
        assert "".join(pieces) == "\ufffd" * 50
        assert max(map(len, pieces)) <= 3

    def test_several_at_once_and_again_after_a_flush(self, tokenizer):
        decoder = StreamDecoder(tokenizer)
        ids = tokenizer.encode("hello 世界")
        for _ in range(2):
            assert decoder.push(ids[:-1]) + decoder.flush() == "hello 世\ufffd"
            assert decoder.flush() == ""

    @given(data=st.data())
    def test_pieces_are_the_whole(self, data):
        tokenizer = Tokenizer(_inner(), source="test")
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        for special in (False, True):
            whole = tokenizer.decode(ids, special=special)
            pieces = stream(tokenizer, ids, special=special)
            assert "".join(pieces) == whole
            # What was shown never has to be taken back.
            assert all(
                whole.startswith("".join(pieces[:n])) for n in range(len(pieces))
            )

    def test_leading_spaces_of_another_decoder(self):
        """Metaspace drops the space of the first word and of no other."""
        import tokenizers

        words = {"▁one": 0, "▁two": 1, "x": 2, "<unk>": 3}
        inner = tokenizers.Tokenizer(
            tokenizers.models.WordLevel(words, unk_token="<unk>")
        )
        inner.decoder = tokenizers.decoders.Metaspace()
        tokenizer = Tokenizer(inner, source="test")
        assert stream(tokenizer, [0, 1, 2, 0]) == ["one", " two", "x", " one", ""]


def _inner():
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {piece: i for i, piece in enumerate(["<s>", *alphabet, "ðŁ", "ĳį", "Ġa"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken("<s>", special=True)])
    return inner


class TestChat:
    def test_turns(self, tokenizer):
        text = tokenizer.render(["hello", {"role": "assistant", "content": "a"}, "b"])
        assert text == (
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.chat(["hello"])[0] == 1

    def test_prompts(self, tokenizer):
        raw = Prompt("a", "user", "hello", ())
        turns = Prompt("b", "user", None, ("hello",))
        assert prompt_ids(raw, tokenizer) == tokenizer.encode("hello")
        assert prompt_ids(turns, tokenizer) == tokenizer.chat(["hello"])

    def test_no_template(self, tiny):
        tokenizer = tokenizer_from_gguf(with_metadata(tiny, chat_template=None))
        with pytest.raises(CheckpointError, match=r"tiny\.gguf has no chat template"):
            tokenizer.chat(["hello"])

    def render(self, template, turns=("hi",)):
        tokens = {"bos_token": "<s>"}
        return Tokenizer(
            _inner(), source="x", special_tokens=tokens, template=template
        ).render(turns)

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            ("{{ bos_token }}{{ messages[0]['content'] }}", "<s>hi"),
            ("{% if true %}\n  a\n{% endif %}\n", "  a\n"),  # trim and lstrip
            ("   {% set x = 1 %}\n{{ x }}", "1"),
            (
                "{% for i in [1, 2, 3] %}{% if i > 2 %}{% break %}{% endif %}."
                "{% endfor %}",
                "..",
            ),
            ("{{ {'a': '<ü>'} | tojson }}", '{"a": "<ü>"}'),
            ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
            ("{% generation %}a{% set x = 1 %}{% endgeneration %}b", "ab"),
            ("{{ strftime_now('%Y') | length }}", "4"),
            ("{{ tools is none }} {{ add_generation_prompt }}", "True True"),
            ("{{ eos_token is defined }}", "False"),
        ],
    )
    def test_what_templates_may_use(self, template, text):
        assert self.render(template) == text

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages.append(1) }}", "refuses"),
            ("{{ ''.__class__.__mro__ }}", "refuses"),
            ("{{ messages[7].content.x }}", "refuses"),
            ("{{ 1 + 'a' }}", "refuses"),
            ("{% if %}", "is broken"),
        ],
    )
    def test_what_templates_refuse(self, template, said):
        with pytest.raises(CheckpointError, match=rf"template of x .*{said}"):
            self.render(template)

    def test_no_turns(self):
        with pytest.raises(CheckpointError, match="at least one turn"):
            self.render("x", [])


class TestFolder:
    def test_same_as_from_gguf(self, tiny, tokenizer):
        folder = tokenizer_from_folder(tiny.directory(tokenizer=True))
        assert folder.tokens == tokenizer.tokens
        assert folder.eos_ids == tokenizer.eos_ids
        assert folder.render(["hello"]) == tokenizer.render(["hello"])
        for text in TEXTS:
            assert folder.encode(text) == tokenizer.encode(text)

    def test_saved_and_read_again(self, tiny, tmp_path):
        for bos in (False, True):
            first = tokenizer_from_gguf(
                with_metadata(tiny, **{"ggml.add_bos_token": bos})
            )
            save_tokenizer(first, tmp_path)
            again = tokenizer_from_folder(tmp_path)
            assert (again.bos_id, again.eos_ids) == (first.bos_id, first.eos_ids)
            assert again.special_tokens == first.special_tokens
            assert again.tokens == first.tokens
            assert again.chat(["hello 12"]) == first.chat(["hello 12"])
            for text in TEXTS:
                assert again.encode(text) == first.encode(text)

    def test_eos_ids_come_from_the_generation_config_first(self, tiny):
        path = tiny.directory(tokenizer=True)
        assert tokenizer_from_folder(path).eos_ids == (2,)
        tiny.write(path / "generation_config.json", {"eos_token_id": [0, 2]})
        assert tokenizer_from_folder(path).eos_ids == (0, 2)
        (path / "config.json").unlink()
        tiny.write(path / "generation_config.json", {})
        assert tokenizer_from_folder(path).eos_ids == (2,)  # eos_token, by its name

    def test_bos_of_the_post_processor_or_by_flag(self, tiny):
        import tokenizers

        path = tiny.directory(tokenizer=True)
        inner = tiny.inner_tokenizer()
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
        inner.enable_padding(length=64)  # training settings are no business of ours
        inner.save(str(path / "tokenizer.json"))
        assert len(tokenizer_from_folder(path).encode("a")) == 2
        settings = json.loads((path / "tokenizer_config.json").read_text())
        tiny.write(path / "tokenizer_config.json", settings | {"add_bos_token": False})
        assert len(tokenizer_from_folder(path).encode("a")) == 1

    def test_templates_in_the_config(self, tiny):
        path = tiny.directory(tokenizer=True)
        named = [{"name": n, "template": n} for n in ("default", "tool_use")]
        settings = json.loads((path / "tokenizer_config.json").read_text())
        for value, text in [(named, "default"), ("one", "one")]:
            tiny.write(
                path / "tokenizer_config.json", settings | {"chat_template": value}
            )
            assert tokenizer_from_folder(path).render(["a"]).startswith("<|im_start|>")
            file = (path / "chat_template.jinja").rename(path / "off")
            assert tokenizer_from_folder(path).render(["a"]) == text
            file.rename(path / "chat_template.jinja")

    def test_no_tokenizer(self, tiny):
        assert tokenizer_from_folder(tiny.directory()) is None

    def test_another_kind(self, tiny):
        path = tiny.directory()
        (path / "tokenizer.model").write_bytes(b"x")
        with pytest.raises(CheckpointError, match=r"tokenizer\.model.*tokenizer=False"):
            tokenizer_from_folder(path)

    @pytest.mark.parametrize("text", ["", "{}", "{", '{"model": {"type": "X"}}'])
    def test_a_broken_file(self, tiny, text):
        path = tiny.directory()
        (path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
            tokenizer_from_folder(path)


def test_reader_and_tokenizer_agree_on_the_vocabulary(tiny, tokenizer):
    assert tokenizer.vocab_size <= GGUFReader(tiny.gguf("b.gguf")).config["vocab_size"]
