"""Gumbel noise keyed by (row seed, absolute position), written from its definition.

The generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", 2011): a 64-bit counter, enciphered under a 64-bit key. The way
keys are derived and counters laid out is that of ``jax.random`` with its
"partitionable" layout, its default.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Word = TypeVar("Word", int, np.ndarray)
"""32-bit words: a Python integer, or an array of uint64 that is kept below 2**32."""

Key = tuple[int, int]

TARGET = 0
"""The stream of plain sampling and of the coupled rule."""

WORD = 0xFFFFFFFF
PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: Key, high: Word, low: Word) -> tuple[Word, Word]:
    """Encipher the counter ``(high, low)``: five groups of four rounds."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    a, b = (high + keys[0]) & WORD, (low + keys[1]) & WORD
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = (a + b) & WORD
            b = ((b << rotation) | (b >> (32 - rotation))) & WORD
            b = a ^ b
        a = (a + keys[(group + 1) % 3]) & WORD
        b = (b + keys[(group + 2) % 3] + group + 1) & WORD
    return a, b


def key_of(seed: int) -> Key:
    """The key of a 32-bit seed."""
    if not 0 <= seed <= WORD:
        raise ValueError(f"a seed is an unsigned 32-bit number, not {seed}")
    return 0, seed


def fold_in(key: Key, data: int) -> Key:
    """A new key from a key and a 32-bit number."""
    return threefry(key, 0, data)


def bits(key: Key, size: int) -> np.ndarray:
    """``[size]`` uint32: element ``i`` is both halves of counter ``i``, exclusive-or'd.

    The 64-bit counters are below 2**32 here, so their upper word is 0.
    """
    counters = np.arange(size, dtype=np.uint64)
    high, low = threefry(key, np.zeros_like(counters), counters)
    return (high ^ low).astype(np.uint32)


def gumbel(seed: int, position: int, size: int, stream: int = TARGET) -> np.ndarray:
    """``[size]`` float64: the noise of the token at ``position`` of the sequence."""
    drawn = bits(fold_in(fold_in(key_of(seed), position), stream), size)
    # The uniform is by definition a float32 number below 1: computed otherwise it
    # would be another number where it is close to 1, and so would be the noise.
    uniform = (drawn.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = np.minimum(uniform, np.float32(1.0 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-uniform))
