"""Planted acceptance: a text that is told, and drafts of it that are right by chance.

The target runs as ever, and then the told text's next token is put on top of its logits
(in both arms): so rounding cannot end a run early, and acceptance is what was planted.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.acceptance import Greedy
from specjax.analysis.costs.predict import predict
from specjax.analysis.costs.scripted import Scripted
from specjax.analysis.costs.session import Candidate, Session
from specjax.analysis.law import chain_tau
from specjax.decoding.engine import Engine, EngineOptions, default_widths
from specjax.decoding.interfaces import Tap, Target
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance, Verdict, Window
from specjax.drafters.null import NullDrafter
from specjax.drafters.simulated import Simulated

PLAIN = "plain"
ROUNDS_PER_CALL = 8


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    dtype: str
    batch: int
    alpha: float
    k: int

    @property
    def name(self) -> str:
        """In both files."""
        return f"{self.dtype} B={self.batch} alpha={self.alpha:g} k={self.k}"


class Told(struct.PyTreeNode):
    """A ``Target`` that is told which token follows, and does all its work first."""

    inner: Any
    script: Scripted

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.inner.vocab_size

    def init(self, batch: int, capacity: int) -> Any:
        """The target's."""
        self.script.init(batch, capacity)
        return self.inner.init(batch, capacity)

    def verify(
        self,
        state: Any,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """The target's, with the told token on top."""
        verdict = self.inner.verify(state, window, taps=taps, logits=logits)
        if verdict.logits is None:
            return verdict
        told = self.script.verify(None, window).logits
        return verdict.replace(logits=verdict.logits + told)

    def commit(self, state: Any, pending: Any, acceptance: Acceptance) -> Any:
        """The target's."""
        return self.inner.commit(state, pending, acceptance)


def predictions(
    target: Target,
    weights: Any,
    cells: Sequence[Cell],
    text: Sequence[int],
    context: int,
    seconds: float,
    step: Callable[[str], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The calibration, and what it predicts for cells of one dtype and batch."""
    (dtype,), (batch,) = {c.dtype for c in cells}, {c.batch for c in cells}
    ks = sorted({cell.k for cell in cells})
    session = Session(
        target=target,
        weights=weights,
        candidates=[
            Candidate(PLAIN, k, _planted(text, batch, (0.5,) * k, target.vocab_size))
            for k in ks
        ],
        widths=sorted({w for k in ks for w in default_widths(k)}),
        settings=[(batch, context)],
        text=text,
        seconds=seconds,
    )
    found = session.run(step, model="", dtype=dtype, about={})
    rows = []
    for cell in cells:
        expected = predict(
            found.curve,
            "planted",
            k=cell.k,
            nodes=cell.k,
            drafting=found.curve.draft_ratios(f"{PLAIN} k={cell.k}"),
            found=chain_tau(cell.alpha, cell.k),
        )
        rows.append(dataclasses.asdict(cell) | dataclasses.asdict(expected))
    return found.as_dict(), rows


def _planted(
    text: Sequence[int], batch: int, alphas: tuple[float, ...], vocab: int
) -> Simulated:
    return Simulated.of([text] * batch, [()] * batch, alphas, vocab)


def measured(
    target: Target,
    cells: Sequence[Cell],
    texts: Sequence[Sequence[int]],
    context: int,
    repeats: int,
    step: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Plain decoding and every cell in turn; each repeat has coins of its own.

    ``texts``: one a row, of more than ``context`` tokens; all beyond are decoded.
    """
    told = Told(target, Scripted.of(texts, target.vocab_size))
    tokens = min(map(len, texts)) - context
    requests = [Request(prompt_ids=t[:context], max_tokens=tokens) for t in texts]

    def engine(cell: Cell | None, seed: int) -> Engine:
        drafter: Any = NullDrafter()
        if cell is not None:
            alphas = [cell.alpha] * cell.k
            vocab = target.vocab_size
            drafter = Simulated.of(texts, [()] * len(texts), alphas, vocab, seed)
        options = EngineOptions(rounds_per_call=ROUNDS_PER_CALL)
        return Engine(told, drafter, Greedy(), options)

    arms: list[Cell | None] = [None, *cells]
    step(f"compiling {len(arms)} arms")
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for done in [
            pool.submit(_run, engine(arm, 0), requests, calls=1) for arm in arms
        ]:
            done.result()
    for repeat in range(repeats):
        step(f"repeat {repeat + 1} of {repeats}")
        first = (3 * repeat) % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            about = {"name": PLAIN} if arm is None else {"name": arm.name}
            yield about | {"repeat": repeat} | _run(engine(arm, repeat), requests)


def _run(
    engine: Engine, requests: Sequence[Request], calls: int | None = None
) -> dict[str, Any]:
    """Tokens, rounds and seconds of the calls after which no row had ended."""
    state = engine.prefill(engine.start(requests))
    state = jax.block_until_ready(state)
    tokens = rounds = done = 0
    seconds = 0.0
    while calls is None or done < calls:
        start = time.perf_counter()
        state, log = engine.rounds(state)
        ended = bool(np.any(np.asarray(state.done)))
        took = time.perf_counter() - start
        if ended:
            break
        seconds += took
        rounds += int(log.rounds)
        tokens += int(jnp.sum(log.steps.committed))
        done += 1
    return {"tokens": tokens, "rounds": rounds, "seconds": seconds}
