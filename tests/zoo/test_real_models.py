"""Models of the zoo: their tokens are transformers', their ids llama.cpp's.

The fixtures hold greedy float32 ids that transformers made once of the same files
(experiments/peers/make_zoo_fixture.py), and what llama.cpp makes of texts
(make_zoo_tokenizer_fixture.py). Where transformers' own margin is below the noise of
float32 sums the argmax may fall either way, and a row is compared up to there.
"""

import functools
import json
from pathlib import Path

import pytest

from specjax.acceptance.greedy import Greedy
from specjax.checkpoints import (
    Checkpoint,
    CheckpointError,
    StreamDecoder,
    describe,
    load,
    prompt_ids,
    zoo,
)
from specjax.checkpoints.gguf_header import read_gguf_header
from specjax.checkpoints.tokenizer_gguf import tokenizer_from_gguf
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.drafters.null import NullDrafter
from specjax.prompts import KINDS, bundled_prompts

DATA = Path(__file__).parents[1] / "data"
STEMS = {"gemma3-270m": "gemma3", "qwen2.5-coder-0.5b": "qwen2.5_coder"}
LONG = "long-01"
SHAPES = {
    "gemma3-270m": ("gemma3_text", 18, 640, 4, 1, 256, 262_144, True, 268_098_176),
    "qwen2.5-coder-0.5b": ("qwen2", 24, 896, 14, 2, 64, 151_936, False, 630_167_424),
    "qwen2.5-coder-1.5b": (
        "qwen2",
        28,
        1536,
        12,
        2,
        128,
        151_936,
        False,
        1_777_088_000,
    ),
}

pytestmark = [pytest.mark.network, pytest.mark.timeout(3600)]
models = pytest.mark.parametrize("name", STEMS)


def file_of(name: str) -> Path:
    try:
        return zoo.weights(name)
    except CheckpointError as error:
        pytest.skip(f"{name} cannot be had here: {error}")


@functools.lru_cache(1)
def loaded(name: str) -> Checkpoint:
    file_of(name)
    return load(name)


def fixture(name: str, kind: str) -> dict:
    return json.loads((DATA / f"{STEMS[name]}_{kind}.json").read_text())


def own_tokenizer(name: str):
    tokenizer = tokenizer_from_gguf(read_gguf_header(file_of(name)))
    assert tokenizer is not None
    tokenizer.template = tokenizer.template or zoo.template(name)
    return tokenizer


@models
def test_texts_are_tokenised_as_llama_cpp_does(name):
    tokenizer = own_tokenizer(name)
    for record in fixture(name, "tokenizer")["texts"]:
        text, ids = record["text"], record["ids"]
        # Qwen's own tokenizer composes characters (NFC) first; llama.cpp does not
        composed = name.startswith("qwen") and "\u0301" in text
        assert (tokenizer.inner.encode(text).ids == ids) is not composed, text
        # in SentencePiece this mark is a space
        back = text.replace("\u2581", " ") if name.startswith("gemma") else text
        assert tokenizer.decode(ids, special=True) == back
        stream = StreamDecoder(tokenizer, special=True)
        assert "".join(stream.push([i]) for i in ids) + stream.flush() == back


@models
def test_prompts_are_tokenised_as_transformers_does(name):
    tokenizer, expected = own_tokenizer(name), fixture(name, "greedy")["prompts"]
    checked = [prompt for prompt in bundled_prompts() if prompt.id in expected]
    assert len(checked) == len(KINDS)
    for prompt in checked:
        assert prompt_ids(prompt, tokenizer) == expected[prompt.id]["prompt_ids"]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    file_of(name)
    d = describe(name)
    family, layers, hidden, heads, kv_heads, head_dim, vocab, tied, size = SHAPES[name]
    assert d.implemented and d.family == family and d.num_layers == layers
    assert (d.hidden_size, d.num_heads, d.num_kv_heads) == (hidden, heads, kv_heads)
    assert (d.head_dim, d.vocab_size, d.tied) == (head_dim, vocab, tied)
    assert d.num_parameters == size
    if family == "gemma3_text":
        # three of eighteen layers keep everything, the others 512 tokens
        assert d.kv_bytes_per_token == 3 * 2 * 2 * 256
        assert d.window_bytes_per_row == 15 * 512 * 2 * 2 * 256


@models
@pytest.mark.parametrize("drafter", [NullDrafter(), NGram(k=4)], ids=["plain", "ngram"])
def test_tokens_are_transformers_own(name, drafter):
    """One prompt of each kind, and one beyond Gemma's sliding windows."""
    recorded = fixture(name, "greedy")
    header, expected = recorded["header"], recorded["prompts"]
    assert header["gguf_sha256"] == zoo.MODELS[name].sha256
    near_tie = 10 * header["largest_logit_difference"]
    names = [f"{kind}-01" for kind in KINDS]
    batches = [names, [LONG]] if LONG in expected else [names]
    accepted = 0
    for batch in batches:
        asked = [
            Request(prompt_ids=expected[n]["prompt_ids"], max_tokens=64) for n in batch
        ]
        engine = Engine(
            loaded(name).decoder, drafter, Greedy(), EngineOptions(max_capacity=1024)
        )
        for n, completion in zip(batch, generate(engine, asked), strict=True):
            assert_same_up_to_a_near_tie(n, completion.ids, expected[n], near_tie)
            accepted += completion.accepted
    assert accepted > 30 or isinstance(drafter, NullDrafter)


def assert_same_up_to_a_near_tie(name, ids, expected, near_tie):
    for place, (mine, theirs) in enumerate(zip(ids, expected["ids"], strict=True)):
        if mine != theirs:
            margin = expected["margin"][place]
            assert margin < near_tie, f"{name}, token {place}: {mine} not {theirs}"
            return
