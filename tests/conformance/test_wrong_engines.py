"""Negative controls: engines and drafters whose mistakes must make the suite fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.engine import Engine
from specjax.drafters.ngram import NGram
from specjax.testing.conformance import c7_boundaries as c7
from specjax.testing.conformance import c8_compile as c8
from specjax.testing.conformance.controls import broken, caught, sound


class EvolvingKey(Engine):
    """The key moves on with every call."""

    def rounds(self, state):
        new, log = super().rounds(state)
        return new.replace(seeds=new.seeds + jnp.uint32(1)), log


class DrafterWritesIntoTheTarget(Engine):
    """A drafter that shares the target's cache has left something in it."""

    def rounds(self, state):
        new, log = super().rounds(state)
        first = new.target.blocks[0]
        blocks = (first.replace(k=first.k * 1.01), *new.target.blocks[1:])
        return new.replace(target=new.target.replace(blocks=blocks)), log


class CountsTheBonus(Engine):
    """The target's own token is counted as an accepted draft."""

    def rounds(self, state):
        new, log = super().rounds(state)
        more = (log.steps.committed > 0).astype(jnp.int32)
        steps = log.steps.replace(accepted=log.steps.accepted + more)
        stats = new.stats.replace(accepted=new.stats.accepted + more.sum(axis=0))
        return new.replace(stats=stats), log.replace(steps=steps)


class ForgetsARound(Engine):
    """Rounds without drafts are not counted."""

    def rounds(self, state):
        before = jnp.array(state.stats.rounds)
        new, log = super().rounds(state)
        idle = log.steps.drafted[0] == 0
        rounds = jnp.where(idle, before, new.stats.rounds)
        return new.replace(stats=new.stats.replace(rounds=rounds)), log


class ThawsFinishedRows(Engine):
    """The state of a row goes on changing after its end."""

    def rounds(self, state):
        was_done = jnp.array(state.done)
        new, log = super().rounds(state)
        first = new.target.blocks[0]
        k = jnp.where(was_done[:, None, None, None], first.k + 1.0, first.k)
        blocks = (first.replace(k=k), *new.target.blocks[1:])
        return new.replace(target=new.target.replace(blocks=blocks)), log


@pytest.mark.parametrize(
    ("mistake", "sampled", "contracts"),
    [
        (EvolvingKey, True, {"C1"}),
        (DrafterWritesIntoTheTarget, False, {"C3"}),
        (CountsTheBonus, False, {"C9"}),
        (ForgetsARound, False, {"C9"}),
        (ThawsFinishedRows, False, {"C5"}),
    ],
)
def test_a_wrong_engine_is_caught(mistake, sampled, contracts):
    case = sound("llama", sampled)
    assert contracts <= caught(broken(case, engine_type=mistake))


class LooksForTheEndOnlyAtTheEnd(Engine):
    """An end-of-sequence id counts as the last token of a round, not inside one."""

    @property
    def round_options(self):
        return super().round_options.replace(eos_ids=())

    def rounds(self, state):
        new, log = super().rounds(state)
        last = jnp.take_along_axis(new.tokens, new.lengths[:, None] - 1, axis=1)
        ids = jnp.asarray(self.options.eos_ids or (-9,), jnp.int32)
        stop = jnp.any(last == ids, axis=1) & ~new.done
        reason = jnp.where(stop, 1, new.finish_reason).astype(jnp.int32)
        return new.replace(done=new.done | stop, finish_reason=reason), log


def test_running_past_the_end_is_caught():
    case = sound("llama", sampled=False)
    with pytest.raises(AssertionError, match=r"C7: end-of-sequence ids"):
        c7.eos_ends_rows(broken(case, engine_type=LooksForTheEndOnlyAtTheEnd))


# Compiled programs


class Rewriting(NGram):
    """A drafter that keeps a cache and writes it anew in every round."""

    def init(self, batch, capacity):
        return jnp.zeros((batch, 2, capacity, 8), jnp.float32)

    def observe(self, state, pending, window, verdict, acceptance):
        if pending is None:
            return state
        num = acceptance.num_tokens.astype(jnp.float32)
        return state * 0.5 + num[:, None, None, None]

    def propose(self, state, context):
        return super().propose(None, context)[0], ()


class CallsTheHost(NGram):
    """A drafter that asks the host."""

    def propose(self, state, context):
        proposal, _ = super().propose(state, context)
        shape = jax.ShapeDtypeStruct(proposal.num_nodes.shape, jnp.int32)
        num = jax.pure_callback(lambda n: np.asarray(n), shape, proposal.num_nodes)
        return proposal.replace(num_nodes=num), None


@pytest.mark.parametrize(
    ("drafter", "told"),
    [(Rewriting(k=2), "writes arrays"), (CallsTheHost(k=2), "calls the host")],
    ids=["rewrites", "host"],
)
def test_a_costly_drafter_is_caught(drafter, told):
    case = sound("llama", sampled=False).but(drafter=drafter, widths=(3,), planted=None)
    with pytest.raises(AssertionError, match=f"C8: the (loop|round) {told}"):
        c8.the_loop_copies_no_state(case)


class GrowsAField(Engine):
    """From the second run on, the state has one more array."""

    starts = 0

    def start(self, requests):
        type(self).starts += 1
        state = super().start(requests)
        if self.starts == 1:
            return state
        none = jnp.zeros(state.lengths.shape, jnp.float32)
        return state.replace(sampling=state.sampling.replace(presence=none))


def test_a_retrace_is_caught():
    case = sound("llama", sampled=False).but(engine_type=GrowsAField)
    with pytest.raises(AssertionError, match=r"C8: 1 more traces of run_rounds"):
        c8.nothing_is_traced_after_warm_up(case)
