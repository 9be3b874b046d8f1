"""Log-probabilities, ends and counters under rules that keep the law alone."""

import jax
import numpy as np
import pytest

from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.trees import full
from specjax.decoding.types import FinishReason
from specjax.drafters import DraftModel
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick
from specjax.testing.markov import markov

TARGET, DRAFT, EOS, TOKENS = markov(0, 9), markov(0, 9), 4, 8
DRAFTERS = {
    "block": DraftModel(DRAFT, 3, pick=Pick.DRAWN),
    "traversal": DraftTree(DRAFT, full((2, 2)), Siblings.INDEPENDENT),
    "without-replacement": DraftTree(
        DRAFT, full((2, 1, 1)), Siblings.WITHOUT_REPLACEMENT
    ),
    "deterministic-children": DraftTree(DRAFT, full((3, 1))),
    "lossy-typical": DraftTree(DRAFT, full((3, 1))),
}


@pytest.mark.parametrize(
    "rule",
    ["traversal", *(pytest.param(r, marks=pytest.mark.full) for r in DRAFTERS)],
)
def test_what_is_reported_is_the_targets_own_and_ends_where_the_ids_end(rule):
    drafter = DRAFTERS[rule]
    options = EngineOptions(eos_ids=(EOS,), top_logprobs=2, prefill_width=4)
    engine = Engine(TARGET, drafter, RULES[rule].build(), options)
    requests = [
        Request(
            prompt_ids=(1, 2 + row % 2), max_tokens=TOKENS, temperature=0.9, seed=row
        )
        for row in range(24)
    ]
    rows = generate(engine, requests)
    law = np.asarray(jax.nn.log_softmax(TARGET.table, axis=-1))
    assert {row.finish_reason for row in rows} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    assert sum(row.accepted for row in rows) > 0
    for row in rows:
        stopped = row.finish_reason is FinishReason.STOP
        assert (EOS in row.ids) == stopped and row.ids.count(EOS) <= 1
        assert row.ids[-1] == EOS if stopped else len(row.ids) == TOKENS
        assert row.logprobs is not None and len(row.logprobs) == len(row.ids)
        before = (row.prompt_ids[-1], *row.ids)
        for last, token, told in zip(before, row.ids, row.logprobs, strict=False):
            assert told.logprob == pytest.approx(law[last, token], abs=1e-5)
            order = np.argsort(-law[last], kind="stable")[:2]
            assert [i for i, _ in told.top] == order.tolist()
        assert sum(r.committed for r in row.rounds) == len(row.ids)
        for r in row.rounds:
            assert r.accepted <= min(r.drafted, r.committed, drafter.max_depth)
            assert r.drafted <= drafter.max_nodes
