"""A draft model of another vocabulary: maps by hand, true laws, the target's tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import RULES, Coupled
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.interfaces import Target
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.trees import full
from specjax.drafters import DraftModel, DraftTree, NullDrafter
from specjax.drafters.drawing import Pick
from specjax.drafters.vocabulary import Translated, Vocabulary, match
from specjax.testing.conformance import check_drafter
from specjax.testing.markov import Markov, markov
from specjax.testing.toys import toy_llama

V, LARGER = 16, 21
TARGET = markov(4, V, 0.3)


def permuted(seed: int = 0) -> tuple[Markov, Vocabulary]:
    """The target itself, its ids in another order among five more tokens."""
    place = np.random.default_rng(seed).permutation(LARGER)[:V]
    table = np.full((LARGER, LARGER), -3.0, np.float32)
    table[np.ix_(place, place)] = TARGET.table
    words = [f"w{i}" for i in range(V)]
    theirs: list[str | None] = [None] * LARGER
    for word, i in zip(words, place, strict=True):
        theirs[i] = word
    return Markov(jnp.asarray(table)), match(words, theirs, V, LARGER)


def lacking(missing: tuple[int, ...]) -> Translated:
    """Another model, which lacks some of the target's tokens."""
    words = [f"w{i}" for i in range(V)]
    theirs = [w for i, w in enumerate(words) if i not in missing][::-1]
    model = markov(7, len(theirs), 0.5)
    return Translated(model, match(words, theirs, V, len(theirs), stand_in=2))


def requests(temperature: float, rows: int = 2, tokens: int = 24, **fields):
    return [
        Request(
            prompt_ids=(5, 1, 14, 3 + row % 9),
            max_tokens=tokens,
            temperature=temperature,
            seed=row,
            **fields,
        )
        for row in range(rows)
    ]


def run(drafter, asked, rule=None):
    options = EngineOptions(prefill_width=8, widths=(drafter.max_nodes + 1,))
    return generate(Engine(TARGET, drafter, rule or Coupled(), options), asked)


def test_a_map_by_hand():
    target = ["a", "b", None, "c", "</s>"]
    draft = ["b", "<eos>", "a", "z"]
    got = match(target, draft, 6, 5, same=[(4, 1)], stand_ins={3: 2}, stand_in=3)
    assert got.said.tolist() == [2, 0, -1, -1, 1, -1]
    assert got.fed.tolist() == [2, 0, 3, 2, 1, 3]
    assert (got.size, got.shared) == (6, 3)
    # what spells an end of text elsewhere gives way to what is one
    got = match(["a", "b"], ["a", "b"], 2, 2, same=[(0, 1)])
    assert got.said.tolist() == [1, -1]


def test_padding_is_no_token():
    words = ["a", "b", "c"]
    wide, narrow = match(words, words, 5, 3), match(words, words, 3, 8)
    assert wide.said.tolist() == [0, 1, 2, -1, -1] and wide.fed.tolist()[3:] == [0, 0]
    assert narrow.said.tolist() == narrow.fed.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"target": ["x"]}, "no token in common"),
        ({"same": [(9, 0)]}, "id 9 is not in the target's vocabulary of 2"),
        ({"same": [(0, 9)]}, "id 9 is not in the draft model's vocabulary of 2"),
        ({"stand_in": 2, "target": ["a", "x"]}, "id 2 is not in the draft model's"),
        ({"stand_ins": {5: 0}}, "id 5 is not in the target's"),
    ],
)
def test_what_cannot_be_matched_is_refused(fields, problem):
    given = {"target": ["a", "b"], "draft": ["a", "b"]} | fields
    with pytest.raises(ValueError, match=problem):
        match(given.pop("target"), given.pop("draft"), 2, 2, **given)


@pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.9]
)
def test_the_target_in_other_ids_is_always_right(temperature):
    model, vocabulary = permuted()
    translated = Translated(model, vocabulary)
    assert isinstance(translated, Target) and translated.vocab_size == V
    for row in run(DraftModel(translated, 3), requests(temperature)):
        whole = [r for r in row.rounds if r.drafted == 3]
        assert len(whole) > 3 and all(r.accepted == 3 for r in whole[:-1])


def test_a_crossed_map_is_seen():
    model, vocabulary = permuted()
    asked = requests(0.0, rows=6, tokens=40)

    def alpha(vocabulary: Vocabulary) -> float:
        rows = run(DraftModel(Translated(model, vocabulary), 3), asked)
        return sum(r.accepted for r in rows) / sum(r.drafted for r in rows)

    right = alpha(vocabulary)
    assert right > 0.9
    roll = jnp.roll(vocabulary.said, 1)
    assert alpha(vocabulary.replace(said=roll)) < 0.5 * right
    assert alpha(vocabulary.replace(fed=jnp.roll(vocabulary.fed, 1))) < 0.7 * right


def test_tokens_that_are_missing_are_never_said():
    translated = lacking((3, 8, 9))
    engine = Engine(TARGET, DraftModel(translated, 3, pick=Pick.DRAWN), Coupled())
    state = engine.prefill(engine.start(requests(1.0)))
    got = engine.drafter.propose(state.drafter, context_of(state))[0]
    assert got.log_q is not None
    q = np.exp(np.asarray(got.log_q))[:, :3]
    assert np.all(q[..., [3, 8, 9]] == 0) and np.allclose(q.sum(axis=-1), 1, atol=1e-5)
    # by the table: the law of the first draft, in the draft model's ids
    model, vocabulary = translated.model, translated.vocabulary
    assert isinstance(model, Markov)
    for row, last in enumerate((3, 4)):
        law = np.exp(np.asarray(model.table))[int(vocabulary.fed[last])]
        said = np.asarray(vocabulary.said)
        wanted = np.where(said >= 0, law[np.maximum(said, 0)], 0)
        np.testing.assert_allclose(q[row, 0], wanted / wanted.sum(), atol=1e-5)


def test_drawn_drafts_keep_the_targets_law():
    """First tokens of many rows under rejection, tokens that are never drafted too."""
    rows = 3000
    asked = [
        Request(prompt_ids=(5, 3), max_tokens=1 + row % 2, temperature=1.0, seed=row)
        for row in range(rows)
    ]
    drafter = DraftModel(lacking((0, 3, 8, 9)), 2, pick=Pick.DRAWN)
    told = [row.ids for row in run(drafter, asked, RULES["rejection"].build())]
    law = np.exp(np.asarray(jax.nn.log_softmax(TARGET.table, axis=-1)))
    first = np.bincount([ids[0] for ids in told], minlength=V) / rows
    assert np.all(np.abs(first - law[3]) < 4.5 * np.sqrt(law[3] / rows) + 1e-3)
    second = np.bincount([ids[1] for ids in told if len(ids) > 1], minlength=V)
    wanted = law[3] @ law
    count = second.sum()
    assert np.all(np.abs(second / count - wanted) < 4.5 * np.sqrt(wanted / count))


@pytest.mark.parametrize(
    "drafter",
    [
        DraftModel(lacking((0, 3, 8, 9)), 3),
        pytest.param(
            DraftTree(lacking((0, 3, 8, 9)), full((2, 2))), marks=pytest.mark.full
        ),
    ],
)
def test_no_token_is_changed(drafter):
    """With cut-offs as wide as the shared tokens, or wider."""
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "top_k": 14}
    asked = requests(0.8, top_p=0.9, min_p=0.01, **settings)
    plain = run(NullDrafter(), asked)
    rows = run(drafter, asked)
    assert [row.ids for row in rows] == [row.ids for row in plain]
    assert sum(row.accepted for row in rows) > 0


@pytest.mark.full
def test_conformance():
    toy, other = toy_llama(), toy_llama(1, vocab_size=50)
    ours = [f"w{i}" for i in range(toy.decoder.vocab_size)]
    theirs = [f"w{i}" for i in range(20, 70)]
    vocabulary = match(ours, theirs, len(ours), len(theirs), stand_in=7)
    drafter = DraftModel(Translated(other.decoder, vocabulary), 3)
    check_drafter(drafter, toy, Coupled(), widths=(4,)).assert_ok()
