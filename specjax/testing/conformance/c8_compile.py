"""C8: few traces, none after warm-up; the state in place; no host inside a round."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from specjax.decoding.loop import prefill_chunk, run_rounds
from specjax.models.mixers.short_conv import ShortConvState
from specjax.models.recurrence.layer import LayerState
from specjax.testing.conformance.case import Case, record
from specjax.testing.conformance.hlo import host_calls, rewrites

LARGE = 1000
"""Numbers of an array whose copy would be worth finding."""

CONVOLVED = (LayerState, ShortConvState)
"""States with the inputs of a convolution."""


def nothing_is_traced_after_warm_up(case: Case) -> str:
    """Other seeds, budgets and prompts run through the programs that are there."""
    _ = case.trace
    before = _programs()
    for shift in (1, 2):
        requests = tuple(
            dataclasses.replace(
                request,
                seed=request.seed + shift,
                prompt_ids=list(request.prompt_ids) * (1 + shift % 2),
                max_tokens=None
                if request.max_tokens is None
                else max(request.max_tokens - shift, 0),
            )
            for request in case.requests
        )
        record(case.engine(), requests)
    after = _programs()
    for name in before:
        if after[name] != before[name]:
            raise AssertionError(
                f"C8: {after[name] - before[name]} more traces of {name} after "
                "warm-up: something in the state or the drafter changes its shape, "
                "dtype or static part from run to run"
            )
    return f"traces so far: {after['run_rounds']} and {after['prefill_chunk']}"


def the_state_is_donated(case: Case) -> str:
    """Every buffer of the state that goes into a call is given up to it."""
    engine = case.engine()
    state = engine.start(case.requests)
    for name, call in (
        ("prefill_chunk", lambda s: _prefill(engine, s, case.prefill_width)),
        ("run_rounds", lambda s: engine.rounds(s)[0]),
    ):
        leaves = jax.tree_util.tree_leaves_with_path(state)
        state = jax.block_until_ready(call(state))
        kept = [jax.tree_util.keystr(path) for path, x in leaves if not x.is_deleted()]
        if kept:
            raise AssertionError(f"C8: {name} copies {kept[0]}: it was not donated")
    return f"{len(jax.tree.leaves(state))} arrays"


def _prefill(engine: Any, state: Any, width: int) -> Any:
    start = jax.numpy.int32(0)
    return prefill_chunk(engine.target, engine.drafter, state, start, width=width)


def the_loop_copies_no_state(case: Case) -> str:
    """The compiled loop writes no array of the states' size anew, and calls no host."""
    engine = case.engine()
    state = engine.start(case.requests)
    lowered = run_rounds.lower(
        engine.target,
        engine.drafter,
        engine.rule,
        state,
        options=engine.round_options,
        max_rounds=engine.options.rounds_per_call,
    )
    text = lowered.compile().as_text()
    assert text is not None
    states = (state.target, state.drafter)
    kept = jax.tree.map(
        _without_inputs, states, is_leaf=lambda x: isinstance(x, CONVOLVED)
    )
    caches = [x for x in jax.tree.leaves(kept) if _is_cache(x)]
    shapes = {x.shape for x in caches}
    wide = {x.shape for x in caches if x.dtype.itemsize > 1}
    found = rewrites(text, shapes, codes=shapes - wide)
    if found:
        raise AssertionError(
            f"C8: the loop writes arrays of the state's shapes {sorted(shapes)} anew: "
            f"{', '.join(found[:5])}"
        )
    calls = host_calls(text)
    if calls:
        raise AssertionError(f"C8: the round calls the host: {', '.join(calls[:5])}")
    return f"{len(shapes)} shapes looked for"


def _without_inputs(part: Any) -> Any:
    """A convolution's inputs are few, and every round writes all of them."""
    return part.replace(inputs=None) if isinstance(part, CONVOLVED) else part


def _is_cache(x: jax.Array) -> bool:
    """Large, and not a recurrent state, which every round rewrites as a whole."""
    return x.ndim >= 3 and x.size >= LARGE and max(x.shape) >= 128


def _programs() -> dict[str, int]:
    """How many programs each of the two compiled functions holds."""
    jitted: dict[str, Any] = {"run_rounds": run_rounds, "prefill_chunk": prefill_chunk}
    return {name: function._cache_size() for name, function in jitted.items()}
