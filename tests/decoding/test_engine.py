"""What an engine refuses, what it allocates, and prompts of every shape."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import struct

from specjax.acceptance import Greedy
from specjax.decoding.engine import (
    CAPACITY_STEP,
    Engine,
    EngineOptions,
    PairError,
    default_widths,
)
from specjax.decoding.generate import Completion, generate
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.requests import Request, RequestError
from specjax.decoding.types import FinishReason
from specjax.drafters import DraftModel, NGram, NullDrafter
from specjax.testing.toys import toy_hybrid, toy_llama

LLAMA, HYBRID = toy_llama(), toy_hybrid()


def engine(drafter: Any = None, target: Any = LLAMA.decoder, **options: Any) -> Engine:
    settings = {"prefill_width": 8, "rounds_per_call": 8} | options
    return Engine(target, drafter or NullDrafter(), Greedy(), EngineOptions(**settings))


# -- pairs and options ----------------------------------------------------------------


class OneHotOnly(struct.PyTreeNode):
    """A rule that is exact for deterministic drafts and nothing else."""

    name = "one-hot-only"
    takes = frozenset({ProposalLaw.DETERMINISTIC})

    def accept(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Dice(NGram):
    """A drafter that says it draws its tokens."""

    name = "dice"
    law = ProposalLaw.INDEPENDENT


def test_a_rule_that_is_not_exact_for_the_drafters_law_is_refused():
    Engine(LLAMA.decoder, NullDrafter(), OneHotOnly())
    Engine(LLAMA.decoder, NGram(2), OneHotOnly())
    with pytest.raises(PairError) as error:
        Engine(LLAMA.decoder, Dice(2), OneHotOnly())
    for part in ("one-hot-only", "deterministic", "dice", "independent"):
        assert part in str(error.value)


def test_a_drafter_of_another_vocabulary_is_refused():
    small = toy_llama(vocab_size=60).decoder
    with pytest.raises(PairError, match=r"vocabulary of 60, the target of 61"):
        engine(DraftModel(small, 3))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eos_ids": (1, 61)}, "eos id 61"),
        ({"eos_ids": (-1,)}, "eos id -1"),
        ({"max_capacity": 5}, "k = 5"),
        ({"max_capacity": 0}, "k = 5"),
        ({"prefill_width": 0}, "prefill_width"),
        ({"rounds_per_call": 0}, "rounds_per_call"),
        ({"widths": (1, 5)}, "max_nodes + 1 = 6"),
        ({"widths": (1, 7)}, "max_nodes + 1 = 6"),
        ({"widths": (3, 1, 6)}, "ascend"),
        ({"widths": (1, 3, 3, 6)}, "ascend"),
        ({"widths": (0, 6)}, "ascend"),
        ({"widths": ()}, "widths"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 62}, "top_logprobs"),
    ],
)
def test_options_that_no_run_could_honour_are_refused(options, problem):
    with pytest.raises(PairError) as error:
        engine(NGram(5), **options)
    assert problem in str(error.value)


@pytest.mark.parametrize("widths", [(6,), (1, 6), (2, 3, 6), None])
def test_widths_that_hold_every_proposal_are_taken(widths):
    used = engine(NGram(5), widths=widths, max_capacity=6).round_options.widths
    assert used == (widths or default_widths(5))


@pytest.mark.parametrize(
    ("nodes", "widths"),
    [(0, (1,)), (1, (1, 2)), (7, (1, 8)), (8, (1, 4, 9)), (31, (1, 16, 32))],
)
def test_default_widths_hold_a_plain_step_and_the_whole_proposal(nodes, widths):
    assert default_widths(nodes) == widths


# -- sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "options", "capacity"),
    [
        (1, 1, {}, CAPACITY_STEP),
        (28, 100, {}, CAPACITY_STEP),
        (29, 100, {}, 2 * CAPACITY_STEP),
        (1, 1, {"capacity_at_least": 300}, 3 * CAPACITY_STEP),
        (1, None, {"max_capacity": 130}, 2 * CAPACITY_STEP),
        (1, 1000, {"max_capacity": 64}, CAPACITY_STEP),
        (1, 10, {"max_capacity": 1000}, CAPACITY_STEP),
    ],
)
def test_capacity_is_what_is_needed_rounded_up(prompt, max_tokens, options, capacity):
    request = Request(prompt_ids=(1,) * prompt, max_tokens=max_tokens)
    state = engine(**options).start([request])
    assert state.capacity == capacity
    limit = options.get("max_capacity", 10**9)
    wanted = limit if max_tokens is None else prompt + max_tokens
    assert state.limits.tolist() == [min(wanted, limit)]


@pytest.mark.parametrize(
    ("requests", "options", "problem"),
    [
        ([], {}, "at least one"),
        ([Request(prompt_ids=(1,), max_tokens=None)], {}, "max_capacity"),
        ([Request(prompt_ids=(1,) * 9)], {"max_capacity": 8}, "9 tokens"),
        ([Request(prompt_ids=(61,))], {}, "vocabulary of 61"),
        ([Request(prompt_ids=(1,), logit_bias={61: 1.0})], {}, "logit_bias"),
    ],
)
def test_requests_that_cannot_be_run_are_refused(requests, options, problem):
    with pytest.raises(RequestError) as error:
        engine(**options).start(requests)
    assert problem in str(error.value)


def test_the_seed_may_be_any_32_bits():
    request = Request(prompt_ids=(1,), seed=2**32 - 1)
    assert engine().start([request]).seeds.tolist() == [2**32 - 1]


def test_no_two_parts_of_a_fresh_state_share_a_buffer():
    state = engine().start([Request(prompt_ids=(1, 2), presence_penalty=1.0)] * 2)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# -- prompts --------------------------------------------------------------------------

DRAW = np.random.default_rng(3)
RAGGED = [
    Request(prompt_ids=tuple(DRAW.integers(0, 61, n).tolist()), max_tokens=budget)
    for n, budget in [(1, 9), (23, 6), (7, 0), (2, 12), (8, 7), (9, 1)]
]


def outputs(rows: list[Completion]) -> list[tuple[int, ...]]:
    return [row.ids for row in rows]


@pytest.fixture(scope="module", params=[LLAMA, HYBRID], ids=["llama", "hybrid"])
def decoder(request: pytest.FixtureRequest) -> Any:
    return request.param.decoder


@pytest.fixture(scope="module")
def ragged(decoder: Any) -> list[Completion]:
    return generate(engine(target=decoder), RAGGED)


@pytest.mark.parametrize("width", [1, 7, pytest.param(64, marks=pytest.mark.full)])
def test_the_width_of_prefill_chunks_changes_no_token(decoder, ragged, width):
    rows = generate(engine(target=decoder, prefill_width=width), RAGGED)
    assert outputs(rows) == outputs(ragged)


def test_rows_of_a_ragged_batch_are_what_they_are_alone(decoder, ragged):
    for row, request in zip(ragged, RAGGED, strict=True):
        alone = generate(engine(target=decoder), [request])
        assert outputs(alone) == [row.ids]


def test_budgets_are_kept_to_the_token(ragged):
    for row, request in zip(ragged, RAGGED, strict=True):
        assert row.prompt_ids == request.prompt_ids
        assert len(row.ids) == request.max_tokens
        assert row.finish_reason == FinishReason.LENGTH
        assert len(row.rounds) == request.max_tokens  # plain: a round a token
        assert row.drafted == row.accepted == 0


def test_a_budget_of_0_runs_no_round_at_all():
    rows = generate(engine(), [Request(prompt_ids=(1, 2, 3), max_tokens=0)])
    assert outputs(rows) == [()]
    assert rows[0].finish_reason == FinishReason.LENGTH
    assert rows[0].rounds == () and rows[0].tau == 0.0


def test_a_prompt_that_fills_the_capacity_ends_at_once():
    request = Request(prompt_ids=(1,) * 8, max_tokens=None)
    rows = generate(engine(max_capacity=8), [request])
    assert outputs(rows) == [()]
    assert rows[0].finish_reason == FinishReason.CAPACITY


def test_prefill_takes_in_all_of_a_prompt_but_its_last_token():
    run = engine()
    state = run.prefill(run.start(RAGGED))
    held = [len(request.prompt_ids) - 1 for request in RAGGED]
    # a row without a budget is done before it begins
    held[2] = 0
    assert state.target.lengths.tolist() == held
    assert state.lengths.tolist() == [len(request.prompt_ids) for request in RAGGED]


def test_a_greedy_rule_refuses_a_temperature():
    run = engine()
    with pytest.raises(RequestError, match=r"temperature = 0.7 of request 1.*Coupled"):
        run.start([Request(prompt_ids=(1,)), Request(prompt_ids=(1,), temperature=0.7)])


def test_options_are_integers_in_any_container():
    made = engine(eos_ids=(3, 1)).options
    assert made.eos_ids == (3, 1) and hash(made)
    for bad in ({"eos_ids": (True,)}, {"widths": (1, True)}):
        with pytest.raises(PairError, match="is not an integer"):
            engine(**bad)
