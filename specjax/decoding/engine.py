"""Target, drafter and rule put together: checked once, then run.

An ``Engine`` holds no state of a run. ``start`` makes a ``DecodeState``, ``prefill``
and ``rounds`` take one and return another, ``generate`` and ``stream`` do all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from specjax.decoding.interfaces import AcceptanceRule, Drafter, Target
from specjax.decoding.kinds import kinds
from specjax.decoding.loop import LoopLog, prefill_chunk, run_rounds
from specjax.decoding.pairs import PairError, check_pair
from specjax.decoding.requests import (
    Request,
    RequestError,
    check_ids,
    counts_of,
    is_integer,
    limits_of,
    sampling_of,
)
from specjax.decoding.round import RoundOptions
from specjax.decoding.stats import empty_stats
from specjax.decoding.types import NO_TOKEN, DecodeState

CAPACITY_STEP = 128
"""Capacities are rounded up to a multiple of this, so that few shapes are compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run, as against what to run."""

    max_capacity: int | None = None
    """Most tokens of a row, prompt included; ``None``: whatever a request needs."""
    capacity_at_least: int = 0
    """Room to allocate even if the requests need less: runs whose sizes would differ
    then share one compiled shape."""
    eos_ids: tuple[int, ...] = ()
    prefill_width: int = 64
    rounds_per_call: int = 16
    """Rounds between two looks of the host: streaming is as fine as this."""
    widths: tuple[int, ...] | None = None
    """Window widths to compile; ``None``: see ``default_widths``."""
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        # they are static arguments of compiled programs, so they must be hashable
        object.__setattr__(self, "eos_ids", _integers("eos_ids", self.eos_ids))
        if self.widths is not None:
            object.__setattr__(self, "widths", _integers("widths", self.widths))
        for name in ("capacity_at_least", "prefill_width", "rounds_per_call"):
            _integers(name, [getattr(self, name)])
        for name in ("max_capacity", "top_logprobs"):
            value = getattr(self, name)
            _integers(name, [] if value is None else [value])


def _integers(name: str, values: object) -> tuple[int, ...]:
    listed = sorted(values) if isinstance(values, set | frozenset) else values
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise PairError(f"{name} = {values!r}: it must be a list of integers")
    listed = np.asarray(listed).tolist() if isinstance(listed, np.ndarray) else listed
    for value in listed:
        if not is_integer(value):
            raise PairError(f"{name} = {values!r}: {value!r} is not an integer")
    return tuple(int(value) for value in listed)


@dataclasses.dataclass(frozen=True)
class Engine:
    """A target, a drafter and a rule that fit together."""

    target: Target
    drafter: Drafter
    rule: AcceptanceRule
    options: EngineOptions = EngineOptions()

    def __post_init__(self) -> None:
        check_pair(self.target, self.drafter, self.rule)
        check_options(self.target, self.drafter, self.options)

    def start(self, requests: Sequence[Request]) -> DecodeState:
        """The state before the first pass: prompts in place, nothing in the target."""
        vocab = self.target.vocab_size
        if not requests:
            raise RequestError("no requests: give at least one")
        check_ids(requests, vocab)
        check_rule(self.rule, requests)
        capacity = self._capacity(requests)
        limits, reasons = limits_of(requests, self.options.max_capacity or capacity)
        batch = len(requests)
        admit = getattr(self.target, "admit", None)
        if admit is not None:
            admit([len(r.prompt_ids) for r in requests])
        prompts = np.array([len(r.prompt_ids) for r in requests], np.int32)
        tokens = np.full((batch, capacity), NO_TOKEN, np.int32)
        for row, request in enumerate(requests):
            tokens[row, : prompts[row]] = request.prompt_ids
        done = limits <= prompts
        sampling = sampling_of(requests, vocab)
        # copies: the state is donated, so its buffers must be its own
        return DecodeState(
            target=self.target.init(batch, capacity),
            drafter=self.drafter.init(batch, capacity),
            tokens=jnp.array(tokens),
            lengths=jnp.array(prompts),
            prompt_lengths=jnp.array(prompts),
            limits=jnp.array(limits),
            limit_reasons=jnp.array(reasons),
            done=jnp.array(done),
            finish_reason=jnp.array(np.where(done, reasons, 0).astype(np.int32)),
            seeds=jnp.array([r.seed for r in requests], jnp.uint32),
            sampling=sampling,
            counts=counts_of(requests, sampling, vocab),
            stats=empty_stats(batch, self.drafter.max_depth),
        )

    def prefill(self, state: DecodeState) -> DecodeState:
        """Commit every prompt but its last token. Consumes the state."""
        longest = int(jnp.max(state.prompt_lengths)) - 1
        width = self.options.prefill_width
        # prefill counts nothing, and without the counters, whose shape follows k,
        # drafters that have no state of their own share one compiled program
        stats, state = state.stats, state.replace(stats=None)
        for start in range(0, longest, width):
            state = prefill_chunk(
                self.target,
                self.drafter,
                state,
                jnp.int32(start),
                width=width,
                kinds=self.kinds,
            )
        return state.replace(stats=stats)

    def rounds(self, state: DecodeState) -> tuple[DecodeState, LoopLog]:
        """The next rounds, at most ``rounds_per_call``. Consumes the state."""
        return run_rounds(
            self.target,
            self.drafter,
            self.rule,
            state,
            options=self.round_options,
            max_rounds=self.options.rounds_per_call,
            kinds=self.kinds,
        )

    @cached_property
    def kinds(self) -> Hashable:
        """The classes of the three parts, which tell compiled programs apart."""
        return kinds((self.target, self.drafter, self.rule))

    @property
    def round_options(self) -> RoundOptions:
        """What the rounds are compiled for."""
        widths = self.options.widths or default_widths(self.drafter.max_nodes)
        return RoundOptions(
            widths=widths,
            eos_ids=self.options.eos_ids,
            top_logprobs=self.options.top_logprobs,
        )

    def _capacity(self, requests: Sequence[Request]) -> int:
        limit = self.options.max_capacity
        wanted = []
        for request in requests:
            if request.max_tokens is None and limit is None:
                raise RequestError(
                    "max_tokens is None and the engine has no max_capacity: "
                    "set one of them, or the run has no end"
                )
            prompt = len(request.prompt_ids)
            budget = request.max_tokens
            wanted.append(limit if budget is None else prompt + budget)
        most = max(wanted) if limit is None else min(max(wanted), limit)
        most = max(most, self.options.capacity_at_least)
        return -(-most // CAPACITY_STEP) * CAPACITY_STEP


def default_widths(max_nodes: int) -> tuple[int, ...]:
    """A plain step, the full window, and one between where the window is wide."""
    full = max_nodes + 1
    middle = (full // 2,) if full > 8 else ()
    return tuple(sorted({1, *middle, full}))


def check_rule(rule: AcceptanceRule, requests: Sequence[Request]) -> None:
    """Refuse a temperature that the rule would not follow."""
    if getattr(rule, "samples", True):
        return
    for row, request in enumerate(requests):
        if request.temperature > 0:
            raise RequestError(
                f"temperature = {request.temperature} of request {row}: rule "
                f"{getattr(rule, 'name', type(rule).__name__)} is greedy; choose one "
                "that samples (Coupled), or temperature 0"
            )


def check_options(target: Target, drafter: Drafter, options: EngineOptions) -> None:
    """Refuse options that no run could honour."""
    for eos in options.eos_ids:
        if not 0 <= eos < target.vocab_size:
            raise PairError(
                f"eos id {eos} is outside the vocabulary of {target.vocab_size}"
            )
    widest, rows = getattr(target, "widest", None), drafter.max_nodes + 1
    if widest is not None and rows > widest:
        raise PairError(
            f"a window of {drafter.max_nodes} drafts has {rows} rows, and the target's "
            f"states are kept for {widest} at most (Snapshot(rows={widest})): draft "
            "less, or set up its memory for more rows"
        )
    capacity = options.max_capacity
    if capacity is not None and drafter.max_depth >= capacity:
        raise PairError(
            f"k = {drafter.max_depth} drafts do not fit a capacity of {capacity} tokens"
        )
    if options.prefill_width < 1 or options.rounds_per_call < 1:
        raise PairError("prefill_width and rounds_per_call must be at least 1")
    top = options.top_logprobs
    if top is not None and not 0 <= top <= target.vocab_size:
        raise PairError(
            f"top_logprobs = {top}: it must be in 0 .. {target.vocab_size}, the "
            "vocabulary"
        )
    widths = options.widths
    if widths is None:
        return
    if not widths or list(widths) != sorted(set(widths)) or widths[0] < 1:
        raise PairError(f"widths = {widths}: they must ascend from 1 or more")
    if widths[-1] != drafter.max_nodes + 1:
        raise PairError(
            f"widths = {widths}: the last must be max_nodes + 1 = "
            f"{drafter.max_nodes + 1}, the widest window there is"
        )
