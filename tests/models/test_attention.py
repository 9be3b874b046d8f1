"""Writing accepted keys into the cache, slot by slot; rows that are kept out of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance, Window
from specjax.models.mixers import caches
from specjax.models.mixers.attention import Attention, KVCache
from specjax.models.mixers.caches import MOST_SLICED_ROWS, held_positions, sound_rows
from specjax.testing.toys import toy_llama

H, D, W = 2, 4, 5

write_path = jax.jit(caches.write_path, static_argnames=("in_ring", "spread"))


@pytest.mark.parametrize("capacity", [8, W, 3])
@pytest.mark.parametrize(
    ("times", "spread"), [(1, False), (1, True), (MOST_SLICED_ROWS, False)]
)
def test_exactly_the_accepted_rows_are_written_at_every_start(times, spread, capacity):
    batch = 3 * times  # written by slices, or by one scatter
    draw = np.random.default_rng(capacity)
    cache = draw.normal(size=(batch, H, capacity, D)).astype(np.float32)
    rows = draw.normal(size=(batch, W, H, D)).astype(np.float32)
    paths = [[0, 1, 2, 3, 4], [0, 2, 4, 1, 1], [0, 4, 3, 2, 1]]
    path = np.array(paths * times, np.int32)
    for start in range(capacity + 1):
        for num in range(W + 1):
            # each batch row at a place and with a count of its own
            starts = [start, capacity - start, max(start - 1, 0)] * times
            counts = [num, W - num, num] * times
            got = np.asarray(
                write_path(
                    jnp.asarray(cache),
                    jnp.asarray(rows),
                    Acceptance(
                        path=jnp.asarray(path),
                        tokens=jnp.asarray(path),
                        num_tokens=jnp.asarray(counts, jnp.int32),
                    ),
                    jnp.asarray(starts, jnp.int32),
                    spread=spread,
                )
            )
            wanted = cache.copy()
            for b in range(batch):
                for j in range(counts[b]):
                    if starts[b] + j < capacity:
                        wanted[b, :, starts[b] + j] = rows[b, path[b, j]]
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [1, 3, 4, W, 8])
def test_a_ring_holds_the_last_positions_whatever_was_committed(size):
    """Against a list of all positions, over many commits of any length."""
    draw = np.random.default_rng(size)
    batch, length = 3, np.zeros(3, np.int32)
    ring = jnp.full((batch, H, size, D), jnp.nan)
    history: list[list[np.ndarray]] = [[] for _ in range(batch)]
    for _ in range(30):
        rows = draw.normal(size=(batch, W, H, D)).astype(np.float32)
        counts = draw.integers(0, W + 1, batch).astype(np.int32)
        path = np.stack([np.sort(draw.permutation(W)) for _ in range(batch)])
        ring = write_path(
            ring,
            jnp.asarray(rows),
            Acceptance(
                path=jnp.asarray(path, jnp.int32),
                tokens=jnp.asarray(path, jnp.int32),
                num_tokens=jnp.asarray(counts),
            ),
            jnp.asarray(length),
            in_ring=True,
        )
        for b in range(batch):
            history[b] += [rows[b, path[b, j]] for j in range(counts[b])]
        length += counts
        held = np.asarray(held_positions(jnp.asarray(length), size))
        for b in range(batch):
            seen = {p for p in held[b].tolist() if p >= 0}
            assert seen == set(range(max(0, length[b] - size), length[b]))
            for slot, position in enumerate(held[b]):
                if position >= 0:
                    got = np.asarray(ring[b, :, slot])
                    np.testing.assert_array_equal(got, history[b][position])
                else:
                    assert np.isnan(np.asarray(ring[b, :, slot])).all()


def test_a_path_may_be_shorter_than_the_window():
    cache = jnp.zeros((1, H, 6, D), jnp.float32)
    rows = jnp.broadcast_to(
        jnp.arange(1, W + 1).astype(jnp.float32)[None, :, None, None], (1, W, H, D)
    )
    accepted = Acceptance(
        path=jnp.array([[0, 3]], jnp.int32),
        tokens=jnp.array([[7, 7]], jnp.int32),
        num_tokens=jnp.array([2], jnp.int32),
    )
    got = write_path(cache, rows, accepted, jnp.array([5], jnp.int32))
    # the second would stand beyond the end
    assert got[0, 0, :, 0].tolist() == [0, 0, 0, 0, 0, 1]
    got = write_path(cache, rows, accepted, jnp.array([4], jnp.int32))
    assert got[0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 4]


def test_rows_that_are_padding_or_not_finite_are_zeroed_in_both():
    k = np.ones((1, 4, H, D), np.float32)
    v = np.full((1, 4, H, D), 2, np.float32)
    k[0, 1, 0, 3] = np.nan
    v[0, 2, 1, 0] = np.inf
    window = Window(
        tokens=jnp.zeros((1, 4), jnp.int32),
        positions=jnp.zeros((1, 4), jnp.int32),
        ancestors=jnp.ones((1, 4, 4), bool),
        valid=jnp.array([[True, True, True, False]]),
    )
    keys, values = sound_rows((jnp.asarray(k), jnp.asarray(v)), window)
    assert keys[0, :, 0, 0].tolist() == [1, 0, 0, 0]
    assert values[0, :, 1, 1].tolist() == [2, 0, 0, 0]


def test_canonical_shows_the_committed_slots_and_hides_the_rest():
    mixer = toy_llama().decoder.blocks[0].mixer.body
    assert isinstance(mixer, Attention)
    dirty = jnp.full((2, H, 6, 8), jnp.nan).at[:, :, :3].set(5.0)
    got = mixer.canonical(KVCache(k=dirty, v=dirty), jnp.array([3, 0], jnp.int32))
    for leaf in jax.tree.leaves(got):
        assert leaf[0, 0, :, 0].tolist() == [5, 5, 5, 0, 0, 0]
        assert not leaf[1].any()
