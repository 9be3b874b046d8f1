"""Pages: nothing is lost, nothing is held twice, and paging changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance, FinishReason
from specjax.drafters.ngram import NGram
from specjax.models import pages
from specjax.models.pages import Paged, PageTable, PoolError, empty_table
from specjax.testing.toys import toy_llama


def check_whole(table: PageTable, lengths: np.ndarray) -> None:
    """Every page is free or held by one row, and rows hold what they need."""
    held = np.asarray(table.held)
    free = np.asarray(table.free)[: int(table.num_free)]
    ids = [page for row, n in zip(table.table, held, strict=True) for page in row[:n]]
    assert sorted([*map(int, ids), *free.tolist()]) == list(range(table.pages))
    assert (held * table.page_size >= lengths).all()
    for row, n in zip(np.asarray(table.table), held, strict=True):
        assert (row[n:] == table.pages).all()


@pytest.mark.parametrize(("size", "count"), [(1, 40), (3, 10), (4, 11), (16, 6)])
def test_rounds_commits_and_releases_lose_no_page(size, count):
    """A few hundred rounds of a batch, whole at each."""
    batch, capacity, most = 4, 30, 5
    draw = np.random.default_rng(size)
    table = empty_table(Paged(count, size), batch, capacity)
    lengths = np.zeros(batch, np.int32)
    room = jax.jit(pages.room)
    take, give_back = jax.jit(pages.take), jax.jit(pages.give_back)
    stalled = 0
    for _ in range(300):
        active = draw.random(batch) < 0.8
        most_now = np.minimum(most, capacity - lengths)
        limit = jnp.asarray(most_now, jnp.int32)
        promised = np.asarray(room(table, jnp.asarray(lengths), limit, active))
        assert (promised >= 0).all()
        assert (promised <= most_now).all()
        dry = (promised == 0) & active & (most_now > 0)
        stalled += int(dry.sum())
        # a row has nothing only if a page for each row's next token is too much
        full = active & (np.asarray(table.held) * size == lengths) & (most_now > 0)
        assert dry.sum() == max(0, full.sum() - int(table.num_free))
        wanted = np.minimum(draw.integers(0, most + 1, batch), most_now)
        num = np.where(active, np.minimum(promised, wanted), 0).astype(np.int32)
        path = jnp.zeros((batch, most), jnp.int32)
        table = take(table, jnp.asarray(lengths), Acceptance(path, path, num))
        lengths = lengths + num
        check_whole(table, lengths)
        gone = (draw.random(batch) < 0.1) | (lengths >= capacity)
        table = give_back(table, gone)
        lengths = np.where(gone, 0, lengths).astype(np.int32)
        check_whole(table, lengths)
    assert stalled or size * count >= batch * capacity  # scarcity was met


def held_by(lengths: list[int], options: Paged) -> PageTable:
    """A table whose rows have taken pages for so many tokens."""
    path = jnp.zeros((len(lengths), max(lengths)), jnp.int32)
    table = empty_table(options, len(lengths), 8 * options.page_size)
    taken = Acceptance(path, path, jnp.array(lengths, jnp.int32))
    return pages.take(table, jnp.zeros(len(lengths), jnp.int32), taken)


def test_drafts_of_one_row_never_end_another():
    """A row may ask for more than it will use, and the last page is another's."""
    lengths, everyone = jnp.array([7, 4], jnp.int32), jnp.array([True, True])
    table = held_by([7, 4], Paged(4, 4))
    assert (table.held.tolist(), int(table.num_free)) == ([2, 1], 1)
    for most, wanted in (([9, 9], [1, 4]), ([1, 1], [1, 1]), ([1, 3], [1, 3])):
        got = pages.room(table, lengths, jnp.array(most, jnp.int32), everyone)
        assert got.tolist() == wanted
    # pages of one token: all of them are asked for by the first row
    table = held_by([2, 2, 2], Paged(10, 1))
    asked, lengths = jnp.array([9, 9, 9], jnp.int32), jnp.array([2, 2, 2], jnp.int32)
    got = pages.room(table, lengths, asked, jnp.array([True, False, True]))
    assert got.tolist() == [3, 0, 1]


@pytest.mark.full
def test_ten_thousand_rounds_leak_nothing():
    """The whole run is one scan, so that ten thousand rounds take seconds."""
    batch, capacity, most, options = 6, 96, 9, Paged(20, 16)

    def step(carry, key):
        table, lengths = carry
        keys = jax.random.split(key, 3)
        active = jax.random.bernoulli(keys[0], 0.8, (batch,))
        promised = pages.room(table, lengths, jnp.full((batch,), most), active)
        num = jax.random.randint(keys[1], (batch,), 0, most + 1, jnp.int32)
        num = jnp.minimum(num, jnp.minimum(promised, capacity - lengths))
        num = jnp.where(active, num, 0)
        path = jnp.zeros((batch, most), jnp.int32)
        table = pages.take(table, lengths, Acceptance(path, path, num))
        lengths = lengths + num
        gone = jax.random.bernoulli(keys[2], 0.03, (batch,)) | (lengths >= capacity)
        table, lengths = pages.give_back(table, gone), jnp.where(gone, 0, lengths)
        sound = (table.num_free + table.held.sum() == options.pages) & (
            table.num_free >= 0
        )
        return (table, lengths), sound

    start = (empty_table(options, batch, capacity), jnp.zeros((batch,), jnp.int32))
    keys = jax.random.split(jax.random.key(0), 10_000)
    (table, lengths), sound = jax.jit(lambda s, k: jax.lax.scan(step, s, k))(
        start, keys
    )
    assert bool(jnp.all(sound))
    check_whole(table, np.asarray(lengths))
    table = pages.give_back(table, jnp.ones((batch,), bool))
    assert int(table.num_free) == options.pages


REQUESTS = [
    Request(prompt_ids=[5, 6, 7, 5, 6, 7, 5, 6], max_tokens=30, seed=1),
    Request(prompt_ids=[9], max_tokens=7, seed=2, temperature=0.8),
    Request(prompt_ids=list(range(3, 40)), max_tokens=20, seed=3, temperature=1.1),
]


def run(paged: Paged | None, requests=REQUESTS):
    decoder = toy_llama().decoder.replace(paged=paged)
    engine = Engine(
        decoder,
        NGram(k=4, min_n=1),
        RULES["coupled"].build(),
        EngineOptions(prefill_width=8),
    )
    return engine, generate(engine, requests)


@pytest.mark.parametrize("size", [4, pytest.param(16, marks=pytest.mark.full)])
def test_paging_changes_no_token_and_no_bit_of_the_state(size):
    (plain, wanted), (paged, got) = run(None), run(Paged(80, size))
    assert [c.ids for c in got] == [c.ids for c in wanted]
    states = []
    for engine in (plain, paged):
        state = engine.prefill(engine.start(REQUESTS))
        state, _ = engine.rounds(state)
        states.append(engine.target.canonical(state.target))
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_pool_that_runs_dry_ends_rows_and_changes_no_token_of_others():
    _, wanted = run(None)
    # the prompts need 2 + 1 + 10 pages of four
    _, got = run(Paged(16, 4))
    reasons = [c.finish_reason for c in got]
    assert FinishReason.CAPACITY in reasons
    for ours, full in zip(got, wanted, strict=True):
        assert ours.ids == full.ids[: len(ours.ids)]
        if ours.finish_reason is not FinishReason.CAPACITY:
            assert ours.ids == full.ids


def test_prompts_that_no_pool_holds_are_refused():
    with pytest.raises(PoolError, match=r"13 pages of 4 tokens.*12"):
        run(Paged(12, 4))
    with pytest.raises(PoolError, match="at least one page"):
        Paged(0, 4)


def test_released_rows_give_their_pages_back():
    engine, _ = run(Paged(80, 4))
    state = engine.prefill(engine.start(REQUESTS)).target
    before = int(state.pages.num_free)
    rows = jnp.array([False, False, True])
    state = engine.target.release(state, rows)
    assert int(state.pages.num_free) == before + 9
    assert state.lengths.tolist() == [7, 0, 0]
