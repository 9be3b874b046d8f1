"""Sections A and B: every arm on every prompt, in turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specjax.analysis.identity import first_difference
from specjax.analysis.records import repetition
from specjax.analysis.runs import break_in
from specjax.decoding.requests import Request
from speed import ours, peers

Decode = Callable[[list[int], int], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to decode: what it is called, what it is compared with, how it is run."""

    name: str
    plain: str
    """The arm that does the same without drafts (itself, if it has none)."""
    run: Decode


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt in tokens."""

    id: str
    kind: str
    ids: list[int]


def our_arm(arm: ours.Arm) -> Arm:
    """An engine as an arm."""
    return Arm(
        arm.name,
        f"specjax-{arm.dtype}",
        lambda ids, tokens: ours.decode(arm.engine, ids, tokens),
    )


def peer_arm(worker: peers.Peers, name: str) -> Arm:
    """A peer's decoder as an arm. Its first forward pass is the prefill."""

    def run(ids: list[int], tokens: int) -> dict[str, Any]:
        answer = worker.ask(arm=name, ids=ids, max_new_tokens=tokens, ignore_eos=True)
        return {
            "ids": answer["ids"],
            "wall": answer["wall"],
            "cpu": answer["cpu"],
            "rounds": answer["forwards"],
        }

    return Arm(name, name.removesuffix("-lookup"), run)


def prepare(
    mine: Sequence[ours.Arm],
    worker: peers.Peers | None,
    texts: Sequence[Text],
    step: Callable[[str], None],
) -> list[Arm]:
    """Compile and load all; then a short run of each arm, so that none is cold."""
    request = Request(prompt_ids=texts[0].ids, max_tokens=1)
    for arm in mine:
        step(f"compiling {arm.name}")
        break_in([arm.engine], request)
    arms = [our_arm(arm) for arm in mine]
    if worker is not None:
        for name in peers.ARMS:
            step(f"loading {name}")
            worker.ask(op="load", arm=name)
            arms.append(peer_arm(worker, name))
    for arm in arms:
        step(f"warming up {arm.name}")
        arm.run(texts[0].ids, 16)
    return arms


def trials(
    arms: Sequence[Arm],
    texts: Sequence[Text],
    *,
    tokens: int,
    repeats: int,
    settle: float,
    step: Callable[[str], None],
) -> Iterator[list[dict[str, Any]]]:
    """The records of one prompt at a time.

    The arm that begins moves on by one from trial to trial, and every second trial goes
    through them backwards, so that none has always the same neighbour before it.
    """
    number = 0
    for repeat in range(repeats):
        for text in texts:
            step(f"{text.id}, repeat {repeat + 1}")
            turn = number % len(arms)
            order = [*arms[turn:], *arms[:turn]]
            found = {}
            for arm in order[:: -1 if number % 2 else 1]:
                # a library's threads may go on spinning for a moment after its run
                time.sleep(settle)
                found[arm.name] = arm.run(text.ids, tokens)
            number += 1
            yield [record(arm, text, repeat, found) for arm in arms]


def record(
    arm: Arm, text: Text, repeat: int, found: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What is kept of a run: the ids themselves are not."""
    run = dict(found[arm.name])
    ids, plain = run.pop("ids"), found[arm.plain]["ids"]
    return {
        "arm": arm.name,
        "plain": arm.plain,
        "prompt": text.id,
        "kind": text.kind,
        "prompt_tokens": len(text.ids),
        "repeat": repeat,
        "tokens": len(ids),
        **run,
        "first_difference": first_difference(plain, ids),
        "repetition": repetition(ids),
    }
