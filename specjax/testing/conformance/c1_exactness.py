"""C1: the tokens are plain decoding's, and an independent reference's."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.interfaces import Target
from specjax.decoding.kinds import kinds
from specjax.decoding.requests import Request
from specjax.decoding.windows import chunk_window
from specjax.testing.conformance.case import Case, Unsuitable
from specjax.testing.reference import Settings, law, rescore
from specjax.testing.reference.score import margin_of
from specjax.testing.reference.serial import values


def tokens_are_plain(case: Case) -> str:
    """Every row emits what it emits without drafts, up to a near-tie."""
    ties = []
    for row, (ours, plain) in enumerate(
        zip(case.trace.outputs, case.plain.outputs, strict=True)
    ):
        if ours == plain:
            if case.trace.reason(row) != case.plain.reason(row):
                raise AssertionError(
                    f"C1: row {row} ends with {case.trace.reason(row).name}, without "
                    f"drafts with {case.plain.reason(row).name}"
                )
            continue
        same = [a == b for a, b in zip(ours, plain, strict=False)]
        first = same.index(False) if False in same else len(same)
        told = (
            f"row {row}, token {first} of the output (round {_round(case, row, first)})"
        )
        if first == len(same):
            raise AssertionError(
                f"C1: {told}: the row has {len(ours)} tokens, without drafts "
                f"{len(plain)}; they agree as far as both go"
            )
        margin = tie_margin(case, row, plain[:first], ours[first])
        if not margin < case.tie:
            raise AssertionError(
                f"C1: {told} is {ours[first]}, without drafts {plain[first]}; that is "
                f"no near-tie: margin {margin:.3g}, bound {case.tie:g}"
            )
        ties.append(f"row {row}, token {first}: margin {margin:.2g}")
    count = sum(map(len, case.trace.outputs))
    return f"{count} tokens equal" if not ties else f"near-ties: {'; '.join(ties)}"


def tokens_are_the_references(case: Case) -> str:
    """Plain numpy in float64, without cache or windows, picks every token."""
    if case.toy is None:
        raise Unsuitable("the independent reference needs the target's tensors: toy=")
    smallest, ties = np.inf, 0
    for row, (request, output) in enumerate(
        zip(case.requests, case.trace.outputs, strict=True)
    ):
        if not output:
            continue
        score = rescore(
            case.toy.tensors,
            case.toy.config,
            request.prompt_ids,
            output,
            settings_of(request),
            request.seed,
        )
        for index, margin in score.differences:
            if not margin < case.tie:
                raise AssertionError(
                    f"C1: row {row}, token {index} of the output (round "
                    f"{_round(case, row, index)}) is {score.emitted[index]}, the "
                    f"reference picks {score.chosen[index]}; margin {margin:.3g}, "
                    f"bound {case.tie:g}"
                )
            ties += 1
        smallest = min(smallest, float(score.margin.min()))
    return f"{ties} near-ties below {case.tie:g}; smallest margin {smallest:.2g}"


def settings_of(request: Request) -> Settings:
    """The request's settings in the reference's words."""
    return Settings(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition=request.repetition_penalty,
        presence=request.presence_penalty,
        frequency=request.frequency_penalty,
        bias=request.logit_bias,
    )


def tie_margin(case: Case, row: int, before: tuple[int, ...], token: int) -> float:
    """How far ``token`` is from being plain decoding's choice after ``before``."""
    request = case.requests[row]
    prompt = list(request.prompt_ids)
    logits = next_logits(case.target, [*prompt, *before])
    if not np.isfinite(logits).all():
        return float("inf")
    p = law(logits, settings_of(request), prompt, before)
    s = values(p, request.seed, len(prompt) + len(before))
    chosen = int(np.argmax(np.where(p.kept(), s, -np.inf)))
    return margin_of(p, s, chosen, token)


def next_logits(target: Target, ids: list[int]) -> np.ndarray:
    """The target's own logits after ``ids``, in one window."""
    tokens = jnp.asarray([ids], jnp.int32)
    window = chunk_window(
        tokens, jnp.zeros(1, jnp.int32), jnp.full(1, len(ids), jnp.int32), len(ids)
    )
    logits = _verify(target, target.init(1, len(ids)), window, kinds=kinds(target))
    return np.asarray(logits)[0, -1].astype(np.float64)


@partial(jax.jit, static_argnames="kinds")
def _verify(target: Any, state: Any, window: Any, *, kinds: Hashable) -> jax.Array:
    return target.verify(state, window).logits


def _round(case: Case, row: int, index: int) -> int:
    """The round that emitted a token, from 1."""
    wanted = len(case.requests[row].prompt_ids) + index
    for number, snapshot in enumerate(case.trace.snapshots):
        if snapshot.lengths[row] > wanted:
            return number
    return len(case.trace.snapshots)
