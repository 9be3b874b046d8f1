"""What a caller asks for, row by row, and its translation to arrays."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax.decoding.types import Counts, FinishReason, Sampling


class RequestError(ValueError):
    """A request that cannot be run; the message names the field and the fix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Temperature 0 is greedy. ``max_tokens=None`` goes on until an end-of-sequence id or
    the capacity. Cut-offs and penalties at their defaults do nothing.
    """

    prompt_ids: Sequence[int]
    max_tokens: int | None = 128
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        # frozen, and copied: what the caller does to its list later changes nothing
        object.__setattr__(self, "prompt_ids", _ids("prompt_ids", self.prompt_ids))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _strings("stop", stop))
        if len(self.prompt_ids) == 0:
            raise RequestError("prompt_ids is empty: a prompt needs at least one token")
        if self.max_tokens is not None:
            self._in(
                "max_tokens", 0 <= self._integer("max_tokens") < 2**31, "0 or more"
            )
        self._in("seed", 0 <= self._integer("seed") < 2**32, "in 0 .. 2**32 - 1")
        self._in("temperature", 0 <= self._number("temperature") < LARGEST, "0 or more")
        self._in("top_k", 0 <= self._integer("top_k") < 2**31, "0 (all) or more")
        self._in(
            "top_p",
            1e-30 <= self._number("top_p") <= 1,
            "above 0 (1e-30) and at most 1",
        )
        self._in("min_p", 0 <= self._number("min_p") <= 1, "between 0 and 1")
        repetition = self._number("repetition_penalty")
        self._in(
            "repetition_penalty", 1e-3 <= repetition <= 1e3, "above 0: 0.001 .. 1000"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._in(name, abs(self._number(name)) <= 1e6, "finite: -1e6 .. 1e6")
        for token, value in self.logit_bias.items():
            _integer("logit_bias: an id", token)
            if not (_is_number(value) and (value == -math.inf or abs(value) <= 1e6)):
                raise RequestError(
                    f"logit_bias of id {token} = {value}: it must be in -1e6 .. 1e6, "
                    "or -inf to exclude the id"
                )

    def _integer(self, name: str) -> int:
        return _integer(name, getattr(self, name))

    def _number(self, name: str) -> float:
        value = getattr(self, name)
        if not _is_number(value):
            raise RequestError(f"{name} = {value!r}: it must be a number")
        return float(value)

    def _in(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise RequestError(f"{name} = {getattr(self, name)}: it must be {wanted}")


LARGEST = 1e30
"""Numbers are held as float32, where a larger one times a logit would overflow."""


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def is_integer(value: object) -> TypeGuard[numbers.Integral]:
    """An integer of Python's or numpy's; truth values are none."""
    truth = isinstance(value, bool | np.bool_)
    return isinstance(value, numbers.Integral) and not truth


def _integer(name: str, value: object) -> int:
    if is_integer(value):
        return int(value)
    raise RequestError(f"{name} = {value!r}: it must be an integer")


def _ids(name: str, values: object) -> tuple[int, ...]:
    """Token ids as plain integers, from any flat sequence or array of integers."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise RequestError(f"{name} = {values!r}: it must be a list of token ids")
    if isinstance(values, np.ndarray | jax.Array):
        values = np.asarray(values).tolist()
    listed = list(values)  # pyright: ignore[reportArgumentType]
    return tuple(_integer(f"{name}[{i}]", value) for i, value in enumerate(listed))


def _strings(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, Sequence) or not all(isinstance(v, str) for v in values):
        raise RequestError(f"{name} = {values!r}: it must be a list of strings")
    if "" in values:
        raise RequestError(f"{name} holds an empty string: it would stop everything")
    return tuple(values)


def check_ids(requests: Sequence[Request], vocab_size: int) -> None:
    """Every prompt id and biased id lies in the vocabulary."""
    for row, request in enumerate(requests):
        outside = [i for i in request.prompt_ids if not 0 <= i < vocab_size]
        if outside:
            raise RequestError(
                f"prompt_ids of request {row} holds {outside[0]}, outside the "
                f"vocabulary of {vocab_size}"
            )
        for token in request.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"logit_bias of request {row} names id {token}, outside the "
                    f"vocabulary of {vocab_size}"
                )
        excluded = sum(value == -math.inf for value in request.logit_bias.values())
        if excluded == vocab_size:
            raise RequestError(
                f"logit_bias of request {row} excludes every id: nothing is left to say"
            )


def sampling_of(requests: Sequence[Request], vocab_size: int) -> Sampling:
    """Arrays for the settings that some request uses; the others stay untraced."""

    def column(name: str, neutral: int | float, dtype: DTypeLike) -> jax.Array | None:
        values = [getattr(request, name) for request in requests]
        if all(value == neutral for value in values):
            return None
        return jnp.asarray(values, dtype)

    temperature = column("temperature", 0.0, jnp.float32)
    # without a temperature every row is greedy, and no cut-off can move an argmax
    cuts = temperature is not None
    return Sampling(
        temperature=temperature,
        top_k=column("top_k", 0, jnp.int32) if cuts else None,
        top_p=column("top_p", 1.0, jnp.float32) if cuts else None,
        min_p=column("min_p", 0.0, jnp.float32) if cuts else None,
        repetition=column("repetition_penalty", 1.0, jnp.float32),
        presence=column("presence_penalty", 0.0, jnp.float32),
        frequency=column("frequency_penalty", 0.0, jnp.float32),
        bias=_bias(requests, vocab_size),
    )


def counts_of(
    requests: Sequence[Request], sampling: Sampling, vocab_size: int
) -> Counts | None:
    """Prompt counts and empty output counts, where penalties need them."""
    if not sampling.has_penalties:
        return None
    prompt = np.stack(
        [np.bincount(request.prompt_ids, minlength=vocab_size) for request in requests]
    )
    return Counts(
        prompt=jnp.asarray(prompt, jnp.int32),
        output=jnp.zeros(prompt.shape, jnp.int32),
    )


def limits_of(
    requests: Sequence[Request], capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """The length each row may reach, and what reaching it means."""
    limits, reasons = [], []
    for row, request in enumerate(requests):
        prompt = len(request.prompt_ids)
        if prompt > capacity:
            raise RequestError(
                f"request {row}: the prompt has {prompt} tokens, the capacity is "
                f"{capacity}; raise the capacity or shorten the prompt"
            )
        wanted = math.inf if request.max_tokens is None else prompt + request.max_tokens
        limits.append(min(wanted, capacity))
        fits = wanted <= capacity
        reasons.append(FinishReason.LENGTH if fits else FinishReason.CAPACITY)
    return np.asarray(limits, np.int32), np.asarray(reasons, np.int32)


def _bias(requests: Sequence[Request], vocab_size: int) -> jax.Array | None:
    if not any(request.logit_bias for request in requests):
        return None
    bias = np.zeros((len(requests), vocab_size), np.float32)
    for row, request in enumerate(requests):
        for token, value in request.logit_bias.items():
            bias[row, token] = value
    return jnp.asarray(bias)
