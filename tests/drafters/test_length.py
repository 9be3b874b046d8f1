"""How long a draft gets: decided before its tokens are drawn, and worth its passes."""

import numpy as np
import pytest

from specjax.acceptance import Coupled, Greedy, rejection
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.drafters import DraftModel, NullDrafter
from specjax.drafters.drawing import Pick, Warping
from specjax.drafters.length import Confidence
from specjax.testing.markov import markov

TARGET, DRAFT = markov(0, 12, 0.2), markov(0, 12, 0.2)
K = 5


def completions(drafter, rule, *, temperature: float = 1.0, tokens: int = 60):
    options = EngineOptions(prefill_width=1)
    asked = [
        Request(prompt_ids=(r,), max_tokens=tokens, temperature=temperature, seed=r)
        for r in range(6)
    ]
    return generate(Engine(TARGET, drafter, rule, options), asked)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, Greedy()), (1.0, Coupled())])
def test_stopping_early_changes_no_token_and_drafts_less(temperature, rule):
    plain = completions(NullDrafter(), rule, temperature=temperature)
    drafted = []
    for least in (0.0, 0.5):
        drafter = DraftModel(DRAFT, K, length=Confidence(least))
        rows = completions(drafter, rule, temperature=temperature)
        assert [row.ids for row in rows] == [row.ids for row in plain]
        drafted.append(sum(row.drafted for row in rows))
    assert drafted[0] > drafted[1] > 0


@pytest.mark.full
def test_what_is_still_drafted_is_kept_more_often():
    noisy = markov(1, 12, 0.5)
    alphas = [
        sum(r.accepted for r in rows) / max(sum(r.drafted for r in rows), 1)
        for rows in (
            completions(
                DraftModel(noisy, K, pick=Pick.DRAWN, length=policy), rejection()
            )
            for policy in (None, Confidence(0.5))
        )
    ]
    assert alphas[1] > alphas[0]


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"least = 1\.5"):
        Confidence(1.5)
    with pytest.raises(ValueError, match="temperature = 0"):
        Warping(temperature=0.0)


def test_a_warped_draft_states_the_law_it_was_drawn_from():
    drafter = DraftModel(
        DRAFT, 2, pick=Pick.DRAWN, warping=Warping(temperature=0.5, top_k=3)
    )
    engine = Engine(TARGET, drafter, rejection(), EngineOptions(prefill_width=1))
    asked = [Request(prompt_ids=(2,), temperature=1.0), Request(prompt_ids=(3,))]
    state = engine.prefill(engine.start(asked))
    proposal = drafter.propose(state.drafter, context_of(state))[0]
    assert proposal.log_q is not None
    law = np.exp(np.asarray(proposal.log_q))
    table = np.asarray(DRAFT.table[2], np.float64) / 0.5
    table[table < np.sort(table)[-3]] = -np.inf
    wanted = np.exp(table - table.max())
    np.testing.assert_allclose(law[0, 0], wanted / wanted.sum(), atol=1e-6)
    # a row at temperature 0 stays there: its draft is the argmax, with certainty
    assert law[1, 0].max() == 1 and law[1, 0].argmax() == int(proposal.tokens[1, 0])


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1.5}, {"presence_penalty": 2.0}]
)
def test_a_draft_counts_its_own_tokens_once_for_penalties(penalty):
    """A model that drafts for itself is right, with penalties as without."""
    options = EngineOptions(prefill_width=4)
    engine = Engine(TARGET, DraftModel(TARGET, 4), Coupled(), options)
    asked = [
        Request(
            prompt_ids=(1, 2, 3), max_tokens=30, temperature=1.0, seed=row, **penalty
        )
        for row in range(3)
    ]
    for row in generate(engine, asked):
        assert row.accepted == row.drafted > 0
