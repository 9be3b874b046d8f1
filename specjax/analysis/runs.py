"""One run, timed; and several arms over the same requests, interleaved."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence

from specjax.decoding.engine import Engine
from specjax.decoding.generate import Completion, Generation
from specjax.decoding.requests import Request

TURNS = (2, 3, 5, 9, 17)
"""Tokens after which texts come round."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What came out, and how long it took on the wall."""

    completion: Completion
    prefill_seconds: float
    seconds: float
    """Of decoding: prefill is apart."""

    @property
    def tokens(self) -> int:
        """Tokens that were generated."""
        return len(self.completion.ids)

    @property
    def tokens_per_second(self) -> float:
        """Of decoding; 0 where nothing was generated."""
        return self.tokens / self.seconds if self.tokens else 0.0


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to decode that is compared with others."""

    drafter: str
    k: int
    engine: Engine

    @property
    def rule(self) -> str:
        """The name of the rule that judges its drafts."""
        rule = self.engine.rule
        return getattr(rule, "name", type(rule).__name__)

    @property
    def name(self) -> str:
        """For messages: ``"ngram k=8 coupled"``."""
        return f"{self.drafter} k={self.k} {self.rule}" if self.k else "plain"


@dataclasses.dataclass(frozen=True)
class Trial:
    """All arms on one request: ``runs[i]`` is arm ``i``'s."""

    request: int
    repeat: int
    runs: tuple[Run, ...]


def run(engine: Engine, request: Request) -> Run:
    """Generate to the end, alone in its batch."""
    generation = Generation(engine, [request])
    for _ in generation:
        pass
    times = generation.times
    return Run(generation.completions[0], times.prefill, times.decode)


def warm_up(engines: Sequence[Engine], request: Request) -> None:
    """Compile all that such requests need, by a round after the first two tokens.

    Engines must have a ``capacity_at_least``, or other shapes are compiled. Two are
    compiled at a time: XLA's compiler uses one core.
    """
    start = tuple(request.prompt_ids[:2])
    short = dataclasses.replace(request, prompt_ids=start, max_tokens=1, stop=())
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(run, engine, short) for engine in engines]:
            done.result()


def break_in(engines: Sequence[Engine], request: Request) -> None:
    """As ``warm_up``, and run windows of several widths, before anything is timed.

    The first window of a width takes longer than all that follow (half a second, on
    XLA's CPU backend), though it was compiled before.
    """
    warm_up(engines, request)
    for text in turning_texts(request):
        for engine in engines:
            run(engine, text)


def turning_texts(request: Request) -> list[Request]:
    """Requests, no longer than this one, whose text comes round after a few tokens.

    Drafters that copy draft as far as a turn is long; others draft as ever.
    """
    room = len(request.prompt_ids) + (request.max_tokens or 0)
    found = []
    for turn in TURNS:
        once = tuple(request.prompt_ids[:turn])
        # a longer one could need another capacity, and so another program
        if 2 * turn + 4 <= room:
            again = once + once[:3]
            short = dataclasses.replace(request, prompt_ids=again, stop=())
            found.append(dataclasses.replace(short, max_tokens=turn + 1))
    return found


def interleaved(
    arms: Sequence[Arm], requests: Sequence[Request], repeats: int = 1
) -> Iterator[Trial]:
    """Every arm on every request, one request at a time.

    The order of the arms turns from trial to trial, so that none is always first and
    a machine that gets slower in between slows all of them.
    """
    for repeat in range(repeats):
        for index, request in enumerate(requests):
            runs: dict[int, Run] = {}
            for place in range(len(arms)):
                arm = (place + index + repeat) % len(arms)
                runs[arm] = run(arms[arm].engine, request)
            ordered = tuple(runs[arm] for arm in range(len(arms)))
            yield Trial(index, repeat, ordered)
