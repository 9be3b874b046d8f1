"""What the law needs to know of a model and of a device, in SI units."""

from __future__ import annotations

import dataclasses

Number = float | int
"""Integers are numbers too, also to checkers that go by the letter."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A dense decoder, as far as memory and arithmetic go."""

    parameters: Number
    """That a token passes through; of a mixture of experts the active ones."""
    kv_bytes: Number
    """Of keys and values that one more token of context takes (all layers)."""
    weight_bytes: Number = 2.0
    """A parameter: 2 for float16 and bfloat16."""

    def __post_init__(self) -> None:
        for name in ("parameters", "weight_bytes"):
            positive(name, getattr(self, name))
        at_least("kv_bytes", self.kv_bytes, 0)

    @property
    def bytes(self) -> Number:
        """Of all weights: what a step reads."""
        return self.parameters * self.weight_bytes

    @property
    def flops(self) -> Number:
        """Floating-point operations for one token: a multiply and an add a weight."""
        return 2 * self.parameters


@dataclasses.dataclass(frozen=True)
class Device:
    """How fast memory is read and matrices are multiplied."""

    bandwidth: Number
    """Bytes a second."""
    flops: Number
    """Floating-point operations a second, dense, of the weights' type."""
    memory_share: Number = 1.0
    """Of the bandwidth, what a step attains: the lecture's MBU."""
    compute_share: Number = 1.0
    """Of the operations, what a step attains: the lecture's MFU."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops"):
            positive(name, getattr(self, name))
        for name in ("memory_share", "compute_share"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"{name} = {value}: it must lie in 0 .. 1, above 0")

    @property
    def ridge(self) -> float:
        """FLOP a byte at which reading and multiplying take equally long."""
        return self.flops / self.bandwidth


def positive(name: str, value: Number) -> Number:
    """The value, if it is above 0."""
    if not value > 0:
        raise ValueError(f"{name} = {value}: it must be above 0")
    return value


def at_least(name: str, value: Number, least: Number) -> Number:
    """The value, if it is no smaller than that."""
    if not value >= least:
        raise ValueError(f"{name} = {value}: it must be at least {least:g}")
    return value


def probability(name: str, value: Number) -> Number:
    """The value, if it lies in 0 .. 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} = {value}: it must lie in 0 .. 1")
    return value
