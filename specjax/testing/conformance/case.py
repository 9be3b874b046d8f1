"""What a check is given: a target, a drafter, a rule and requests, and their runs.

A case decodes its requests round by round and keeps what stood after each round, on
the host. Runs are made when a check first asks for them and shared by all checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.interfaces import AcceptanceRule, Drafter, Target
from specjax.decoding.kinds import kinds
from specjax.decoding.requests import Request
from specjax.decoding.types import DecodeState, FinishReason
from specjax.drafters.null import NullDrafter
from specjax.testing.toys import Toy

Touch = Callable[[DecodeState], DecodeState]


class Unsuitable(Exception):
    """The check cannot be made of this case; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What stood between two rounds, in numpy."""

    tokens: np.ndarray
    lengths: np.ndarray
    done: np.ndarray
    finish_reason: np.ndarray
    stats: SimpleNamespace
    target: Any
    """The target's canonical state; ``None`` where the target has no such form."""
    drafter: Any
    log: SimpleNamespace | None
    """Drafted, accepted and committed. Of the round before; ``None`` after prefill."""

    def row(self, row: int) -> dict[str, list[np.ndarray]]:
        """Every array of one row, by part: what contracts about rows compare."""
        parts = {
            "tokens": self.tokens,
            "length": self.lengths,
            "done": self.done,
            "finish reason": self.finish_reason,
            "counters": vars(self.stats),
            "target state": self.target,
        }
        return {
            name: [np.array(leaf[row]) for leaf in jax.tree.leaves(part)]
            for name, part in parts.items()
        }


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run: the snapshot after prefill, then one after each round."""

    prompts: tuple[tuple[int, ...], ...]
    snapshots: tuple[Snapshot, ...]

    @property
    def last(self) -> Snapshot:
        """The end."""
        return self.snapshots[-1]

    @property
    def rounds(self) -> tuple[Snapshot, ...]:
        """The snapshots that a round led to."""
        return self.snapshots[1:]

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The emitted tokens of each row."""
        return tuple(
            tuple(row[len(prompt) : length].tolist())
            for row, prompt, length in zip(
                self.last.tokens, self.prompts, self.last.lengths, strict=True
            )
        )

    def reason(self, row: int) -> FinishReason:
        """Why the row ended."""
        return FinishReason(int(self.last.finish_reason[row]))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One combination that the contracts are checked for."""

    target: Target
    drafter: Drafter
    rule: AcceptanceRule
    requests: tuple[Request, ...]
    eos_ids: tuple[int, ...] = ()
    max_capacity: int | None = None
    widths: tuple[int, ...] | None = None
    prefill_width: int = 8
    toy: Toy | None = None
    """The tensors of ``target``, for the independent reference."""
    tie: float = 1e-4
    """A difference counts as a near-tie, and passes, below this margin: an error of
    float32 logits of ordinary size. Nothing of the kind has been seen on the toys."""
    rounding: float = 2e-5
    """The largest difference of a state from its serial replay, relative to the
    largest value of the array it stands in."""
    planted: Callable[[tuple[tuple[int, ...], ...]], Drafter] | None = None
    """For a drafter that is made for its requests: from plain decoding's outputs."""
    engine_type: type[Engine] = Engine

    @classmethod
    def plant(cls, planted: Callable[..., Drafter], **fields: Any) -> Case:
        """A case whose drafter is made from plain decoding's outputs."""
        return cls(drafter=NullDrafter(), **fields).replant(planted)

    def replant(self, planted: Callable[..., Drafter]) -> Case:
        """The same requests with another such drafter."""
        # an end-of-sequence id would hide what could be drafted behind it
        endless = self.plain if not self.eos_ids else self.but(eos_ids=()).plain
        case = self.but(drafter=planted(endless.outputs), planted=planted)
        case.__dict__["plain"] = self.plain
        return case

    def ask(self, requests: Sequence[Request], **changes: Any) -> Case:
        """The case for other requests, as many of them."""
        case = self.but(requests=tuple(requests), **changes)
        return case if self.planted is None else case.replant(self.planted)

    def but(self, **changes: Any) -> Case:
        """The same case with other fields, and runs of its own."""
        return dataclasses.replace(self, **changes)

    def for_rows(self, rows: Sequence[int]) -> Case:
        """The case with row ``rows[i]`` in place ``i``."""
        return self.but(
            requests=tuple(self.requests[row] for row in rows),
            drafter=drafter_for(self.drafter, rows),
        )

    def engine(self, drafter: Drafter | None = None, **options: Any) -> Engine:
        """An engine that does one round a call."""
        drafter = self.drafter if drafter is None else drafter
        settings: dict[str, Any] = {
            "max_capacity": self.max_capacity,
            "eos_ids": self.eos_ids,
            "prefill_width": self.prefill_width,
            "rounds_per_call": 1,
            "widths": self.widths if drafter is self.drafter else None,
        }
        return self.engine_type(
            self.target, drafter, self.rule, EngineOptions(**(settings | options))
        )

    @cached_property
    def trace(self) -> Trace:
        """The run with the drafter."""
        return record(self.engine(), self.requests)

    @cached_property
    def plain(self) -> Trace:
        """The run without: the null drafter in the same loop."""
        return record(self.engine(NullDrafter()), self.requests)

    @property
    def batch(self) -> int:
        """``B``."""
        return len(self.requests)


def drafter_for(drafter: Drafter, rows: Sequence[int]) -> Drafter:
    """A drafter that holds something for each row says how to move it: ``for_rows``."""
    move = getattr(drafter, "for_rows", None)
    return drafter if move is None else move(rows)


def record(
    engine: Engine, requests: Sequence[Request], touch: Touch | None = None
) -> Trace:
    """Decode to the end; ``touch`` is applied to the state before every round."""
    state = engine.prefill(engine.start(requests))
    snapshots = [snapshot(engine.target, state, None)]
    # a token a round: more rounds than the longest row has room for are too many
    most = int(np.max(np.asarray(state.limits) - np.asarray(state.lengths), initial=0))
    while not snapshots[-1].done.all():
        if len(snapshots) > most:
            raise AssertionError(
                f"C5: rows {np.flatnonzero(~snapshots[-1].done).tolist()} are not done "
                f"after {most} rounds; lengths {snapshots[-1].lengths.tolist()}"
            )
        if touch is not None:
            state = touch(state)
        state, log = engine.rounds(state)
        entry = SimpleNamespace(
            drafted=np.array(log.steps.drafted[0]),
            accepted=np.array(log.steps.accepted[0]),
            committed=np.array(log.steps.committed[0]),
        )
        snapshots.append(snapshot(engine.target, state, entry))
    prompts = tuple(tuple(request.prompt_ids) for request in requests)
    return Trace(prompts, tuple(snapshots))


def snapshot(
    target: Target, state: DecodeState, log: SimpleNamespace | None
) -> Snapshot:
    """Copies: the state's own buffers are donated to the next round."""
    return Snapshot(
        tokens=np.array(state.tokens),
        lengths=np.array(state.lengths),
        done=np.array(state.done),
        finish_reason=np.array(state.finish_reason),
        stats=SimpleNamespace(
            **{
                field.name: np.array(getattr(state.stats, field.name))
                for field in dataclasses.fields(state.stats)
            }
        ),
        target=canonical(target, state.target),
        drafter=jax.tree.map(jnp.array, state.drafter),
        log=log,
    )


@partial(jax.jit, static_argnames="kinds")
def _canonical(target: Any, state: Any, *, kinds: Hashable) -> Any:
    return target.canonical(state)


def canonical(target: Target, state: Any) -> Any:
    """The target's state in comparable form, or ``None`` if it has none."""
    if not hasattr(target, "canonical"):
        return None
    return _canonical(target, state, kinds=kinds(target))


def needs_canonical(case: Case) -> None:
    """Refuse a target whose states cannot be compared."""
    if not hasattr(case.target, "canonical"):
        raise Unsuitable("the target has no canonical(state)")


def same_bits(a: Any, b: Any) -> bool:
    """Equal arrays to the last bit: NaN equals NaN, and 0 is not -0."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
