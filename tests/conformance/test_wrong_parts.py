"""Negative controls: each of these mistakes must make the suite fail.

They are mistakes that other engines have made. A suite that lets one of them pass
proves nothing by passing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax.acceptance.coupled import Coupled
from specjax.acceptance.descend import descend
from specjax.acceptance.greedy import Greedy
from specjax.decoding.engine import Engine
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.noise import sample
from specjax.testing.conformance import c2_no_trace as c2
from specjax.testing.conformance import c4_rows as c4
from specjax.testing.conformance import c6_poison as c6
from specjax.testing.conformance.controls import broken, caught, sound


@pytest.mark.parametrize("sampled", [False, True])
def test_nothing_is_found_where_nothing_is_wrong(sampled):
    assert caught(sound("llama", sampled)) == set()


# Rules


class Rule(struct.PyTreeNode):
    takes = frozenset(ProposalLaw)


class AcceptsEverything(Rule):
    """Takes the first child of every row, whatever its token."""

    def accept(self, proposal, window, laws, draws, *, max_depth):
        greedy = Greedy().accept(proposal, window, laws, draws, max_depth=max_depth)
        nodes = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32)
        parents = jnp.where(nodes < proposal.num_nodes[:, None], proposal.parents, 99)

        def choose(rows, depths, walking):
            child = jnp.argmax(parents == rows[:, None] - 1, axis=1)
            drafted = jnp.take_along_axis(window.tokens, child[:, None] + 1, axis=1)
            has = jnp.any(parents == rows[:, None] - 1, axis=1)
            return jnp.where(has, drafted[:, 0], greedy.tokens[:, 0])

        return descend(proposal, window, choose, max_depth=max_depth)


class BonusFromTheAnchor(Rule):
    """The last token comes from the anchor's law, not from the last row's."""

    def accept(self, proposal, window, laws, draws, *, max_depth):
        right = Greedy().accept(proposal, window, laws, draws, max_depth=max_depth)
        slots = jnp.arange(right.tokens.shape[1], dtype=jnp.int32)
        last = slots == right.num_tokens[:, None] - 1
        first = jnp.argmax(laws.logits_at(jnp.zeros_like(right.num_tokens)), axis=1)
        wrong = first.astype(jnp.int32)[:, None]
        return right.replace(tokens=jnp.where(last, wrong, right.tokens))


class NoiseByRound(Rule):
    """One draw for all tokens of a round."""

    def accept(self, proposal, window, laws, draws, *, max_depth):
        at = window.positions[:, 0] + 1

        def choose(rows, depths, walking):
            return sample(laws.scores_at(rows), draws.seeds, at)

        return descend(proposal, window, choose, max_depth=max_depth)


class SeedOfTheFirstRow(Rule):
    """Every row draws with the seed of row 0."""

    def accept(self, proposal, window, laws, draws, *, max_depth):
        seeds = jnp.broadcast_to(draws.seeds[:1], draws.seeds.shape)
        same = draws.replace(seeds=seeds)
        return Coupled().accept(proposal, window, laws, same, max_depth=max_depth)


class Stuck(Rule):
    """Commits nothing when the first draft is rejected."""

    def accept(self, proposal, window, laws, draws, *, max_depth):
        right = Greedy().accept(proposal, window, laws, draws, max_depth=max_depth)
        drafted = jnp.any(window.valid[:, 1:], axis=1)
        none = drafted & (right.num_tokens == 1)
        return right.replace(num_tokens=jnp.where(none, 0, right.num_tokens))


@pytest.mark.parametrize(
    ("rule", "sampled", "contracts"),
    [
        (AcceptsEverything(), False, {"C1"}),
        (BonusFromTheAnchor(), False, {"C1"}),
        (NoiseByRound(), True, {"C1"}),
        (SeedOfTheFirstRow(), True, {"C1"}),
        (Stuck(), False, {"C5"}),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Rule) else "",
)
def test_a_wrong_rule_is_caught(rule, sampled, contracts):
    assert contracts <= caught(broken(sound("llama", sampled), rule=rule))


def test_a_wrong_seed_is_caught_without_a_reference():
    case = sound("llama", True).but(rule=SeedOfTheFirstRow())
    with pytest.raises(AssertionError, match="C4: round"):
        c4.rows_do_not_know_their_place(case)


# Targets


class Faulty(struct.PyTreeNode):
    """A decoder whose commit is given another acceptance than it should be."""

    decoder: object

    @property
    def vocab_size(self):
        return self.decoder.vocab_size

    def init(self, batch, capacity):
        return self.decoder.init(batch, capacity)

    def verify(self, state, window, *, taps=(), logits="all"):
        return self.decoder.verify(state, window, taps=taps, logits=logits)

    def commit(self, state, pending, acceptance):
        width = jax.tree.leaves(pending)[0].shape[1]
        wrong = self.mistake(acceptance, width)
        new = self.decoder.commit(state, pending, wrong)
        return new.replace(lengths=state.lengths + acceptance.num_tokens)

    def canonical(self, state):
        return self.decoder.canonical(state)


class ShiftsThePath(Faulty):
    """Each row's successor is committed in its place."""

    def mistake(self, acceptance, width):
        return acceptance.replace(path=jnp.minimum(acceptance.path + 1, width - 1))


class TakesTheFirstRows(Faulty):
    """The tree is not compacted: the first rows are taken for the path."""

    def mistake(self, acceptance, width):
        rows = jnp.arange(acceptance.path.shape[1], dtype=jnp.int32)
        return acceptance.replace(path=jnp.broadcast_to(rows, acceptance.path.shape))


class CommitsRejectedRows(Faulty):
    """The whole window goes into the state, as far as the path reaches, and on."""

    def mistake(self, acceptance, width):
        slots = acceptance.path.shape[1]
        some = acceptance.num_tokens > 0
        rows = jnp.arange(slots, dtype=jnp.int32)
        path = jnp.where(
            acceptance.taken, acceptance.path, jnp.minimum(rows, width - 1)
        )
        return acceptance.replace(path=path, num_tokens=jnp.where(some, slots, 0))


class ReadsUnusedSlots(Faulty):
    """A mask that multiplies: 0 * NaN."""

    def verify(self, state, window, *, taps=(), logits="all"):
        verdict = self.decoder.verify(state, window, taps=taps, logits=logits)
        leak = sum(jnp.sum(leaf) * 0.0 for leaf in jax.tree.leaves(state.blocks))
        if verdict.logits is None:
            return verdict
        rows = verdict.logits + leak
        bad = ~jnp.all(jnp.isfinite(rows), axis=-1)
        return verdict.replace(logits=rows, bad=bad)

    def mistake(self, acceptance, width):
        return acceptance


@pytest.mark.parametrize(
    ("mistake", "target", "contracts"),
    [
        (ShiftsThePath, "llama", {"C1", "C3"}),
        (TakesTheFirstRows, "llama", {"C1", "C3"}),
        pytest.param(
            *(CommitsRejectedRows, "hybrid", {"C1", "C3"}), marks=pytest.mark.full
        ),
    ],
)
def test_a_wrong_commit_is_caught(mistake, target, contracts):
    case = sound(target, sampled=False)
    # a serial decode never rejects, so it is the decoder's own
    assert contracts <= caught(broken(case, target=mistake(case.target)))


def test_a_trace_of_rejected_rows_is_caught():
    case = sound("hybrid", sampled=False)
    faulty = broken(case, target=CommitsRejectedRows(case.target))
    with pytest.raises(AssertionError, match="C2: round"):
        c2.rejected_tokens_leave_no_trace(faulty)


def test_a_leak_of_unused_slots_is_caught():
    case = sound("llama", sampled=False)
    with pytest.raises(AssertionError, match=r"C6: .* unused slots"):
        c6.unused_slots_change_nothing(
            broken(case, target=ReadsUnusedSlots(case.target))
        )


class NoPrefill(Engine):
    def prefill(self, state):
        return state


class ChangesWhatItReads(struct.PyTreeNode):
    """A target whose verify writes into the state that it was given."""

    decoder: object
    vocab_size = 61

    def init(self, batch, capacity):
        return {"seen": np.zeros((batch,), np.int32), "own": None}

    def verify(self, state, window, *, taps=(), logits="all"):
        state["seen"] += 1
        inner = self.decoder.init(*window.tokens.shape)
        return self.decoder.verify(inner, window, taps=taps, logits=logits)

    def commit(self, state, pending, acceptance):
        return state


def test_a_verify_that_writes_is_caught():
    case = sound("llama", sampled=False)
    faulty = case.but(target=ChangesWhatItReads(case.target), engine_type=NoPrefill)
    with pytest.raises(AssertionError, match=r"C2: verify changed \['seen'\]"):
        c2.verify_changes_nothing(faulty)
