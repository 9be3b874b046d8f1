"""Interleaving, warming up, calibration."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import struct

from specjax.acceptance import RULES, Greedy
from specjax.analysis import runs
from specjax.analysis.calibration import calibrate
from specjax.analysis.runs import (
    Arm,
    break_in,
    interleaved,
    run,
    turning_texts,
    warm_up,
)
from specjax.decoding import loop
from specjax.decoding.engine import Engine, EngineOptions, default_widths
from specjax.decoding.interfaces import FINAL
from specjax.decoding.requests import Request
from specjax.decoding.types import Proposal
from specjax.drafters import DraftModel, NGram, NullDrafter
from specjax.drafters.drawing import Pick
from specjax.testing.toys import toy_llama

REQUESTS = [
    Request(prompt_ids=[1, 2, 1, 2, 1], max_tokens=7),
    Request(prompt_ids=[4], max_tokens=3),
    Request(prompt_ids=list(range(20)), max_tokens=5),
]


@pytest.fixture(scope="module")
def arms():
    target = toy_llama().decoder
    options = EngineOptions(capacity_at_least=200, prefill_width=8)
    parts = [("none", 0, NullDrafter()), ("ngram", 2, NGram(2)), ("ngram", 3, NGram(3))]
    return [Arm(n, k, Engine(target, d, Greedy(), options)) for n, k, d in parts]


def test_every_arm_runs_every_request_in_turning_order(arms, monkeypatch):
    order = []

    def spy(engine, request):
        order.append((REQUESTS.index(request), engine.drafter.max_nodes))
        return run(engine, request)

    monkeypatch.setattr(runs, "run", spy)
    trials = list(interleaved(arms, REQUESTS, repeats=2))
    assert [(t.request, t.repeat) for t in trials] == [
        (request, repeat) for repeat in (0, 1) for request in range(3)
    ]
    by_trial = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert [[k for _, k in trial] for trial in by_trial] == [
        [0, 2, 3],
        [2, 3, 0],
        [3, 0, 2],
        [2, 3, 0],
        [3, 0, 2],
        [0, 2, 3],
    ]
    for trial in trials:
        plain, *drafted = trial.runs
        assert plain.completion.drafted == 0
        assert plain.tokens == REQUESTS[trial.request].max_tokens
        for done in drafted:
            assert done.completion.ids == plain.completion.ids


def test_after_warming_up_nothing_is_compiled(arms):
    warm_up([arm.engine for arm in arms], REQUESTS[2])
    before = programs()
    for arm in arms:
        for request in REQUESTS:
            run(arm.engine, request)
    assert programs() == before


def test_breaking_in_runs_windows_of_every_width(monkeypatch):
    k, request = 8, Request(prompt_ids=list(range(20)), max_tokens=5)
    options = EngineOptions(capacity_at_least=25, prefill_width=8)
    engine = Engine(toy_llama().decoder, NGram(k), Greedy(), options)
    seen = []

    def spy(engine, request):
        done = run(engine, request)
        seen.append(done.completion)
        return done

    monkeypatch.setattr(runs, "run", spy)
    break_in([engine], request)
    needed = {r.drafted + 1 for completion in seen for r in completion.rounds}
    widths = default_widths(k)
    ran = {min(w for w in widths if w >= rows) for rows in needed}
    assert ran == set(widths)


def test_turning_texts_need_no_more_room_than_the_request():
    for length, most in [(1, 1), (4, 5), (20, 5), (200, 1), (3, None)]:
        request = Request(prompt_ids=list(range(length)), max_tokens=most)
        for text in turning_texts(request):
            assert len(text.prompt_ids) + text.max_tokens <= length + (most or 0)
    # short ones are there for any request that is worth timing
    assert len(turning_texts(Request(prompt_ids=[1] * 9, max_tokens=16))) == 4


def programs() -> int:
    return loop.run_rounds._cache_size() + loop.prefill_chunk._cache_size()


def test_least_capacity_gives_all_requests_one_shape(arms):
    states = [arms[0].engine.start([request]) for request in REQUESTS]
    assert {state.capacity for state in states} == {256}
    assert [int(state.limits[0]) for state in states] == [12, 4, 25]


def test_calibration(arms):
    plain, drafted = (calibrate(arm.engine, REQUESTS[0], 2) for arm in arms[:2])
    assert (plain.c_draft, plain.c_verify) == (0, 1)
    assert drafted.c_draft > 0 and drafted.c_verify > 0


def test_calibration_gives_a_rule_the_law_that_it_reads():
    target, rule = toy_llama().decoder, RULES["rejection"].build()
    laws = []

    class Reads(type(rule)):
        def accept(self, proposal, *rest, **more):
            laws.append(None if proposal.log_q is None else proposal.log_q.shape)
            return super().accept(proposal, *rest, **more)

    reads = Reads(*(getattr(rule, f.name) for f in dataclasses.fields(rule)))
    drafter = DraftModel(target, k=2, pick=Pick.DRAWN)
    engine = Engine(target, drafter, reads, EngineOptions(prefill_width=8))
    costs = calibrate(engine, dataclasses.replace(REQUESTS[0], temperature=1.0), 1)
    assert costs.c_draft > 0 and costs.c_verify > 0
    assert laws == [None, (1, 3, target.vocab_size)]


def test_calibration_counts_what_a_head_takes_in():
    target = toy_llama().decoder
    engine = Engine(target, Slow(), Greedy(), EngineOptions(prefill_width=8))
    seen.clear()
    calibrate(engine, REQUESTS[0], 1)
    assert {taps for taps in seen if taps} == {((FINAL, (1, 2, 24)),)}


seen = []


class Slow(NullDrafter):
    """Drafts one token, and notes the shapes of what it is shown."""

    taps: tuple[int, ...] = struct.field(pytree_node=False, default=(FINAL,))
    max_nodes: int = struct.field(pytree_node=False, default=1)
    max_depth: int = struct.field(pytree_node=False, default=1)

    def propose(self, state, context):
        batch = context.lengths.shape[0]
        tokens, parents = context.anchor[:, None], jnp.full((batch, 1), -1, jnp.int32)
        return Proposal(tokens, parents, jnp.ones((batch,), jnp.int32)), "proposed"

    def observe(self, state, pending, window, verdict, acceptance):
        if pending is not None:
            seen.append(tuple((t, x.shape) for t, x in verdict.features.items()))
        return None


def test_names(arms):
    assert [arm.name for arm in arms] == [
        "plain",
        "ngram k=2 greedy",
        "ngram k=3 greedy",
    ]
