"""Runs that are cut off and taken up again: the same tokens, figures and state."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax.acceptance import Block, Coupled, Greedy, without_replacement
from specjax.checkpoints.orbax import StepStore, describe_run, new_run, resume_run
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Generation
from specjax.decoding.loop import run_rounds
from specjax.decoding.requests import Request, RequestError
from specjax.decoding.trees import full
from specjax.decoding.types import FinishReason
from specjax.drafters import (
    DRAFTERS,
    DrafterOptions,
    DraftModel,
    DraftTree,
    HeadChain,
    NGram,
    NullDrafter,
)
from specjax.drafters.draft_tree import Siblings
from specjax.drafters.drawing import Pick
from specjax.testing.markov import markov
from specjax.testing.toy_blocks import toy_block
from specjax.testing.toy_mtp import toy_mtp
from specjax.testing.toys import toy_hybrid, toy_llama

OPTIONS = EngineOptions(rounds_per_call=2, prefill_width=4)
VOCAB = 12


def spell(ids) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def requests(**more) -> list[Request]:
    """Rows of other lengths, seeds and ends."""
    settings = {"temperature": 0.9} | more
    return [
        Request(
            prompt_ids=(1, 2, 3, 1, 2, row + 1),
            max_tokens=14 + 3 * row,
            seed=row,
            **settings,
        )
        for row in range(3)
    ]


def table_engine(**changes) -> Engine:
    parts = {
        "target": markov(0, VOCAB),
        "drafter": DraftModel(markov(1, VOCAB), 3),
        "rule": Coupled(),
        "options": OPTIONS,
    }
    return Engine(**parts | changes)


def mtp_engine() -> Engine:
    toy = toy_hybrid()
    drafter = HeadChain(toy_mtp(toy)[0], 3, pick=Pick.DRAWN)
    return Engine(toy.decoder, drafter, Block(), OPTIONS)


def block_engine() -> Engine:
    target = toy_llama().decoder
    part = toy_block("dflash", target)
    drafter = DRAFTERS["dflash"].build(DrafterOptions(k=3, part=part))
    return Engine(target, drafter, Coupled(), OPTIONS)


def decode(generation) -> Generation:
    for _ in generation:
        pass
    return generation


def cut_off(folder, engine, rows, *, steps, every=4, detokenize=None) -> None:
    """Decode some calls of a run that is kept, and no more."""
    with new_run(folder, describe_run(engine, rows)) as run:
        generation = Generation(engine, rows, detokenize=detokenize)
        saving = run.saving(generation, every)
        for _ in range(steps):
            next(saving)


def go_on(folder, engine, rows, *, detokenize=None, start=None) -> Generation:
    """To the end, in the same folder."""
    start = engine.start(rows) if start is None else start
    with resume_run(folder, describe_run(engine, rows)) as run:
        snapshot = run.restore(start)
        generation = Generation(engine, rows, detokenize=detokenize, resume=snapshot)
        for _ in run.saving(generation, 4):
            pass
    return generation


def same_end(a: Generation, b: Generation) -> None:
    assert a.completions == b.completions
    assert a.snapshot.rounds == b.snapshot.rounds
    leaves, others = jax.tree.leaves(a.final_state), jax.tree.leaves(b.final_state)
    for x, y in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


CASES = {
    "table, draft model": lambda: (table_engine(), requests()),
}

MORE = {
    "hybrid, plain, penalties": lambda: (
        Engine(
            toy_hybrid(
                num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
            ).decoder,
            NullDrafter(),
            Coupled(),
            dataclasses.replace(OPTIONS, top_logprobs=2),
        ),
        requests(repetition_penalty=1.2),
    ),
    "table, plain, greedy": lambda: (
        table_engine(drafter=NullDrafter(), rule=Greedy()),
        requests(temperature=0.0),
    ),
    "hybrid, n-gram, cut-offs, logprobs": lambda: (
        Engine(
            toy_hybrid().decoder,
            NGram(3, 1, 2),
            Coupled(),
            dataclasses.replace(OPTIONS, top_logprobs=2),
        ),
        requests(top_p=0.9, top_k=30, presence_penalty=0.3),
    ),
    "table, drawn drafts, block": lambda: (
        table_engine(
            drafter=DraftModel(markov(1, VOCAB), 3, pick=Pick.DRAWN), rule=Block()
        ),
        requests(temperature=1.0, logit_bias={3: -2.0}),
    ),
    "llama, draft model": lambda: (
        Engine(
            toy_llama().decoder, DraftModel(toy_llama(1).decoder, 3), Coupled(), OPTIONS
        ),
        requests(min_p=0.05),
    ),
    "hybrid, its MTP head, drawn": lambda: (mtp_engine(), requests(temperature=1.0)),
    "llama, a block head": lambda: (block_engine(), requests()),
    "hybrid, tree, without replacement": lambda: (
        Engine(
            toy_hybrid().decoder,
            DraftTree(toy_llama(1).decoder, full((2, 2)), Siblings.WITHOUT_REPLACEMENT),
            without_replacement(),
            OPTIONS,
        ),
        requests(frequency_penalty=0.3),
    ),
}


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)],
)
def test_a_run_goes_on_as_if_it_had_not_been_cut_off(case, tmp_path):
    engine, rows = (CASES | MORE)[case]()
    expected = decode(Generation(engine, rows))
    programs = run_rounds._cache_size()
    cut_off(tmp_path, engine, rows, steps=3)  # six rounds, of which four are kept
    resumed = go_on(tmp_path, engine, rows)
    same_end(resumed, expected)
    assert run_rounds._cache_size() == programs, "the restored state was compiled for"
    # a run that has ended is there to be read
    again = go_on(tmp_path, engine, rows)
    assert again.completions == expected.completions


def test_every_state_of_a_hybrid_is_kept(tmp_path):
    engine = Engine(
        toy_hybrid().decoder, DraftModel(toy_llama(1).decoder, 3), Coupled(), OPTIONS
    )
    rows = requests(repetition_penalty=1.2)
    draw = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jax.numpy.asarray(draw.integers(0, 2, x.shape), x.dtype),
        engine.start(rows),
    )
    with StepStore(tmp_path) as store:
        store.save(0, state, None)
        found = store.restore(engine.start(rows))
    assert jax.tree.structure(found.tree) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(found.tree), jax.tree.leaves(state), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_text_and_stop_strings_go_on_too(tmp_path):
    engine = table_engine()
    free = decode(Generation(engine, requests(), detokenize=spell))
    texts = [row.text for row in free.completions]
    # one row stops before it is cut off, another one after, a third never
    rows = [
        dataclasses.replace(request, stop=stop)
        for request, stop in zip(
            requests(), (texts[0][3:5], texts[1][-3:], "zz"), strict=True
        )
    ]
    expected = decode(Generation(engine, rows, detokenize=spell))
    reasons = [row.finish_reason for row in expected.completions]
    assert reasons[:2] == [FinishReason.STOP_STRING] * 2
    steps = 3
    cut_off(tmp_path, engine, rows, steps=steps, detokenize=spell)
    resumed = go_on(tmp_path, engine, rows, detokenize=spell)
    assert resumed.completions == expected.completions


def test_a_snapshot_is_of_one_run(tmp_path):
    engine, rows = table_engine(), requests()
    generation = Generation(engine, rows)
    next(iter(generation))
    others = [dataclasses.replace(row, prompt_ids=(1, 1)) for row in rows]
    wrong = Generation(engine, others, resume=generation.snapshot)
    with pytest.raises(RequestError, match="prompt_ids"):
        next(iter(wrong))


def test_the_interval_is_met_and_seconds_add_up(tmp_path):
    engine, rows = table_engine(), requests()
    with new_run(tmp_path, describe_run(engine, rows), keep=99) as run:
        generation = Generation(engine, rows)
        for _ in run.saving(generation, 4):
            pass
    last = generation.snapshot.rounds
    steps = sorted(int(p.name) for p in (tmp_path / "steps").iterdir())
    assert steps == [*range(4, last, 4), last]
    with resume_run(tmp_path, describe_run(engine, rows)) as run:
        snapshot = run.restore(engine.start(rows))
    assert snapshot.times == generation.times
