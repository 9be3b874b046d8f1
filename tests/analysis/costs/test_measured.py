"""What is timed is what is meant; a replay is the run that it stands for."""

import jax.numpy as jnp
import pytest

from specjax.acceptance import Greedy
from specjax.analysis.costs.drafting import draft_part
from specjax.analysis.costs.machine import matrix_parts, read_bytes, read_parts
from specjax.analysis.costs.rounds import (
    ROUNDS,
    Filled,
    accept_part,
    commit_part,
    round_part,
)
from specjax.analysis.costs.sample import (
    Sample,
    Texts,
    requests_of,
    sample,
    write_texts,
)
from specjax.analysis.costs.scripted import Scripted
from specjax.analysis.costs.timing import Part, compile_all, in_turn
from specjax.decoding.engine import Engine
from specjax.decoding.generate import generate
from specjax.decoding.windows import chunk_window
from specjax.drafters import DRAFTERS, DrafterOptions
from specjax.testing.toys import toy_llama

PROMPTS = ((3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (5, 6, 5, 6, 5, 6, 5))


@pytest.fixture(scope="module")
def target():
    return toy_llama().decoder


@pytest.fixture(scope="module")
def texts(target):
    return write_texts(target, PROMPTS, 20)


def drafter(name, k=4):
    return DRAFTERS[name].build(DrafterOptions(k=k))


@pytest.mark.parametrize(
    "name", ["ngram", pytest.param("suffix-tree", marks=pytest.mark.full)]
)
def test_a_replay_is_the_run(target, texts, name):
    made = drafter(name)
    done = generate(Engine(target, made, Greedy()), requests_of(PROMPTS, 20))
    assert tuple(each.ids for each in done) == texts.outputs
    assert sample(target, made, texts) == Sample.of(done)


def test_another_text_is_another_run(texts):
    """The script is what is replayed, and not something that always fits."""
    other = Texts(texts.prompts, tuple(tuple(range(20, 40)) for _ in texts.outputs))
    script = Scripted.of(other.whole, 61)
    (first, _) = generate(
        Engine(script, drafter("ngram"), Greedy()), requests_of(PROMPTS, 20)
    )
    assert first.ids == other.outputs[0]


def test_a_script_has_no_taps(texts):
    script = Scripted.of(texts.whole, 61)
    rows = jnp.zeros((2,), jnp.int32)
    window = chunk_window(script.truth, rows, rows + 3, 3)
    logits = script.verify(None, window).logits
    assert logits is not None
    assert (logits.argmax(-1) == script.truth[:, 1:4]).all()
    with pytest.raises(ValueError, match="no hidden states to tap"):
        script.verify(None, window, taps=(0,))
    with pytest.raises(ValueError, match="2 texts for 3 rows"):
        script.init(3, 64)


def test_parts_of_a_round_run_and_leave_the_state_alone(target):
    filled = Filled.make(target, PROMPTS[0], batch=2, widest=3)
    before = jnp.copy(filled.state.target.lengths)
    for make in (round_part, accept_part, commit_part):
        part = make(filled, 3)
        assert [part.call(part.prepare()) for _ in range(2)] == [ROUNDS] * 2
    assert (filled.state.target.lengths == before).all()


def test_drafting_runs_for_drafters_with_and_without_memory(target):
    text = [3, 4, 5, 6] * 6
    for name in ("ngram", "suffix"):
        part = draft_part(name, target, drafter(name, 2), text, batch=2)
        assert [part.call(part.prepare()) for _ in range(2)] == [ROUNDS] * 2
    with pytest.raises(ValueError, match="give more than"):
        draft_part("ngram", target, drafter("ngram"), text[:ROUNDS], batch=1)


def test_device_parts():
    parts = [*read_parts(10**6), *matrix_parts(("float32",))]
    compile_all(parts)
    assert all(part.call(None) == 1 for part in parts)
    assert 0.9e6 < read_bytes(10**6) <= 10**6


def test_in_turn_times_each_once_a_turn_and_divides_by_the_count():
    calls = []

    def part(name, count):
        def call(prepared):
            calls.append((name, prepared))
            return count

        return Part(name, call, prepare=lambda: f"for {name}")

    told = []
    times = in_turn([part("a", 1), part("b", 10**9)], 0.0, told.append, least=4)
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4}
    assert told == [f"timing, turn {turn}" for turn in (1, 2, 3, 4)]
    for turn in range(4):
        pair = calls[2 * turn : 2 * turn + 2]
        assert {name for name, _ in pair} == {"a", "b"}
    assert all(prepared == f"for {name}" for name, prepared in calls)
    assert max(times["b"]) < 1e-9 < max(times["a"])
    with pytest.raises(ValueError, match="parts of the same name"):
        in_turn([part("a", 1), part("a", 1)], 0.0, told.append)
