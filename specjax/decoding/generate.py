"""Whole generations: streaming by calls, stop strings, results with their counters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.engine import Engine
from specjax.decoding.loop import LoopLog
from specjax.decoding.requests import Request, RequestError
from specjax.decoding.stats import alpha, tau
from specjax.decoding.types import DecodeState, FinishReason

Detokenize = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round did for one row."""

    drafted: int
    accepted: int
    committed: int


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A committed token's log-probability, and the most probable alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One row's output. Every figure follows from ``rounds`` and ``ids``."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    rounds: tuple[Round, ...]
    logprobs: tuple[TokenLogprob, ...] | None

    @property
    def drafted(self) -> int:
        """Draft nodes that were verified."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafts that were accepted and kept."""
        return sum(r.accepted for r in self.rounds)

    @property
    def tau(self) -> float:
        """Committed tokens a target pass, bonus included."""
        return tau(len(self.ids), len(self.rounds))

    @property
    def alpha(self) -> float:
        """Accepted over drafted."""
        return alpha(self.accepted, self.drafted)

    def accepted_by_position(self, depth: int) -> list[int]:
        """Rounds that accepted a draft at depth ``i + 1``, for each ``i < depth``.

        ``depth``: the drafter's ``max_depth``.
        """
        return [sum(r.accepted > i for r in self.rounds) for i in range(depth)]

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """For each id: whether it was an accepted draft."""
        flags = []
        for r in self.rounds:
            flags += [True] * r.accepted + [False] * (r.committed - r.accepted)
        return tuple(flags)


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one call added to one row, before stop strings are looked for."""

    ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    logprobs: tuple[TokenLogprob, ...] | None


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds on the wall."""

    prefill: float
    decode: float


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A run between two calls: all that is needed to go on with the same tokens."""

    state: DecodeState
    completions: tuple[Completion, ...]
    times: Times
    rounds: int
    """Of the loop, so far: those of the row that ran longest."""


class Generation:
    """A run in progress: iterate over it for the rows as they grow.

    Each step yields one ``Completion`` a row, so far; ``completions`` holds the last
    ones. Text is given if ``detokenize`` is, which stop strings need. ``snapshot`` is
    the run between two steps; the next step consumes its state. A run with ``resume``
    goes on where a snapshot of the same requests and engine was taken.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        detokenize: Detokenize | None = None,
        resume: Snapshot | None = None,
    ) -> None:
        if detokenize is None and any(request.stop for request in requests):
            raise RequestError("stop strings need a detokenizer: pass detokenize=")
        self._engine = engine
        self._requests = list(requests)
        self._detokenize = detokenize
        self._resume = resume
        self._rows: list[_Row] = []
        self.completions: list[Completion] = []
        self.times = Times(0.0, 0.0)

    def __iter__(self) -> Iterator[list[Completion]]:
        # a second iteration is a run of its own: the snapshot's state is consumed
        begun, self._resume = self._resume or self._begin(), None
        self._rows = [
            _Row(request, self._detokenize, completion)
            for request, completion in zip(
                self._requests, begun.completions, strict=True
            )
        ]
        state, rounds, before = begun.state, begun.rounds, begun.times
        self._keep(begun.state, before, rounds)
        start = time.perf_counter()
        while not bool(np.all(np.asarray(state.done))):
            state, log = self._engine.rounds(state)
            rounds += int(log.rounds)
            for row, delta in zip(self._rows, read_call(state, log), strict=True):
                row.extend(delta)
            state = self._close_stopped(state)
            decode = before.decode + time.perf_counter() - start
            self._keep(state, Times(before.prefill, decode), rounds)
            yield self.completions
        self.final_state = state

    def _begin(self) -> Snapshot:
        start = time.perf_counter()
        state = self._engine.prefill(self._engine.start(self._requests))
        jax.block_until_ready(state.lengths)
        times = Times(time.perf_counter() - start, 0.0)
        rows = [_Row(request, self._detokenize) for request in self._requests]
        empty = tuple(row.completion(FinishReason.NONE) for row in rows)
        return Snapshot(state, empty, times, 0)

    def _keep(self, state: DecodeState, times: Times, rounds: int) -> None:
        self.completions = self._so_far(state)
        self.times = times
        self.snapshot = Snapshot(state, tuple(self.completions), times, rounds)

    def _close_stopped(self, state: DecodeState) -> DecodeState:
        """End the rows whose text holds a stop string; their state is not reused."""
        stopped = np.array([row.stopped for row in self._rows])
        if not stopped.any():
            return state
        reason = jnp.where(
            jnp.asarray(stopped), int(FinishReason.STOP_STRING), state.finish_reason
        )
        return state.replace(
            done=state.done | jnp.asarray(stopped),
            finish_reason=reason.astype(jnp.int32),
        )

    def _so_far(self, state: DecodeState) -> list[Completion]:
        reasons = np.asarray(state.finish_reason)
        return [
            row.completion(FinishReason(int(reason)))
            for row, reason in zip(self._rows, reasons, strict=True)
        ]


def generate(
    engine: Engine,
    requests: Sequence[Request],
    *,
    detokenize: Detokenize | None = None,
) -> list[Completion]:
    """Run to the end: one completion a request, in order."""
    generation = Generation(engine, requests, detokenize=detokenize)
    for _ in generation:
        pass
    return generation.completions


def read_call(state: DecodeState, log: LoopLog) -> list[Delta]:
    """What one call of ``Engine.rounds`` committed, row by row, oldest first."""
    rounds = int(log.rounds)
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    steps = jax.tree.map(lambda x: np.asarray(x)[:rounds], log.steps)
    deltas = []
    for row in range(tokens.shape[0]):
        committed = steps.committed[:, row]
        ran = np.nonzero(committed)[0]
        new = int(committed.sum())
        ids = tokens[row, lengths[row] - new : lengths[row]]
        logprobs = None
        if steps.logprobs is not None:
            logprobs = tuple(
                TokenLogprob(
                    float(steps.logprobs.token[i, row, j]),
                    tuple(
                        zip(
                            steps.logprobs.top_ids[i, row, j].tolist(),
                            steps.logprobs.top[i, row, j].tolist(),
                            strict=True,
                        )
                    ),
                )
                for i in ran
                for j in range(int(committed[i]))
            )
        counts = tuple(
            Round(
                int(steps.drafted[i, row]),
                int(steps.accepted[i, row]),
                int(committed[i]),
            )
            for i in ran
        )
        deltas.append(Delta(tuple(ids.tolist()), counts, logprobs))
    return deltas


class _Row:
    """A growing row: its tokens, counters and text, cut where a stop string ends."""

    def __init__(
        self,
        request: Request,
        detokenize: Detokenize | None,
        begun: Completion | None = None,
    ) -> None:
        self._request = request
        self._detokenize = detokenize
        self._ids: list[int] = []
        self._rounds: list[Round] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._text: str | None = None if detokenize is None else ""
        self.stopped = False
        if begun is None:
            return
        if begun.prompt_ids != tuple(request.prompt_ids):
            raise RequestError("prompt_ids are not those of the run to go on with")
        self._ids, self._rounds = list(begun.ids), list(begun.rounds)
        self._logprobs = None if begun.logprobs is None else list(begun.logprobs)
        if detokenize is not None:
            self._text = detokenize(self._ids) if begun.text is None else begun.text
        self.stopped = begun.finish_reason is FinishReason.STOP_STRING

    def extend(self, delta: Delta) -> None:
        """Take in a call's tokens; what follows a stop string is dropped everywhere."""
        if self.stopped or not delta.ids:
            return
        before = len(self._ids)
        self._ids += delta.ids
        self._rounds += delta.rounds
        if delta.logprobs is not None:
            self._logprobs = (self._logprobs or []) + list(delta.logprobs)
        if self._detokenize is None:
            return
        self._text = self._detokenize(self._ids)
        if first_stop(self._text, self._request.stop) is not None:
            self._cut(before)

    def _cut(self, before: int) -> None:
        """Keep the ids up to the one that completes a stop, the text before it.

        Token by token, as if they had come one by one: of several stop strings the one
        that is complete first ends the row, however many tokens a call brought. A
        character whose last bytes are still to come is not text yet.
        """
        assert self._detokenize is not None
        for keep in range(before + 1, len(self._ids) + 1):
            text = self._detokenize(self._ids[:keep])
            found = first_stop(text.rstrip("\ufffd"), self._request.stop)
            if found is not None:
                break
        else:
            return
        self._text = text[:found]
        self._ids = self._ids[:keep]
        if self._logprobs is not None:
            self._logprobs = self._logprobs[:keep]
        self._rounds = cut_rounds(self._rounds, keep)
        self.stopped = True

    def completion(self, reason: FinishReason) -> Completion:
        """The row as it stands."""
        return Completion(
            prompt_ids=tuple(self._request.prompt_ids),
            ids=tuple(self._ids),
            text=self._text,
            finish_reason=reason,
            rounds=tuple(self._rounds),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the earliest stop string begins, if there is one."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return min(places) if places else None


def cut_rounds(rounds: Sequence[Round], keep: int) -> list[Round]:
    """The rounds that committed the first ``keep`` tokens, the last one shortened."""
    kept, left = [], keep
    for r in rounds:
        if left <= 0:
            break
        committed = min(r.committed, left)
        kept.append(Round(r.drafted, min(r.accepted, committed), committed))
        left -= committed
    return kept
