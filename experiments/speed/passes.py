"""Section C: a pass of W rows, and the whole round around it, both in one loop.

The pass alone is ``target.verify`` on a state that stays as it is, again and again in a
jitted ``while_loop``: what a window costs, with no dispatch, acceptance or commit. The
window's tokens depend on the verdict before, or XLA would do one pass only. The round
is what the engine runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.acceptance import Coupled, Greedy
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.decoding.types import DecodeState
from specjax.decoding.windows import chunk_window
from specjax.drafters.ngram import NGram
from specjax.drafters.null import NullDrafter
from specjax.models.decoder import Decoder
from speed.ours import Clock

TEMPERATURE = 0.8
SAMPLED_WIDTHS = (1, 8)
ROOM = 240
"""Tokens that the timed rounds may commit; then they end early."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Something to time: a call tells how many passes it made, and tokens it committed.

    The tokens matter: acceptance walks the accepted rows one by one.
    """

    dtype: str
    part: str
    width: int
    prepare: Callable[[], Any]
    call: Callable[[Any], tuple[int, int]]


@partial(jax.jit, static_argnames=("width", "passes"))
def repeat_pass(
    target: Decoder, state: Any, tokens: jax.Array, *, width: int, passes: int
) -> jax.Array:
    """``passes`` passes over a window of ``width`` rows behind the committed tokens."""

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, tokens = carry
        window = chunk_window(tokens, state.lengths, state.lengths + width, width)
        verdict = target.verify(state, window)
        # ``bad`` looks at every logit, so no row of the head can be left out
        move = 1 + jnp.any(verdict.bad).astype(jnp.int32)
        return count + 1, (tokens + move) % target.vocab_size

    start = (jnp.int32(0), tokens)
    return jax.lax.while_loop(lambda carry: carry[0] < passes, body, start)[1]


def parts(
    decoders: dict[str, Decoder],
    context: Sequence[int],
    widths: Sequence[int],
    passes: int,
) -> list[Part]:
    """All that is timed, with ``context`` committed and the next token as anchor."""
    found = []
    for dtype, decoder in decoders.items():
        filled = Filled.make(decoder, context)
        for width in widths:
            found.append(_pass_part(dtype, filled, width, passes))
            found.append(_round_part(dtype, filled, width, passes, 0.0))
            if width in SAMPLED_WIDTHS:
                found.append(_round_part(dtype, filled, width, passes, TEMPERATURE))
    return found


@dataclasses.dataclass(frozen=True)
class Filled:
    """A decoder, and its state after all tokens of the context but the last."""

    decoder: Decoder
    context: Sequence[int]
    state: DecodeState

    @classmethod
    def make(cls, decoder: Decoder, context: Sequence[int]) -> Filled:
        """By a prefill, of which one serves all engines."""
        engine = Engine(decoder, NullDrafter(), Greedy())
        request = Request(prompt_ids=context, max_tokens=ROOM)
        state = engine.prefill(engine.start([request]))
        return cls(decoder, context, jax.block_until_ready(state))

    def start(self, engine: Engine, temperature: float) -> DecodeState:
        """A state for an engine whose drafter remembers nothing."""
        request = Request(
            prompt_ids=self.context, max_tokens=ROOM, temperature=temperature, seed=1
        )
        return engine.start([request]).replace(target=self.state.target)


def _pass_part(dtype: str, filled: Filled, width: int, passes: int) -> Part:
    state = filled.state
    tokens = jnp.where(state.tokens < 0, 1, state.tokens)

    def call(_: Any) -> tuple[int, int]:
        after = repeat_pass(
            filled.decoder, state.target, tokens, width=width, passes=passes
        )
        jax.block_until_ready(after)
        return passes, 0

    return Part(dtype, "pass", width, lambda: None, call)


def _round_part(
    dtype: str, filled: Filled, width: int, rounds: int, temperature: float
) -> Part:
    """Rounds that have one width only, whatever is drafted."""
    engine = Engine(
        filled.decoder,
        NGram(k=width - 1) if width > 1 else NullDrafter(),
        Coupled() if temperature else Greedy(),
        EngineOptions(widths=(width,), rounds_per_call=rounds),
    )
    state = filled.start(engine, temperature)

    def prepare() -> DecodeState:
        # rounds consume their state: each call gets a copy of the same one
        return jax.block_until_ready(jax.tree.map(jnp.copy, state))

    def call(copy: DecodeState) -> tuple[int, int]:
        after, log = engine.rounds(copy)
        jax.block_until_ready(after)
        return int(log.rounds), int(log.steps.committed.sum())

    return Part(dtype, "sampled" if temperature else "greedy", width, prepare, call)


def measure(
    wanted: Sequence[Part], repeats: int, step: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """All parts in turn, ``repeats`` times; the first time, which compiles, is extra.

    The parts of one width stand side by side, since they are compared; where a turn
    begins moves on.
    """
    for part in wanted:
        step(f"compiling {part.dtype} {part.part}, W = {part.width}")
        part.call(part.prepare())
    for repeat in range(repeats):
        step(f"passes and rounds, repeat {repeat + 1}")
        turn = int(np.random.default_rng(repeat).integers(len(wanted)))
        order = [*wanted[turn:], *wanted[:turn]]
        yield [_time(part, repeat) for part in order]


def _time(part: Part, repeat: int) -> dict[str, Any]:
    prepared = part.prepare()
    clock = Clock()
    count, committed = part.call(prepared)
    wall, cpu = clock.lap()
    return {
        "dtype": part.dtype,
        "part": part.part,
        "width": part.width,
        "repeat": repeat,
        "count": count,
        "committed": committed,
        "wall": wall,
        "cpu": cpu,
    }
