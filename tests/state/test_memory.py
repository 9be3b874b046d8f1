"""Choosing a rollback strategy changes the state and nothing else."""

import jax
import numpy as np
import pytest

from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.pairs import PairError
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.models.memory import STRATEGIES, with_recurrence
from specjax.models.recurrence import Snapshot
from specjax.testing.toys import toy_hybrid, toy_llama

REQUEST = Request(prompt_ids=[5, 6, 7, 5, 6, 7, 5], max_tokens=16, temperature=0.7)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ring", marks=pytest.mark.full),
        pytest.param("snapshot", marks=pytest.mark.full),
        pytest.param("ring-bfloat16", marks=pytest.mark.full),
    ],
)
def test_tokens_are_the_same_by_every_strategy(name):
    outputs = []
    for strategy in ("replay", name):
        decoder = with_recurrence(toy_hybrid().decoder, STRATEGIES[strategy])
        engine = Engine(
            decoder,
            NGram(k=4, min_n=1),
            RULES["coupled"].build(),
            EngineOptions(prefill_width=8, widths=(5,)),
        )
        outputs.append(generate(engine, [REQUEST])[0].ids)
        recurrent = [
            b.mixer for b in decoder.config.blocks if hasattr(b.mixer, "recurrence")
        ]
        assert [c.recurrence for c in recurrent] == [STRATEGIES[strategy]] * 2
    assert outputs[0] == outputs[1]


def test_parameters_stay_and_decoders_without_recurrence_too():
    before = toy_hybrid().decoder
    after = with_recurrence(before, STRATEGIES["ring"])
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    llama = toy_llama().decoder
    assert with_recurrence(llama, STRATEGIES["ring"]).config == llama.config


def test_a_window_wider_than_its_snapshots_is_refused():
    decoder = with_recurrence(toy_hybrid().decoder, Snapshot(rows=4))
    assert decoder.widest == 4 and toy_llama().decoder.widest is None
    Engine(decoder, NGram(k=3), RULES["greedy"].build())
    with pytest.raises(PairError, match=r"4 drafts has 5 rows.*Snapshot\(rows=4\)"):
        Engine(decoder, NGram(k=4), RULES["greedy"].build())
