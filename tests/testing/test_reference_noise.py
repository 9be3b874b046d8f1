"""The reference's generator against its publication and against jax.random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import noise as decoder_noise
from specjax.testing.reference import noise

WORD = 2**32 - 1

# "Random123", known-answer tests, threefry2x32 with 20 rounds: key, counter, result
PUBLISHED = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((WORD, WORD), (WORD, WORD), (0x1CB996FC, 0xBB002BE7)),
    (
        (0x13198A2E, 0x03707344),
        (0x243F6A88, 0x85A308D3),
        (0xC4923A9C, 0x483DF7A0),
    ),
]

# seed, position, bits of stream 0: what a seed means must not change with jax
GOLDEN = [
    (0, 0, [0x486056AF, 0xC9C0BF0F, 0x65C8094A, 0xEC729344]),
    (42, 1, [0x3A788AB0, 0xEF9B047A, 0x92C41FD9, 0x1E667983, 0x401AE314]),
    (WORD, 100_000, [0xE546F176, 0x53AB61F3, 0xAC751D63]),
]

SIZES = [1, 2, 3, 7, 128, 257, 1001]


def cases(size: int, count: int = 40):
    """Seeds and positions, the extremes among them."""
    draw = np.random.default_rng(size)
    seeds = draw.integers(0, 2**32, count, dtype=np.uint64)
    positions = draw.integers(0, 2**17, count, dtype=np.int64)
    seeds[:3], positions[:3] = (0, 1, WORD), (0, 2**31 - 1, 1)
    return seeds.astype(np.uint32), positions.astype(np.int32)


@pytest.mark.parametrize(("key", "counter", "result"), PUBLISHED)
def test_threefry_gives_the_published_answers(key, counter, result):
    assert noise.threefry(key, *counter) == result
    arrays = [np.array([word], np.uint64) for word in counter]
    assert tuple(int(word[0]) for word in noise.threefry(key, *arrays)) == result


@pytest.mark.parametrize(("seed", "position", "bits"), GOLDEN)
def test_what_a_seed_means_is_fixed(seed, position, bits):
    key = noise.fold_in(noise.fold_in(noise.key_of(seed), position), noise.TARGET)
    assert noise.bits(key, len(bits)).tolist() == bits
    theirs = decoder_noise.row_keys(
        jnp.array([seed], jnp.uint32),
        jnp.array([position], jnp.int32),
        decoder_noise.Stream.TARGET,
    )[0]
    assert jax.random.bits(theirs, (len(bits),), jnp.uint32).tolist() == bits


@pytest.mark.parametrize("size", SIZES)
def test_bits_are_those_of_jax(size):
    seeds, positions = cases(size)
    streams = list(decoder_noise.Stream)
    keys = [
        decoder_noise.row_keys(jnp.array(seeds), jnp.array(positions), stream)
        for stream in streams
    ]
    draw = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (size,), jnp.uint32)))
    theirs = np.asarray(draw(jnp.stack(keys)))
    for stream in streams:
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            key = noise.fold_in(noise.key_of(int(seed)), int(position))
            ours = noise.bits(noise.fold_in(key, int(stream)), size)
            assert ours.dtype == np.uint32
            np.testing.assert_array_equal(ours, theirs[stream, row])


@pytest.mark.parametrize("size", [*SIZES, 49_152])
def test_noise_is_the_decoders(size):
    seeds, positions = cases(size, count=40 if size < 2000 else 8)
    theirs = np.asarray(
        decoder_noise.gumbel(jnp.array(seeds), jnp.array(positions), size)
    )
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        ours = noise.gumbel(int(seed), int(position), size)
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, theirs[row], rtol=0, atol=1e-5)


def test_streams_differ():
    assert noise.TARGET == decoder_noise.Stream.TARGET
    one, other = (noise.gumbel(3, 5, 64, stream) for stream in (0, 1))
    assert not np.any(one == other)


@pytest.mark.parametrize(
    ("bits", "uniform"),
    [(0, 2.0**-33), (WORD, 1 - 2.0**-24), (2**31, 0.5)],
)
def test_the_ends_of_the_range(bits, uniform, monkeypatch):
    drawn = np.array([bits], np.uint32)
    monkeypatch.setattr(noise, "bits", lambda key, size: drawn)
    expected = -np.log(-np.log1p(-uniform))
    np.testing.assert_allclose(noise.gumbel(0, 0, 1), expected, rtol=1e-6)


def test_noise_is_gumbel():
    """Mean and variance, within five standard errors."""
    drawn = noise.gumbel(11, 0, 1_000_000)
    assert abs(drawn.mean() - np.euler_gamma) < 5 * 1.2826e-3
    assert abs(drawn.var() - np.pi**2 / 6) < 5 * 3.45e-3


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match="32-bit"):
        noise.gumbel(seed, 0, 1)
