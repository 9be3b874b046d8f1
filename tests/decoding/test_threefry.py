"""The bits are those of ``jax.random``, and threefry gives its published answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.noise import Stream, round_keys, row_keys
from specjax.decoding.threefry import bits_of, threefry
from specjax.testing.reference import noise

ONES = 0xFFFFFFFF

# "Random123", known-answer tests, threefry2x32 with 20 rounds: key, counter, result
ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def word(value: int) -> jax.Array:
    return jnp.full((1, 1), value, jnp.uint32)


@pytest.mark.parametrize(("key", "counter", "result"), ANSWERS)
def test_published_answers(key, counter, result):
    a, b = threefry(*map(word, key), *(word(c)[0] for c in counter))
    assert (int(a[0, 0]), int(b[0, 0])) == result


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("stream", Stream)
def test_bits_are_those_of_jax_random(size, stream):
    seeds = jnp.array([0, 1, 7, ONES], jnp.uint32)
    positions = jnp.array([0, 3, 100, 2**31 - 1], jnp.int32)
    nodes = jnp.array([0, 1, 2, 63], jnp.int32)
    by_place = row_keys(seeds, positions, stream)
    for keys in (by_place, round_keys(seeds, positions, stream, nodes)):
        ours = np.asarray(jax.jit(bits_of, static_argnums=1)(keys, size))
        bits = jax.vmap(lambda key: jax.random.bits(key, (size,), jnp.uint32))
        np.testing.assert_array_equal(ours, jax.jit(bits)(keys))
        words = np.asarray(jax.random.key_data(keys)).tolist()
        reference = [noise.bits((int(a), int(b)), size) for a, b in words]
        np.testing.assert_array_equal(ours, reference)


def test_bits_without_the_partitionable_layout():
    """The layout is part of the definition, whatever ``jax.random`` is set to."""
    words = jnp.array([[3, 9]], jnp.uint32)

    @jax.jit
    def ours(words):
        return bits_of(jax.random.wrap_key_data(words, impl="threefry2x32"), 8)[0]

    @jax.jit
    def theirs(words):
        key = jax.random.wrap_key_data(words[0], impl="threefry2x32")
        return jax.random.bits(key, (8,), jnp.uint32)

    usual = np.asarray(ours(words))
    np.testing.assert_array_equal(usual, theirs(words))
    with jax.threefry_partitionable(False):
        assert (np.asarray(theirs(words)) != usual).any()
        np.testing.assert_array_equal(ours(words), usual)
