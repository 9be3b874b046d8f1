"""What a caller asks for, row by row, and its translation to arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

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
        if len(self.prompt_ids) == 0:
            raise RequestError("prompt_ids is empty: a prompt needs at least one token")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"max_tokens = {self.max_tokens}: it cannot be negative")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed = {self.seed}: it must be in 0 .. 2**32 - 1")
        self._in("temperature", 0 <= self.temperature < math.inf, "0 or more")
        self._in("top_k", self.top_k >= 0, "0 (all) or more")
        self._in("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._in("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._in(
            "repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"
        )
        self._in("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        self._in("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        for token, value in self.logit_bias.items():
            if not value < math.inf:
                raise RequestError(
                    f"logit_bias of id {token} = {value}: it must be finite, "
                    "or -inf to exclude the id"
                )
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string: it would stop everything")

    def _in(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise RequestError(f"{name} = {getattr(self, name)}: it must be {wanted}")


def check_ids(requests: Sequence[Request], vocab_size: int) -> None:
    """Every prompt id and biased id lies in the vocabulary."""
    for row, request in enumerate(requests):
        ids = np.asarray(request.prompt_ids, np.int64)
        if ids.ndim != 1:
            raise RequestError(f"prompt_ids of request {row} is not a flat list of ids")
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
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
