"""The independent draft model: a target that drafts for itself is always right."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Coupled, Greedy
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Completion, generate
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance, DecodeState
from specjax.decoding.windows import chunk_window
from specjax.drafters import DraftModel, NullDrafter
from specjax.models.decoder import Decoder
from specjax.testing.toys import toy_hybrid, toy_llama

DECODERS = {"llama": toy_llama().decoder, "hybrid": toy_hybrid().decoder}
RULES = {0.0: Greedy(), 0.8: Coupled()}
K = 4
PROMPTS = ((5, 17, 40, 3, 22, 9, 1, 1, 30), (8,))


def requests(temperature: float, tokens: int) -> list[Request]:
    return [
        Request(
            prompt_ids=prompt, max_tokens=tokens, temperature=temperature, seed=11 + i
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def engine(target: Decoder, drafter: Any, temperature: float, **options: Any) -> Engine:
    made = {
        "prefill_width": 8,
        "rounds_per_call": 4,
        "capacity_at_least": 256,
        "widths": (drafter.max_nodes + 1,),
    }
    return Engine(target, drafter, RULES[temperature], EngineOptions(**made | options))


def wrong_head(model: Decoder, size: float) -> Decoder:
    """A model that agrees with this one now and then."""
    weight = model.head.weight
    noise = size * jax.random.normal(jax.random.key(0), weight.shape, weight.dtype)
    return model.replace(head=model.head.replace(weight=weight + noise))


@pytest.mark.parametrize(
    ("kind", "temperatures"),
    [
        ("llama", (0.8, 0.0)),
        pytest.param("llama", (0.0, 0.0), marks=pytest.mark.full),
        pytest.param("hybrid", (0.8, 0.0), marks=pytest.mark.full),
    ],
)
def test_a_target_that_drafts_for_itself_is_accepted_to_the_last_token(
    kind, temperatures
):
    model = DECODERS[kind]
    asked = [
        dataclasses.replace(request, temperature=temperature)
        for request, temperature in zip(requests(0.0, 300), temperatures, strict=True)
    ]
    rows = generate(engine(model, DraftModel(model, K), max(temperatures)), asked)
    for row in rows:
        assert len(row.ids) == 300 and len(set(row.ids)) > 5
        # 60 rounds of four drafts and a bonus: in the last 50 as in the first
        assert {(r.drafted, r.accepted, r.committed) for r in row.rounds} == {(4, 4, 5)}


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 6, 9])
def test_no_more_is_drafted_than_can_be_kept(tokens):
    model = DECODERS["llama"]
    rows = generate(engine(model, DraftModel(model, K), 0.0), requests(0.0, tokens))
    for row in rows:
        assert len(row.ids) == tokens
        assert row.drafted == row.accepted == tokens - len(row.rounds)


def held(state: DecodeState) -> np.ndarray:
    return np.asarray(state.drafter.lengths)


@jax.jit
def fresh(model: Decoder, tokens: jax.Array, lengths: jax.Array) -> Any:
    """The model's canonical state after these tokens, taken in four by four."""
    batch, capacity = tokens.shape

    def take_in(chunk: jax.Array, state: Any) -> Any:
        start = jnp.full((batch,), 4 * chunk, jnp.int32)
        window = chunk_window(tokens, start, lengths, 4)
        verdict = model.verify(state, window, logits="none")
        num = window.valid.sum(axis=1, dtype=jnp.int32)
        path = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (batch, 4))
        return model.commit(
            state, verdict.pending, Acceptance(path, window.tokens, num)
        )

    state = jax.lax.fori_loop(0, capacity // 4, take_in, model.init(batch, capacity))
    return model.canonical(state)


@jax.jit
def canonical(model: Decoder, state: Any) -> Any:
    return model.canonical(state)


@pytest.mark.parametrize(
    "kind", ["llama", pytest.param("hybrid", marks=pytest.mark.full)]
)
def test_after_every_call_the_model_holds_the_committed_tokens_and_nothing_else(kind):
    target = DECODERS[kind]
    model = wrong_head(target, 0.1)
    run = engine(
        target, DraftModel(model, K), 0.0, rounds_per_call=1, capacity_at_least=0
    )
    state = run.prefill(run.start(requests(0.0, 50)))
    accepted: set[int] = set()
    assert held(state).tolist() == [len(prompt) - 1 for prompt in PROMPTS]
    while not state.done.all():
        before = np.asarray(state.lengths).copy()
        running = ~np.asarray(state.done)
        state, log = run.rounds(state)
        accepted |= set(np.asarray(log.steps.accepted)[0, running].tolist())
        # what was committed before the round; the rest is taken in by the next
        np.testing.assert_array_equal(held(state)[running], before[running])
        got = canonical(model, state.drafter.model)
        wanted = fresh(model, jnp.maximum(state.tokens, 0), state.drafter.lengths)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)
    assert {0, K} <= accepted  # rejects and full accepts were among them


@pytest.fixture(scope="module", params=RULES)
def plain(request: pytest.FixtureRequest) -> tuple[float, list[Completion]]:
    temperature = request.param
    run = engine(DECODERS["llama"], NullDrafter(), temperature)
    return temperature, generate(run, requests(temperature, 40))


@pytest.mark.parametrize("part", ["head", "embedding"])
def test_a_draft_model_of_nan_costs_acceptance_and_nothing_else(plain, part):
    temperature, wanted = plain
    model = DECODERS["llama"]
    if part == "head":
        nan = jnp.full_like(model.head.weight, jnp.nan)
        broken = model.replace(head=model.head.replace(weight=nan))
    else:
        broken = model.replace(embedding=jnp.full_like(model.embedding, jnp.nan))
    run = engine(model, DraftModel(broken, K), temperature)
    rows = generate(run, requests(temperature, 40))
    for a, b in zip(rows, wanted, strict=True):
        assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
        # under the coupled rule a uniform law with the target's noise agrees at times
        assert a.drafted > 0 and a.alpha < 0.4


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_a_wrong_draft_model_costs_acceptance_and_nothing_else(plain, size):
    temperature, wanted = plain
    model = DECODERS["llama"]
    run = engine(model, DraftModel(wrong_head(model, size), K), temperature)
    rows = generate(run, requests(temperature, 40))
    for a, b in zip(rows, wanted, strict=True):
        assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
        assert 0 < a.alpha < 1 if size < 1 else a.alpha < 0.5


def test_a_draft_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="k = 0"):
        DraftModel(DECODERS["llama"], 0)
