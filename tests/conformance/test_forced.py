"""What only a drafter under the test's control can show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance.greedy import Greedy
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.stats import alpha, tau, total
from specjax.decoding.types import FinishReason
from specjax.drafters.draft_model import DraftModel
from specjax.models.build import WeightType
from specjax.testing import toys
from specjax.testing.conformance import Case, record, uneven_requests
from specjax.testing.conformance import c3_replay as c3
from specjax.testing.conformance.c7_boundaries import expect, until
from specjax.testing.conformance.matrix import Cell, case_of, toy
from specjax.testing.forced import (
    NO_DRAFTS,
    accept_pattern,
    chain,
    chains_of,
    plant,
    trees_of,
)

VOCAB = 61
K = 8


def base(target="llama") -> Case:
    """Three rows, each with settings of its own, in arrays of eight nodes."""
    return case_of(Cell(target, "trees", "coupled"))


def forced(case: Case, accepts, shapes, **changes) -> Case:
    """The case with these accept counts planted in these shapes."""
    accepts = np.asarray(accepts)
    if accepts.ndim == 1:
        accepts = np.repeat(accepts[:, None], case.batch, axis=1)
    script = plant(case.plain.outputs, accepts, shapes, VOCAB, nodes=K)
    return case.but(drafter=script, planted=None, **changes)


def by_round(case: Case, name: str) -> list[list[int]]:
    """A counter of the log, by row and round."""
    return np.stack([getattr(s.log, name) for s in case.trace.rounds]).T.tolist()


@pytest.mark.parametrize("target", ["llama", "hybrid"])
@pytest.mark.parametrize("shapes", [chains_of(K), trees_of(K)], ids=["chains", "trees"])
def test_what_is_planted_is_what_is_accepted(target, shapes):
    pattern = accept_pattern(30, 3, K, seed=3)
    case = forced(base(target), pattern, shapes)
    assert case.trace.outputs == base(target).plain.outputs
    accepted = by_round(case, "accepted")
    for row in range(3):
        left = len(base(target).plain.outputs[row])
        for r, said in enumerate(accepted[row]):
            longest = len(shapes[(r + row) % len(shapes)].path)
            wanted = min(max(int(pattern[r, row]), 0), longest, max(left - 1, 0))
            assert said == wanted, f"row {row}, round {r}"
            left -= wanted + 1 if left else 0


def test_a_path_that_is_no_prefix_in_different_trees_side_by_side():
    """Nodes 0-3-7 in one row and 2-5-7 and 1-4-6 in its neighbours."""
    case = forced(base(), np.full((12, 3), 3), trees_of(K)[:3])
    assert by_round(case, "accepted")[0][:3] == [3, 3, 3]
    assert case.trace.outputs == base().plain.outputs


def test_a_tree_of_one_child_each_is_the_chain():
    """The same rounds, to the bit, whether a chain is called a tree or not."""
    chained = forced(base("hybrid"), [2, 0, K, NO_DRAFTS, 3] * 4, [chain(K)])
    padded = dataclasses.replace(chain(K), parents=tuple(range(-1, K - 1)))
    tree = forced(base("hybrid"), [2, 0, K, NO_DRAFTS, 3] * 4, [padded])
    for a, b in zip(chained.trace.snapshots, tree.trace.snapshots, strict=True):
        for row in range(3):
            assert str(a.row(row)) == str(b.row(row))


# C7


@pytest.mark.full
@pytest.mark.parametrize("shapes", [chains_of(K)[:1], trees_of(K)[:2]])
def test_end_of_sequence_at_every_place_of_a_path(shapes):
    """At the first, a middle and the last accepted draft, as bonus, and beyond."""
    case = base()
    truth = case.plain.outputs
    index = next(i for i in range(9, len(truth[0])) if truth[0][i] not in truth[0][:i])
    eos = truth[0][index], VOCAB - 1
    wanted = [until(output, eos) for output in truth]
    longest = len(shapes[0].path)
    for before in range(longest + 2):
        # single tokens first, so that the id is number ``before`` of the next path
        accepts = [0] * (index - before) + [longest, 0, 0] + [NO_DRAFTS] * 20
        if before > longest:
            # the id is drafted, behind a draft that is rejected
            accepts[index - before] = 1
        planted = forced(case, accepts, shapes, eos_ids=eos)
        reasons = [
            FinishReason.STOP if out[-1] in eos else FinishReason.LENGTH
            for out in wanted
        ]
        expect(planted.trace, wanted, reasons, f"the id at place {before} of a path")
        last = planted.trace.rounds[index - before if before <= longest else -1]
        if before <= longest:
            assert last.log.committed[0] == before + 1
            assert last.log.accepted[0] == min(before + 1, longest)


@pytest.mark.parametrize("budget", [0, 1, K - 1, K, K + 1, K + 2])
def test_budgets_around_a_full_accept(budget):
    case = base("hybrid")
    truth = case.plain.outputs
    requests = [dataclasses.replace(r, max_tokens=budget) for r in case.requests]
    cut = forced(case, [K] * 4, [chain(K)]).but(requests=tuple(requests))
    reasons = [FinishReason.LENGTH] * 3
    expect(cut.trace, [o[:budget] for o in truth], reasons, f"budget {budget}")
    rounds = -(-budget // (K + 1))
    assert cut.trace.last.stats.rounds.tolist() == [rounds] * 3


# C9


def test_every_number_of_a_short_run_by_hand():
    """0, K, then 2 accepted, and a last round that the budget cuts short.

    k = 4, 12 tokens: 1 + 5 + 3 = 9 are committed by three rounds; in the fourth, 3 of 4
    drafts are allowed for (3 tokens left, of which the target's own is one): 2 fit.
    """
    case = base()
    requests = [dataclasses.replace(r, max_tokens=12) for r in case.requests]
    case = forced(case, [0, 4, 2, 4], [chain(4)]).but(requests=tuple(requests))
    assert by_round(case, "accepted") == [[0, 4, 2, 2]] * 3
    assert by_round(case, "committed") == [[1, 5, 3, 3]] * 3
    assert by_round(case, "drafted") == [[4, 4, 4, 2]] * 3
    stats = case.trace.last.stats
    assert stats.rounds.tolist() == [4] * 3
    assert stats.drafted.tolist() == [14] * 3
    assert stats.accepted.tolist() == [8] * 3
    assert stats.committed.tolist() == [12] * 3
    assert stats.drafted_by_position.tolist() == [[4, 4, 3, 3, 0, 0, 0, 0]] * 3
    assert stats.accepted_by_position.tolist() == [[3, 3, 1, 1, 0, 0, 0, 0]] * 3
    assert tau(12, 4) == 3.0 and alpha(8, 14) == 8 / 14


def test_the_sum_over_rows_by_hand():
    engine = base().engine()
    state, log = engine.rounds(engine.prefill(engine.start(base().requests)))
    sums = total(state.stats)
    assert sums["rounds"] == 3
    assert sums["committed"] == int(log.steps.committed.sum())
    assert tau(0, 0) == 0.0 and alpha(0, 0) == 0.0


# C3


@pytest.mark.parametrize(
    "target", [pytest.param("llama", marks=pytest.mark.full), "hybrid"]
)
def test_replay_in_float64(target):
    """Down to 1e-12, after fifty rounds as after one."""
    with jax.enable_x64(True):
        make = {"llama": toys.toy_llama, "hybrid": toys.toy_hybrid}[target]
        made = make(weights=WeightType.FLOAT64)
        pattern = accept_pattern(60, 3, 4, seed=5)
        pattern[12:] = np.minimum(pattern[12:], 1)
        case = Case.plant(
            lambda outputs: plant(outputs, pattern, trees_of(4), VOCAB),
            target=made.decoder,
            rule=Greedy(),
            requests=uneven_requests(VOCAB, sampled=False, max_tokens=80),
            toy=made,
            widths=(5,),
            rounding=1e-12,
        )
        print(c3.state_is_a_replay(case))
        assert len(case.trace.rounds) >= 40
        assert case.trace.outputs == case.plain.outputs


# Drafters with a model


@pytest.mark.full
@pytest.mark.parametrize("target", ["llama", "hybrid"])
def test_a_target_that_drafts_for_itself_is_always_right(target):
    """In the last rounds as in the first: its own state keeps up with what is kept."""
    made = toy(target)
    case = Case(
        target=made.decoder,
        drafter=DraftModel(made.decoder, k=3),
        rule=Greedy(),
        requests=uneven_requests(VOCAB, sampled=False, max_tokens=60),
    )
    assert case.trace.last.stats.accepted.tolist() == [
        int(drafted) for drafted in case.trace.last.stats.drafted
    ]
    assert min(case.trace.last.stats.drafted) > 30


# Scripts


def test_a_script_for_another_batch_is_refused():
    drafter = base().drafter
    with pytest.raises(ValueError, match="the script has 3 rows, the batch 2"):
        drafter.init(2, 128)
    assert drafter.for_rows([2, 0]).tokens.shape[1] == 2


def test_a_script_that_is_used_up_drafts_nothing():
    case = forced(base(), [1], [chain(2)])
    drafted = by_round(case, "drafted")
    assert all(row[0] == 2 and not any(row[1:]) for row in drafted)
    assert case.trace.outputs == base().plain.outputs


def test_more_rounds_a_call_change_nothing():
    """Five rounds a call: the tokens and counters of one a call, the state to rounding.

    The two are different programs.
    """
    case = base()
    engine = Engine(
        case.target,
        case.drafter,
        case.rule,
        EngineOptions(prefill_width=8, rounds_per_call=5, widths=case.widths),
    )
    state = engine.prefill(engine.start(case.requests))
    logs = []
    while not bool(jnp.all(state.done)):
        state, log = engine.rounds(state)
        logs.append(np.asarray(log.steps.committed)[: int(log.rounds)])
    last = case.trace.last
    assert np.array(state.tokens).tobytes() == last.tokens.tobytes()
    assert np.concatenate(logs).T.tolist() == by_round(case, "committed")
    for a, b in zip(
        jax.tree.leaves(case.target.canonical(state.target)),
        jax.tree.leaves(last.target),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_saved_and_restored_between_rounds_it_goes_on_alike():
    """The state is all that a run needs: through numpy and back, the same tokens."""
    case = base("hybrid")

    def through_the_host(state):
        return jax.tree.map(lambda x: jnp.array(np.array(x)), state)

    other = record(case.engine(), case.requests, through_the_host)
    assert other.outputs == case.trace.outputs


def test_one_token_prompt_and_prompt_of_one_chunk_and_one_more():
    """Lengths around the prefill's chunk of eight: 1, 2, 8, 9, 10 tokens."""
    case = base()
    for lengths in ((1, 2, 8), (9, 10, 17)):
        other = case.ask(
            [
                dataclasses.replace(r, prompt_ids=range(3, 3 + n), max_tokens=9)
                for r, n in zip(case.requests, lengths, strict=True)
            ]
        )
        assert other.trace.outputs == other.plain.outputs
        print(c3.state_is_a_replay(other))


@pytest.mark.full
@pytest.mark.parametrize("target", ["llama", "hybrid"])
def test_a_batch_of_nine(target):
    """Beyond the batches whose keys are written by slices; each row as in three."""
    case = base(target)
    nine = case.for_rows([0, 1, 2] * 3)
    assert nine.trace.outputs == case.trace.outputs * 3
    print(c3.state_is_a_replay(nine))
