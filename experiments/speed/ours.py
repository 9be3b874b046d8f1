"""specjax's arms: engines of every weight type, and one generation, timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.acceptance import Greedy
from specjax.analysis.records import parameter_bytes
from specjax.checkpoints import Checkpoint, load
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import read_call
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.drafters.null import NullDrafter
from specjax.models.build import WeightType
from specjax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Arm:
    """Plain decoding (``k`` = 0) or n-gram drafts, in one weight type."""

    dtype: str
    k: int
    engine: Engine

    @property
    def name(self) -> str:
        """``specjax-bfloat16-ngram8``."""
        return f"specjax-{self.dtype}" + (f"-ngram{self.k}" if self.k else "")


class Clock:
    """Seconds on the wall and of this process, since the last lap."""

    def __init__(self) -> None:
        self._last = self._now()

    def lap(self) -> tuple[float, float]:
        """Both, and start anew."""
        now = self._now()
        wall, cpu = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return wall, cpu

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def load_all(model: str, dtypes: Sequence[str]) -> dict[str, Checkpoint]:
    """The model in each weight type."""
    return {dtype: load(model, WeightType(dtype)) for dtype in dtypes}


def bytes_read(decoder: Decoder) -> int:
    """Bytes of weights that a plain step has to read: all but the embedding table,
    of which it reads one row, unless the head shares it.
    """
    return parameter_bytes((decoder.blocks, decoder.norm, decoder.head))


def make_arms(
    checkpoints: dict[str, Checkpoint],
    ks: tuple[int, ...],
    *,
    capacity: int,
    rounds_per_call: int,
) -> list[Arm]:
    """Plain decoding and every ``k``, in every weight type, of one capacity.

    No end-of-sequence id is given, so every run goes on to its last token.
    """
    options = EngineOptions(capacity_at_least=capacity, rounds_per_call=rounds_per_call)
    return [
        Arm(
            dtype,
            k,
            Engine(
                checkpoint.decoder,
                NGram(k=k) if k else NullDrafter(),
                Greedy(),
                options,
            ),
        )
        for dtype, checkpoint in checkpoints.items()
        for k in (0, *ks)
    ]


def decode(engine: Engine, ids: list[int], tokens: int) -> dict[str, Any]:
    """One greedy generation, with its counters and seconds."""
    request = Request(prompt_ids=ids, max_tokens=tokens)
    clock = Clock()
    state = engine.prefill(engine.start([request]))
    jax.block_until_ready(state)
    prefill = clock.lap()
    new: list[int] = []
    rounds = []
    while not bool(np.all(np.asarray(state.done))):
        state, log = engine.rounds(state)
        (delta,) = read_call(state, log)
        new += delta.ids
        rounds += delta.rounds
    after = clock.lap()
    return {
        "ids": new,
        "wall": prefill[0] + after[0],
        "cpu": prefill[1] + after[1],
        "prefill_wall": prefill[0],
        "prefill_cpu": prefill[1],
        "rounds": len(rounds),
        "drafted": sum(r.drafted for r in rounds),
        "accepted": sum(r.accepted for r in rounds),
    }
