"""Reading compiled programs, and what the loop's looks like."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from specjax.acceptance.coupled import Coupled
from specjax.decoding.kinds import kinds
from specjax.testing.conformance import c8_compile as c8
from specjax.testing.conformance.hlo import (
    host_calls,
    loop_instructions,
    parse,
    rewrites,
)
from specjax.testing.conformance.matrix import Cell, case_of

SHAPE = (3, 2, 128, 8)


def compiled(step, *arguments, dtype=jnp.float32) -> str:
    """A loop of five steps over a donated array."""

    def loop(cache, *rest):
        def body(carry):
            i, cache = carry
            return i + 1, step(i, cache, *rest)

        return jax.lax.while_loop(lambda c: c[0] < 5, body, (jnp.int32(0), cache))

    jitted = jax.jit(loop, donate_argnums=0)
    return jitted.lower(jnp.ones(SHAPE, dtype), *arguments).compile().as_text()


def test_a_scatter_into_the_cache_is_in_place():
    def step(i, cache, rows):
        at = jnp.arange(3, dtype=jnp.int32)[:, None]
        return cache.at[at, :, i + jnp.zeros((3, 2), jnp.int32)].set(rows, mode="drop")

    text = compiled(step, jnp.ones((3, 2, 2, 8)))
    assert loop_instructions(parse(text))
    assert rewrites(text, [SHAPE]) == []


@pytest.mark.parametrize(
    "step",
    [
        lambda i, cache: jnp.where(cache > 0.5, cache, 0.0),
        lambda i, cache: cache.at[i].set(cache.sum(axis=0)) * 0.5,
        lambda i, cache: jnp.roll(cache, 1, axis=2),
        lambda i, cache: cache.at[0].set(1.0) + cache,
        lambda i, cache: jax.lax.cond(
            i > 3, lambda: jnp.where(cache > 1, 0.0, cache), lambda: cache * 2.0
        ),
    ],
    ids=["mask", "scale", "roll", "old and new", "in both branches"],
)
def test_whatever_writes_the_whole_cache_is_found(step):
    assert rewrites(compiled(step), [SHAPE])


def read_and_written(i, codes):
    """Widened to be read, and updated in place."""
    wide = jax.lax.optimization_barrier(codes.astype(jnp.float32))
    most = jnp.clip(wide.max(), -9, 9).astype(jnp.int8)
    return codes.at[0, 0, i, 0].set(most)


def test_codes_may_be_widened_to_be_read_and_not_be_written_anew():
    text = compiled(read_and_written, dtype=jnp.int8)
    assert rewrites(text, [SHAPE])  # as of a cache that needs no widening
    assert rewrites(text, [SHAPE], codes=[SHAPE]) == []

    def again(i, codes):
        return jax.lax.optimization_barrier(codes.astype(jnp.float32)).astype(jnp.int8)

    assert rewrites(compiled(again, dtype=jnp.int8), [SHAPE], codes=[SHAPE])


def test_what_a_rare_branch_makes_for_itself_is_no_rewrite():
    """A branch whose sibling does nothing may read the cache through a mask."""

    def step(i, cache):
        total = cache.sum(axis=(0, 1, 3))
        masked = jax.lax.cond(
            jnp.isfinite(total[0]),
            lambda: total,
            lambda: jnp.einsum("abtd,abtd->t", jnp.where(cache > 0, cache, 0.0), cache),
        )
        return cache.at[0, 0, :, 0].set(masked)

    assert rewrites(compiled(step), [SHAPE]) == []


def test_a_call_of_the_host_is_found():
    def step(i, cache):
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return cache.at[jax.pure_callback(lambda n: n, shape, i)].set(0.0)

    assert host_calls(compiled(step))
    assert not host_calls(compiled(lambda i, cache: cache.at[i].set(0.0)))


@pytest.mark.parametrize("target", ["llama", "hybrid"])
def test_the_loop_over_several_widths_copies_no_cache(target):
    case = case_of(Cell(target, "ngram", "greedy", k=4))
    assert case.engine().round_options.widths == (1, 5)
    c8.the_loop_copies_no_state(case)


@pytest.mark.parametrize("target", ["llama", "hybrid"])
def test_a_draft_model_copies_no_cache(target):
    """Its commit does not wait for an acceptance, but it must wait for its pass."""
    c8.the_loop_copies_no_state(case_of(Cell(target, "draft-model", "coupled", k=4)))


def test_drafters_with_equal_fields_are_not_mixed_up():
    """JAX takes such pytrees for equal; three hundred of them met by chance."""

    def drafter(i):
        body = {"propose": lambda self, state, context: i, "__module__": __name__}
        return type(f"Drafter{i}", (struct.PyTreeNode,), body)()

    @partial(jax.jit, static_argnames="kinds")
    def run(part, x, *, kinds):
        return x + part.propose(None, None)

    for i in range(300):
        one = drafter(i)
        assert int(run(one, jnp.int32(0), kinds=kinds(one))) == i
    case = case_of(Cell("llama", "ngram", "greedy", k=4))
    assert case.engine().kinds != case.but(rule=Coupled()).engine().kinds
    assert case.engine().kinds == case.engine().kinds
