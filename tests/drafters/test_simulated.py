"""Planted acceptance: the rate that was asked for, by depth, and no other output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Coupled, Greedy
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.types import Context, Sampling
from specjax.drafters import NullDrafter
from specjax.drafters.simulated import Simulated, wrong_token
from specjax.testing.conformance import CHECKS, Case, Report, find, uneven_requests
from specjax.testing.markov import markov
from specjax.testing.toys import toy_llama

V = 16
ROWS, TOKENS = 48, 64
TARGET = markov(4, V)
ALPHAS = (0.9, 0.7, 0.4)

propose = jax.jit(lambda drafter, context: drafter.propose(None, context)[0])


def context_of(lengths, room: int = 9) -> Context:
    batch = len(lengths)
    return Context(
        tokens=jnp.zeros((batch, 12), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        room=jnp.full((batch,), room, jnp.int32),
        done=jnp.zeros((batch,), bool),
        seeds=jnp.zeros((batch,), jnp.uint32),
        sampling=Sampling(),
        counts=None,
    )


def test_drafts_are_accepted_as_often_as_was_planted():
    asked = [
        Request(
            prompt_ids=(1 + row % 9, 3), max_tokens=TOKENS, temperature=1.0, seed=row
        )
        for row in range(ROWS)
    ]
    plain = generate(Engine(TARGET, NullDrafter(), Coupled()), asked)
    drafter = Simulated.of(
        [request.prompt_ids for request in asked], [row.ids for row in plain], ALPHAS, V
    )
    engine = Engine(TARGET, drafter, Coupled(), EngineOptions(widths=(4,)))
    rows = generate(engine, asked)
    assert [row.ids for row in rows] == [row.ids for row in plain]
    # the last rounds of a row are cut by its end
    rounds = [r for row in rows for r in row.rounds[:-1] if r.drafted == len(ALPHAS)]
    for depth, planted in enumerate(ALPHAS):
        # a depth is tested where the one above it was accepted
        tested = sum(r.accepted >= depth for r in rounds)
        right = sum(r.accepted > depth for r in rounds)
        spread = np.sqrt(planted * (1 - planted) / tested)
        assert tested > 300 and abs(right / tested - planted) < 4 * spread


def test_sure_things():
    texts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    prompts, outputs = [t[:2] for t in texts], [t[2:] for t in texts]
    always = Simulated.of(prompts, outputs, (1.0,) * 3, V)
    got = propose(always, context_of([2, 4]))
    assert got.tokens[0].tolist() == [3, 4, 5]
    # nothing is drafted beyond what is known
    assert got.num_nodes.tolist() == [3, 2] and got.tokens[1, :2].tolist() == [11, 12]
    assert propose(always, context_of([6, 9])).num_nodes.tolist() == [0, 0]
    assert propose(always, context_of([2, 2], room=2)).num_nodes.tolist() == [1, 1]
    never = Simulated.of(prompts, outputs, (0.0,) * 3, V)
    got = propose(never, context_of([2, 2]))
    assert np.all(got.tokens[0] != np.array([3, 4, 5]))
    assert np.all((got.tokens >= 0) & (got.tokens < V))


def test_a_coin_belongs_to_a_row_and_a_position():
    text = list(range(12))
    drafter = Simulated.of([text[:2]] * 3, [text[2:]] * 3, (0.5,) * 4, V)
    moved = drafter.for_rows([2, 0, 1])
    ours, theirs = (propose(d, context_of([4] * 3)) for d in (drafter, moved))
    np.testing.assert_array_equal(theirs.tokens, ours.tokens[np.array([2, 0, 1])])
    later = propose(drafter, context_of([5] * 3))
    right = np.asarray(ours.tokens[:, 1:] == jnp.arange(5, 8))
    same = np.asarray(later.tokens[:, :3] == jnp.arange(5, 8))
    np.testing.assert_array_equal(right, same)
    assert 0 < right.sum() < right.size


def test_wrong_tokens_are_wrong():
    for vocab in (2, 3, 9):
        for true in range(vocab):
            for node in range(12):
                assert 0 <= wrong_token(true, node, vocab) < vocab
                assert wrong_token(true, node, vocab) != true


def test_what_makes_no_sense_is_refused():
    for alphas, problem in (((), "alphas"), ((0.5, 1.2), "alphas")):
        with pytest.raises(ValueError, match=problem):
            Simulated.of([[1]], [[2]], alphas, V)
    with pytest.raises(ValueError, match="vocab_size = 1"):
        Simulated.of([[1]], [[2]], (0.5,), 1)
    with pytest.raises(ValueError, match="1 rows, the batch 2"):
        Simulated.of([[1]], [[2]], (0.5,), V).init(2, 9)


@pytest.mark.full
def test_conformance():
    toy = toy_llama()
    requests = uneven_requests(toy.decoder.vocab_size, sampled=False)

    def planted(outputs) -> Simulated:
        prompts = [r.prompt_ids for r in requests]
        return Simulated.of(prompts, outputs, ALPHAS, toy.decoder.vocab_size)

    case = Case.plant(
        planted,
        target=toy.decoder,
        rule=Greedy(),
        requests=requests,
        toy=toy,
        widths=(len(ALPHAS) + 1,),
    )
    Report(tuple(find(check, case, "simulated") for check in CHECKS)).assert_ok()
