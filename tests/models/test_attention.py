"""Writing accepted keys into the cache, slot by slot; rows that are kept out of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Acceptance, Window
from specjax.models.mixers import attention
from specjax.models.mixers.attention import (
    MOST_SLICED_ROWS,
    Attention,
    KVCache,
    WindowKV,
    sound_rows,
)
from specjax.testing.toys import toy_llama

H, D, W = 2, 4, 5

write_path = jax.jit(attention.write_path)


@pytest.mark.parametrize("capacity", [8, W, 3])
@pytest.mark.parametrize("times", [1, MOST_SLICED_ROWS])
def test_exactly_the_accepted_rows_are_written_at_every_start(times, capacity):
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
                )
            )
            wanted = cache.copy()
            for b in range(batch):
                for j in range(counts[b]):
                    if starts[b] + j < capacity:
                        wanted[b, :, starts[b] + j] = rows[b, path[b, j]]
            np.testing.assert_array_equal(got, wanted)


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
    got = sound_rows(WindowKV(k=jnp.asarray(k), v=jnp.asarray(v)), window)
    assert got.k[0, :, 0, 0].tolist() == [1, 0, 0, 0]
    assert got.v[0, :, 1, 1].tolist() == [2, 0, 0, 0]


def test_canonical_shows_the_committed_slots_and_hides_the_rest():
    mixer = toy_llama().decoder.blocks[0].mixer.body
    assert isinstance(mixer, Attention)
    dirty = jnp.full((2, H, 6, 8), jnp.nan).at[:, :, :3].set(5.0)
    got = mixer.canonical(KVCache(k=dirty, v=dirty), jnp.array([3, 0], jnp.int32))
    for leaf in jax.tree.leaves(got):
        assert leaf[0, 0, :, 0].tolist() == [5, 5, 5, 0, 0, 0]
        assert not leaf[1].any()
