"""Rotary position embeddings (Su et al., 2104.09864) in half-split form."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's scaling: long wavelengths are stretched by ``factor``, short ones stay,
    and those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (position interpolation)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2309.00071): pairs that turn fewer than ``beta_slow`` times
    within the original context are stretched by ``factor``, those that turn more than
    ``beta_fast`` times stay, and those between are blended.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the blend begins and ends at whole pairs."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines, so the scores grow by its square."""


Scaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Which dimensions of a head rotate, and how fast.

    Dimensions ``i`` and ``i + dims / 2`` form a pair that turns by
    ``position * theta ** (-2 i / dims)``; dimensions beyond ``dims`` stay as they are.
    """

    theta: float
    dims: int
    scaling: Scaling | None = None

    def frequencies(self) -> np.ndarray:
        """``[dims / 2]`` float64 radians a position."""
        pairs = np.arange(0, self.dims, 2, dtype=np.float64)
        frequencies = self.theta ** (-pairs / self.dims)
        match self.scaling:
            case Llama3Scaling():
                return _llama3(frequencies, self.scaling)
            case LinearScaling():
                return frequencies / self.scaling.factor
            case YarnScaling():
                return _yarn(frequencies, self.scaling, self)
        return frequencies

    def tables(
        self, positions: Int[Array, "B W"], dtype: jnp.dtype
    ) -> tuple[Float[Array, "B W half"], Float[Array, "B W half"]]:
        """Cosines and sines for a window's rows, worked out once for all blocks."""
        frequencies = jnp.asarray(self.frequencies(), dtype)
        angles = positions.astype(dtype)[:, :, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if isinstance(self.scaling, YarnScaling):
            factor = jnp.asarray(self.scaling.attention_factor, dtype)
            return cos * factor, sin * factor
        return cos, sin


def rotate(
    x: Float[Array, "B W H D"],
    cos: Float[Array, "B W half"],
    sin: Float[Array, "B W half"],
) -> Float[Array, "B W H D"]:
    """Turn the first ``2 * half`` dimensions of every head."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelengths = 2 * math.pi / frequencies
    length = scaling.original_max_position_embeddings
    low = length / scaling.low_freq_factor
    high = length / scaling.high_freq_factor
    blend = (length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = np.where(wavelengths > low, frequencies / scaling.factor, blended)
    return np.where(wavelengths < high, frequencies, scaled)


def _yarn(frequencies: np.ndarray, scaling: YarnScaling, rope: Rope) -> np.ndarray:
    def pair_of(turns: float) -> float:
        """The pair, as a real number, that turns so often in the original context."""
        wavelength = scaling.original_max_position_embeddings / turns
        return rope.dims * math.log(wavelength / (2 * math.pi)) / 2 / math.log(theta)

    theta = rope.theta
    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    high += 0.001 if high == low else 0.0  # a step instead of a division by 0
    pairs = np.arange(len(frequencies), dtype=np.float64)
    stretched = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
