"""The real model: SmolLM2's tokens are transformers' and an independent reference's.

The fixture holds greedy float32 ids that transformers made once from the same weights
(experiments/peers/make_greedy_fixture.py). Where transformers' own margin is below the
noise of float32 sums the argmax may fall either way, and a row is compared up to there.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from specjax.acceptance.coupled import Coupled
from specjax.acceptance.greedy import Greedy
from specjax.checkpoints import CheckpointError, load, prompt_ids
from specjax.checkpoints.gguf import GGUFReader
from specjax.checkpoints.load import resolve
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.drafters.null import NullDrafter
from specjax.prompts import KINDS, bundled_prompts
from specjax.testing.reference import Settings, rescore

FIXTURE = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"
NEAR_TIE = 1e-3
"""Logit gap that float32 rounding can close: ten times the largest difference between
transformers' own cached and uncached runs (8.9e-5, in the fixture's header)."""
NEW = 64


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


@pytest.fixture(scope="module")
def fixture():
    return json.loads(FIXTURE.read_text())["prompts"]


def requests(fixture, names, **settings):
    return [
        Request(prompt_ids=fixture[name]["prompt_ids"], max_tokens=NEW, **settings)
        for name in names
    ]


def assert_same_up_to_a_near_tie(ids, expected):
    for place, (mine, theirs) in enumerate(zip(ids, expected["ids"], strict=True)):
        if mine != theirs:
            margin = expected["margin"][place]
            assert margin < NEAR_TIE, f"token {place}: {mine} != {theirs}, {margin=}"
            return


@pytest.mark.timeout(600)
def test_speculation_gives_transformers_ids_on_one_prompt_of_each_kind(
    smollm2, fixture
):
    names = [f"{kind}-01" for kind in KINDS]
    engine = Engine(smollm2.decoder, NGram(k=5), Greedy())
    completions = generate(engine, requests(fixture, names))
    for name, completion in zip(names, completions, strict=True):
        assert_same_up_to_a_near_tie(completion.ids, fixture[name])
    # a drafter that never agreed would prove nothing about accepted drafts
    assert sum(c.accepted for c in completions) > 50


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_numpy_reference_chooses_every_sampled_token(smollm2, fixture):
    options = EngineOptions(max_capacity=512)
    request = requests(fixture, ["edit-01"], temperature=0.8, top_p=0.95, seed=11)[0]
    engine = Engine(smollm2.decoder, NGram(k=5, min_n=1), Coupled(), options)
    (completion,) = generate(engine, [request])
    reader = GGUFReader(resolve("smollm2-135m"))
    tensors = {name: reader.convert(name) for name in reader.infos}
    score = rescore(
        tensors,
        smollm2.raw_config,
        request.prompt_ids,
        completion.ids,
        Settings(temperature=0.8, top_p=0.95),
        seed=request.seed,
    )
    assert score.agrees(NEAR_TIE), score.first_difference
    assert completion.accepted > 0


def test_bundled_prompts_are_tokenised_as_transformers_does(smollm2, fixture):
    for prompt in bundled_prompts():
        ids = prompt_ids(prompt, smollm2.tokenizer)
        assert ids == fixture[prompt.id]["prompt_ids"], prompt.id


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_every_bundled_prompt_plain_and_speculative(smollm2, fixture, kind):
    names = [name for name in fixture if name.startswith(kind)]
    options = EngineOptions(max_capacity=512)
    asked = requests(fixture, names)
    arms = [NullDrafter(), NGram(k=5)]
    for drafter in arms:
        engine = Engine(smollm2.decoder, drafter, Greedy(), options)
        for name, completion in zip(names, generate(engine, asked), strict=True):
            assert_same_up_to_a_near_tie(completion.ids, fixture[name])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_sampled_run_is_the_same_with_and_without_drafts(smollm2, fixture):
    names = [f"{kind}-02" for kind in KINDS]
    options = EngineOptions(max_capacity=512)
    asked = requests(fixture, names, temperature=0.8, seed=5)
    plain = generate(Engine(smollm2.decoder, NullDrafter(), Coupled(), options), asked)
    for k in (2, 8):
        engine = Engine(smollm2.decoder, NGram(k=k, min_n=1), Coupled(), options)
        drafted = generate(engine, asked)
        assert [c.ids for c in drafted] == [c.ids for c in plain]
    assert np.mean([len(c.ids) for c in plain]) == NEW
