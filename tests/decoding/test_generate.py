"""Whole generations: stop strings, streaming, and results whose figures add up."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.acceptance import Greedy
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import (
    Completion,
    Generation,
    Round,
    cut_rounds,
    first_stop,
    generate,
)
from specjax.decoding.requests import Request, RequestError
from specjax.decoding.stats import total
from specjax.decoding.types import FinishReason
from specjax.drafters import NullDrafter
from specjax.testing.forced import NO_DRAFTS, Forced, chain, plant
from specjax.testing.reference import logits as reference_logits
from specjax.testing.toys import toy_llama

TOY = toy_llama()
PROMPTS = ((5, 17, 40, 3), (8,))
TOKENS, K, TOP = 30, 7, 3


def spell(ids: Sequence[int]) -> str:
    """Two letters a token, so that a stop string can end inside or between tokens."""
    return "".join(chr(97 + i % 26) + chr(65 + i // 26) for i in ids)


def requests(stop: Sequence[Sequence[str]] = ((), ())) -> list[Request]:
    return [
        Request(prompt_ids=prompt, max_tokens=TOKENS, stop=tuple(s))
        for prompt, s in zip(PROMPTS, stop, strict=True)
    ]


def engine(drafter, rounds_per_call: int) -> Engine:
    options = EngineOptions(
        rounds_per_call=rounds_per_call,
        top_logprobs=TOP,
        prefill_width=8,
        # one width: a row's bits do not depend on what its neighbour drafts
        widths=(drafter.max_nodes + 1,),
    )
    return Engine(TOY.decoder, drafter, Greedy(), options)


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    return generate(engine(NullDrafter(), 8), requests(), detokenize=spell)


@pytest.fixture(scope="module")
def forced(plain: list[Completion]) -> Forced:
    """Rounds of 8, 1, 4, ... tokens: a full accept, a reject, a part, no drafts."""
    counts = np.array([[K, 3], [0, K], [3, NO_DRAFTS], [NO_DRAFTS, K], [K, 0]] * 2)
    return plant([row.ids for row in plain], counts, [chain(K)], TOY.decoder.vocab_size)


@pytest.fixture(scope="module")
def drafted(forced: Forced) -> list[Completion]:
    return generate(engine(forced, 4), requests(), detokenize=spell)


def grown(part: Completion, whole: Completion) -> bool:
    """Whether a completion is the beginning of another."""
    n = len(part.ids)
    assert whole.text is not None and part.text is not None
    assert whole.logprobs is not None
    return (
        part.ids == whole.ids[:n]
        and whole.text.startswith(part.text)
        and part.rounds == whole.rounds[: len(part.rounds)]
        and (part.logprobs or ()) == whole.logprobs[:n]
    )


def adds_up(row: Completion) -> bool:
    """Every figure follows from the ids and the rounds."""
    n = len(row.ids)
    assert row.logprobs is not None
    return (
        sum(r.committed for r in row.rounds) == n
        and len(row.logprobs) == n
        and len(row.from_draft) == n
        and sum(row.from_draft) == row.accepted == sum(r.accepted for r in row.rounds)
        and row.drafted == sum(r.drafted for r in row.rounds)
        and all(r.accepted <= min(r.drafted, r.committed) for r in row.rounds)
        and sum(row.accepted_by_position(K)) == row.accepted
        and row.tau == n / len(row.rounds)
    )


def test_drafts_change_neither_the_tokens_nor_their_logprobs(plain, drafted):
    for a, b in zip(plain, drafted, strict=True):
        assert (a.ids, a.text, a.finish_reason) == (b.ids, b.text, b.finish_reason)
        assert b.accepted > 0
        np.testing.assert_allclose(
            [x.logprob for x in a.logprobs or ()],
            [x.logprob for x in b.logprobs or ()],
            atol=1e-5,
        )


def test_the_rounds_of_a_forced_run_are_those_that_were_forced(drafted):
    first, second = (row.rounds for row in drafted)
    assert first[:4] == (Round(7, 7, 8), Round(7, 0, 1), Round(7, 3, 4), Round(0, 0, 1))
    assert second[:4] == (
        Round(7, 3, 4),
        Round(7, 7, 8),
        Round(0, 0, 1),
        Round(7, 7, 8),
    )
    flags = [True] * 7 + [False] * 2 + [True] * 3 + [False] * 2
    assert list(drafted[0].from_draft[:14]) == flags
    for row in drafted:
        assert len(row.ids) == TOKENS and row.finish_reason == FinishReason.LENGTH
        assert adds_up(row)
    assert drafted[0].accepted_by_position(K)[0] == sum(r.accepted > 0 for r in first)
    assert drafted[0].alpha == drafted[0].accepted / drafted[0].drafted


def test_the_log_and_the_states_own_counters_agree(forced):
    run = Generation(engine(forced, 4), requests(), detokenize=spell)
    steps = list(run)
    assert run.completions == steps[-1]
    summed = total(run.final_state.stats)
    rows = run.completions
    assert summed["rounds"] == sum(len(row.rounds) for row in rows)
    assert summed["drafted"] == sum(row.drafted for row in rows)
    assert summed["accepted"] == sum(row.accepted for row in rows)
    assert summed["committed"] == sum(len(row.ids) for row in rows)
    by_position = [row.accepted_by_position(K) for row in rows]
    assert summed["accepted_by_position"] == np.sum(by_position, axis=0).tolist()
    assert run.times.prefill > 0 and run.times.decode > 0


@pytest.mark.parametrize("rounds_per_call", [1, 4])
def test_streaming_yields_growing_prefixes_of_the_result(
    forced, drafted, rounds_per_call
):
    seen = [0, 0]
    run = Generation(engine(forced, rounds_per_call), requests(), detokenize=spell)
    for rows in run:
        for i, row in enumerate(rows):
            assert grown(row, drafted[i])
            assert len(row.ids) >= seen[i]
            seen[i] = len(row.ids)
            running = row.finish_reason == FinishReason.NONE
            assert running == (len(row.ids) < TOKENS)
    assert run.completions == drafted


def test_logprobs_are_the_log_softmax_of_the_models_own_logits(drafted):
    for prompt, row in zip(PROMPTS, drafted, strict=True):
        whole = reference_logits(
            TOY.tensors, TOY.config, [*prompt, *row.ids], last=TOKENS + 1
        )[:-1]
        log_probs = whole - np.log(np.exp(whole).sum(axis=-1, keepdims=True))
        assert row.logprobs is not None
        for i, entry in enumerate(row.logprobs):
            assert entry.logprob == pytest.approx(log_probs[i, row.ids[i]], abs=1e-4)
            best = np.argsort(-log_probs[i])[:TOP]
            assert [token for token, _ in entry.top] == best.tolist()
            np.testing.assert_allclose(
                [value for _, value in entry.top], log_probs[i, best], atol=1e-4
            )
            # greedy, without penalties: the token is the most probable one
            assert entry.top[0] == (row.ids[i], entry.logprob)


# -- stop strings ---------------------------------------------------------------------


@pytest.mark.parametrize("rounds_per_call", [1, 4])
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, 0),  # the first of the eight tokens of the first round
        (1, 2),
        (6, 7),  # the bonus token
        (7, 8),  # across two rounds
        (8, 13),  # across three
        (TOKENS - 1, TOKENS - 1),  # where the budget ends
    ],
)
def test_a_stop_string_cuts_everything_at_the_same_place(
    forced, drafted, first, last, rounds_per_call
):
    text = drafted[0].text
    stop = text[2 * first : 2 * last + 2]
    begins = text.find(stop)  # it may have stood earlier already
    keep = (begins + len(stop) + 1) // 2
    rows = generate(
        engine(forced, rounds_per_call), requests(((stop,), ())), detokenize=spell
    )
    row, other = rows
    assert row.ids == drafted[0].ids[:keep]
    assert row.text == text[:begins]
    assert row.finish_reason == FinishReason.STOP_STRING
    assert adds_up(row)
    assert row.rounds == tuple(cut_rounds(drafted[0].rounds, keep))
    assert other == drafted[1]


def test_a_stop_string_may_begin_and_end_inside_tokens(forced, drafted):
    text = drafted[0].text
    stop = text[21:24]  # the second letter of token 10 to the first of token 12
    row = generate(engine(forced, 4), requests(((stop,), ())), detokenize=spell)[0]
    begins = text.find(stop)
    assert row.text == text[:begins]
    assert row.ids == drafted[0].ids[: (begins + 3 + 1) // 2]


@pytest.mark.parametrize("rounds_per_call", [1, 4])
def test_the_stop_string_that_is_complete_first_ends_the_row(
    forced, drafted, rounds_per_call
):
    ids, text = drafted[0].ids, drafted[0].text
    new = next(i for i in range(3, TOKENS) if ids[i] not in ids[:i])
    # the long one begins earlier, but the short one is complete while it still runs
    long, short = text[2 * new - 4 : 2 * new + 10], text[2 * new : 2 * new + 2]
    assert text.find(long) == 2 * new - 4
    row = generate(
        engine(forced, rounds_per_call), requests(((long, short), ())), detokenize=spell
    )[0]
    begins = text.find(short)
    assert row.text == text[:begins]
    assert row.ids == drafted[0].ids[: begins // 2 + 1]


def test_a_stop_string_that_never_comes_changes_nothing_but_the_request(
    forced, drafted
):
    rows = generate(
        engine(forced, 4), requests((("never",), ("zZzZ", "?"))), detokenize=spell
    )
    assert rows == drafted


def test_stop_strings_need_a_detokenizer(forced):
    with pytest.raises(RequestError, match="detokenize"):
        Generation(engine(forced, 4), requests((("x",), ())))


def test_without_a_detokenizer_there_is_no_text(forced, drafted):
    rows = generate(engine(forced, 4), requests())
    assert [row.text for row in rows] == [None, None]
    assert [row.ids for row in rows] == [row.ids for row in drafted]


@pytest.mark.parametrize(
    ("text", "stops", "place"),
    [
        ("", (), None),
        ("abc", (), None),
        ("abc", ("d",), None),
        ("abcabc", ("c",), 2),
        ("abcabc", ("ca", "b"), 1),
        ("abcabc", ("cab", "abc"), 0),
    ],
)
def test_first_stop_is_the_earliest_beginning(text, stops, place):
    assert first_stop(text, stops) == place


rounds_drawn = st.lists(
    st.integers(0, 4).flatmap(
        lambda accepted: st.builds(
            Round,
            st.integers(accepted, 5),
            st.just(accepted),
            st.sampled_from([accepted + 1, max(accepted, 1)]),
        )
    ),
    max_size=6,
)


@given(rounds_drawn, st.integers(0, 30))
@settings(max_examples=80)
def test_cut_rounds_is_the_cut_of_the_list_of_tokens(rounds, keep):
    tokens = [
        (i, j < r.accepted) for i, r in enumerate(rounds) for j in range(r.committed)
    ][:keep]
    wanted = [
        Round(r.drafted, tokens.count((i, True)), sum(t[0] == i for t in tokens))
        for i, r in enumerate(rounds)
        if any(t[0] == i for t in tokens)
    ]
    assert cut_rounds(rounds, keep) == wanted


def test_completion_arithmetic_by_hand():
    row = Completion(
        prompt_ids=(1,),
        ids=(2,) * 10,
        text=None,
        finish_reason=FinishReason.LENGTH,
        rounds=(Round(4, 4, 5), Round(4, 0, 1), Round(0, 0, 1), Round(4, 3, 3)),
        logprobs=None,
    )
    assert (row.drafted, row.accepted) == (12, 7)
    assert row.tau == 2.5
    assert row.alpha == 7 / 12
    assert row.accepted_by_position(4) == [2, 2, 2, 1]
    # the last round was cut among its drafts: no token of its own
    flags = [True] * 4 + [False] * 3 + [True] * 3
    assert row.from_draft == tuple(flags)


def test_a_second_iteration_is_a_run_of_its_own(plain):
    generation = Generation(engine(NullDrafter(), 4), requests(), detokenize=spell)
    for _ in zip(generation, range(2), strict=False):
        pass
    for _ in generation:
        pass
    assert [row.ids for row in generation.completions] == [row.ids for row in plain]


@pytest.mark.parametrize("rounds_per_call", [1, 5])
def test_half_a_character_is_not_text_yet(rounds_per_call):
    """A stop of U+FFFD would else be found while a character's bytes come in."""

    def halves(ids):
        whole, rest = divmod(len(ids), 2)
        return "é" * whole + "\ufffd" * rest

    asked = [dataclasses.replace(r, stop=("\ufffd",)) for r in requests()]
    rows = generate(engine(NullDrafter(), rounds_per_call), asked, detokenize=halves)
    assert all(row.finish_reason == FinishReason.LENGTH for row in rows)
