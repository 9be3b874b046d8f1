"""Chains and dynamic trees from a head whose right answers are known.

The target's law is a table of the last two tokens, its hidden state a token's one-hot
vector. The head looks the table up with the pair that it is given, so it is right just
when every row gets the hidden state and the token that belong together.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax.acceptance import Coupled, Greedy, rejection
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.trees import chain, full
from specjax.decoding.types import Verdict
from specjax.drafters import NullDrafter
from specjax.drafters.draft_tree import DraftTree, HeadTree
from specjax.drafters.drawing import Pick
from specjax.drafters.dynamic_tree import HeadDynamicTree, ModelDynamicTree
from specjax.drafters.head_chain import HeadChain
from specjax.drafters.hydra import HydraHead, HydraHeads
from specjax.drafters.length import Confidence
from specjax.drafters.medusa import MedusaHead
from specjax.models.ends import Ends
from specjax.models.linear import Linear

V, K = 8, 4
COUNTERS = ("accepted", "drafted")
PROMPTS = ((5, 1, 4, 3, 2, 7, 1), (6,), (2, 3))
TABLE = jnp.asarray(np.random.default_rng(0).normal(0, 3, (V, V, V)), jnp.float32)


class Remembered(struct.PyTreeNode):
    last: jax.Array  # [B] int32: the last token that was committed
    count: jax.Array  # [B] int32


class PairTarget(struct.PyTreeNode):
    """Logits ``table[token before, token]``; tap 0 is the token as a one-hot vector."""

    table: jax.Array

    @property
    def vocab_size(self):
        return self.table.shape[0]

    def init(self, batch, capacity):
        return Remembered(*(jnp.zeros((batch,), jnp.int32) for _ in range(2)))

    def verify(self, state, window, *, taps=(), logits="all"):
        rows = jnp.arange(window.width, dtype=jnp.int32)
        above = window.ancestors & (rows[None, :] < rows[:, None])
        parent = jnp.max(jnp.where(above, rows, -1), axis=-1)
        tokens = jnp.take_along_axis(window.tokens, parent, axis=1, mode="clip")
        before = jnp.where(parent >= 0, tokens, state.last[:, None])
        return Verdict(
            logits=self.table[before, window.tokens] if logits == "all" else None,
            features={t: jax.nn.one_hot(window.tokens, self.vocab_size) for t in taps},
            pending=window.tokens,
            bad=jnp.zeros(window.tokens.shape, bool),
        )

    def commit(self, state, pending, acceptance):
        row = jnp.maximum(acceptance.num_tokens - 1, 0)[:, None]
        path = jnp.take_along_axis(acceptance.path, row, axis=1, mode="clip")
        last = jnp.take_along_axis(pending, path, axis=1, mode="clip")[:, 0]
        return Remembered(
            jnp.where(acceptance.num_tokens > 0, last, state.last),
            state.count + acceptance.num_tokens,
        )


class PairHead(struct.PyTreeNode):
    """Hands its token on, and beside it the logits that the pair has in the table."""

    table: jax.Array
    taps = (0,)

    @property
    def vocab_size(self):
        return self.table.shape[0]

    @property
    def hidden_size(self):
        return 2 * self.vocab_size

    def init(self, batch, capacity):
        return jnp.zeros((batch,), jnp.int32)

    def fuse(self, features):
        return jnp.pad(features[0], [(0, 0), (0, 0), (0, self.vocab_size)])

    def run(self, hidden, window, state):
        before = jnp.argmax(hidden[..., : self.vocab_size], axis=-1)
        token = jax.nn.one_hot(window.tokens, self.vocab_size)
        rows = self.table[before, window.tokens]
        return jnp.concatenate([token, rows], axis=-1), None

    def logits(self, out):
        return out[..., self.vocab_size :]

    def commit(self, state, pending, acceptance):
        return state + acceptance.num_tokens


TARGET, HEAD = PairTarget(TABLE), PairHead(TABLE)
NOISY = PairHead(TABLE + jax.random.normal(jax.random.key(1), TABLE.shape))


def requests(tokens=24, temperature=0.0, **settings):
    return [
        Request(
            prompt_ids=ids,
            max_tokens=tokens,
            temperature=temperature,
            seed=3 + i,
            **settings,
        )
        for i, ids in enumerate(PROMPTS)
    ]


def engine(drafter, rule, target=TARGET):
    widths = (drafter.max_nodes + 1,)
    options = EngineOptions(prefill_width=4, rounds_per_call=8, widths=widths)
    return Engine(target, drafter, rule, options)


def started(drafter, **settings):
    """The drafter's state and context behind the prompts."""
    run = engine(drafter, Coupled())
    state = run.prefill(run.start(requests(**settings)))
    return state.drafter, context_of(state)


def proposal_of(drafter, **settings):
    state, context = started(drafter, **settings)
    return jax.jit(lambda d, s, c: d.propose(s, c)[0])(drafter, state, context)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, Greedy()), (1.0, Coupled())])
def test_a_head_that_knows_the_answer_is_accepted_to_the_last_token(temperature, rule):
    rows = generate(engine(HeadChain(HEAD, K), rule), requests(101, temperature))
    for row, prompt in zip(rows, PROMPTS, strict=True):
        assert len(row.ids) == 101
        told = [(r.drafted, r.accepted) for r in row.rounds]
        if len(prompt) == 1:  # no pair: the first token comes without a draft
            assert told.pop(0) == (0, 0)
            assert told == [(K, K)] * 20
        else:
            assert told == [(K, K)] * 20 + [(0, 0)]


def hydra_of(table_before, table_token, count=3):
    """Heads for a law of two terms, by the token before and the token itself."""

    def head(i):
        last = [jnp.zeros((V, i * V)), table_before.T, table_token.T]
        skip = Linear(jnp.concatenate(last, axis=1))
        same = Linear(jnp.eye(V), bias=jnp.zeros(V))
        return HydraHead(Linear(0 * skip.weight), skip, MedusaHead((), same))

    ends = Ends(embedding=jnp.eye(V), head=Linear(jnp.eye(V)))
    return HydraHeads(ends, tuple(map(head, range(count))), tap=0)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, Greedy()), (1.0, Coupled())])
def test_hydra_heads_that_know_the_answer_are_accepted_to_the_last(temperature, rule):
    """Each reads the hidden state or the drafts: with a wire cut it is often wrong."""
    before, token = TABLE[0], TABLE[1]
    target = PairTarget(before[:, None] + token[None])
    heads = hydra_of(before, token)
    rows = generate(
        engine(HeadChain(heads, 3), rule, target), requests(61, temperature)
    )
    for row, prompt in zip(rows, PROMPTS, strict=True):
        told = [(r.drafted, r.accepted) for r in row.rounds]
        if len(prompt) == 1:  # no pair: the first token comes without a draft
            assert told.pop(0) == (0, 0) and told == [(3, 3)] * 15
        else:
            assert told == [(3, 3)] * 15 + [(0, 0)]
    cut = hydra_of(token, before)
    rows = generate(engine(HeadChain(cut, 3), rule, target), requests(61, temperature))
    accepted, drafted = (sum(getattr(row, x) for row in rows) for x in COUNTERS)
    assert accepted < 0.6 * drafted


def test_a_head_whose_pairs_are_shifted_is_worth_little():
    swapped = PairHead(TABLE.swapaxes(0, 1))
    rows = generate(engine(HeadChain(swapped, K), Greedy()), requests(60))
    plain = generate(engine(NullDrafter(), Greedy()), requests(60))
    assert [row.ids for row in rows] == [row.ids for row in plain]
    accepted, drafted = (sum(getattr(row, x) for row in rows) for x in COUNTERS)
    assert accepted < 0.5 * drafted


def test_what_is_drawn_is_drawn_from_the_law_that_is_told():
    drafter = HeadChain(NOISY, 3, pick=Pick.DRAWN)
    assert drafter.law is ProposalLaw.INDEPENDENT
    proposal = proposal_of(drafter, temperature=0.7)
    assert proposal.num_nodes.tolist() == [3, 0, 3]
    for row in (0, 2):
        text = [*PROMPTS[row], *proposal.tokens[row].tolist()]
        for step in range(3):
            at = len(PROMPTS[row]) + step
            law = jax.nn.log_softmax(NOISY.table[text[at - 2], text[at - 1]] / 0.7)
            np.testing.assert_allclose(proposal.log_q[row, step], law, atol=1e-5)
    rows = generate(engine(drafter, rejection()), requests(40, 0.7))
    accepted, drafted = (sum(getattr(row, x) for row in rows) for x in COUNTERS)
    assert 0.3 * drafted < accepted < drafted


def test_a_policy_ends_the_draft_where_the_head_is_unsure():
    least = 0.5
    proposal = proposal_of(HeadChain(NOISY, K, length=Confidence(least)))
    for row in (0, 2):
        text, sure = list(PROMPTS[row]), 1.0
        wanted = 0
        while wanted < K:
            law = np.asarray(jax.nn.softmax(NOISY.table[text[-2], text[-1]]))
            sure *= law.max()
            if sure < least:
                break
            text.append(int(law.argmax()))
            wanted += 1
        assert int(proposal.num_nodes[row]) == wanted
        drafts = text[len(PROMPTS[row]) :]
        assert proposal.tokens[row, :wanted].tolist() == drafts
    assert set(proposal.num_nodes.tolist()) != {K}


def test_logits_that_are_nan_cost_acceptance_and_nothing_else():
    broken = PairHead(jnp.full_like(TABLE, jnp.nan))
    asked = requests(20, 0.8)
    plain = generate(engine(NullDrafter(), Coupled()), asked)
    for drafter in (HeadChain(broken, K), HeadDynamicTree(broken, 2, 3, 5)):
        rows = generate(engine(drafter, Coupled()), asked)
        assert [row.ids for row in rows] == [row.ids for row in plain]
        assert all(row.drafted > 0 for row in rows)


def by_hand(table, text, top_k, depth, nodes):
    """EAGLE-2's tree, candidate by candidate: ``(token, parent)``, -1 the anchor."""

    def children(path):
        law = np.asarray(jax.nn.log_softmax(table[path[-2], path[-1]]), np.float64)
        return [(law[t], t) for t in np.argsort(-law, kind="stable")[:top_k]]

    found = [(s, t, -1, (*text, t)) for s, t in children(text)]
    beam = list(range(top_k))
    for _ in range(1, depth):
        first = len(found)
        for node in beam:
            score, _, _, path = found[node]
            found += [(score + s, t, node, (*path, t)) for s, t in children(path)]
        new = sorted(range(first, len(found)), key=lambda c: -found[c][0])
        beam = new[:top_k]
    best = sorted(range(len(found)), key=lambda c: -found[c][0])[:nodes]
    place = {-1: -1} | {c: i for i, c in enumerate(sorted(best))}
    return [(int(found[c][1]), place[found[c][2]]) for c in sorted(best)]


@pytest.mark.parametrize("kind", ["head", "model"])
def test_the_dynamic_tree_is_the_one_made_by_hand(kind):
    shape = (3, 4, 11)
    if kind == "head":
        drafter = HeadDynamicTree(NOISY, *shape)
    else:
        drafter = ModelDynamicTree(PairTarget(NOISY.table), *shape)
    proposal = proposal_of(drafter)
    assert proposal.num_nodes.tolist() == [11, 0 if kind == "head" else 11, 11]
    for row in (0, 2):
        wanted = by_hand(NOISY.table, PROMPTS[row], *shape)
        tokens, parents = proposal.tokens[row].tolist(), proposal.parents[row].tolist()
        assert list(zip(tokens, parents, strict=True)) == wanted
    assert len({tuple(x) for x in proposal.parents.tolist()}) > 1  # not one shape


def test_a_dynamic_tree_keeps_more_than_its_chain_and_changes_nothing():
    asked, rule = requests(40, 0.8), Coupled()
    plain = generate(engine(NullDrafter(), rule), asked)
    rounds = []
    for drafter in (
        HeadChain(NOISY, 3, pick=Pick.BEST),
        HeadDynamicTree(NOISY, 3, 3, 9),
        ModelDynamicTree(PairTarget(NOISY.table), 3, 3, 9),
    ):
        rows = generate(engine(drafter, rule), asked)
        assert [row.ids for row in rows] == [row.ids for row in plain]
        rounds.append(sum(len(row.rounds) for row in rows))
    assert rounds[0] > rounds[1] and rounds[0] > rounds[2]


def test_a_tree_of_one_child_a_node_is_the_chain_penalties_and_bias_included():
    settings = {"frequency_penalty": 1.5, "logit_bias": {3: -9.0}}
    grown = proposal_of(HeadDynamicTree(NOISY, 1, K, K), **settings)
    fixed = proposal_of(HeadTree(NOISY, chain(K)), **settings)
    wanted = proposal_of(HeadChain(NOISY, K, pick=Pick.BEST), **settings)
    bare = proposal_of(HeadChain(NOISY, K, pick=Pick.BEST))
    for row in (0, 2):
        assert grown.tokens[row].tolist() == wanted.tokens[row].tolist()
        assert fixed.tokens[row].tolist() == wanted.tokens[row].tolist()
        assert 3 not in wanted.tokens[row].tolist()
    assert fixed.num_nodes.tolist() == wanted.num_nodes.tolist() == [K, 0, K]
    assert wanted.tokens.tolist() != bare.tokens.tolist()


def test_a_tree_of_fixed_shape_is_the_one_of_a_model_with_the_same_law():
    tree = full((2, 2, 1))
    ours = proposal_of(HeadTree(NOISY, tree))
    models = proposal_of(DraftTree(PairTarget(NOISY.table), tree))
    for row in (0, 2):
        assert ours.tokens[row].tolist() == models.tokens[row].tolist()


def test_tokens_that_a_head_cannot_say_are_no_nodes():
    closed = jnp.where(jnp.arange(V) < 2, TABLE, -jnp.inf)
    proposal = proposal_of(HeadDynamicTree(PairHead(closed), 3, 3, 20))
    for row in (0, 2):
        count = int(proposal.num_nodes[row])
        assert count == 2 + 2 * 2 + 3 * 2  # three of four nodes went on
        assert max(proposal.tokens[row, :count].tolist()) < 2


def test_shapes_out_of_range_are_refused():
    with pytest.raises(ValueError, match="k = 0"):
        HeadChain(HEAD, 0)
    for wrong in ({"top_k": 0}, {"depth": 0}, {"nodes": 0}):
        with pytest.raises(ValueError, match="needs 1 or more"):
            HeadDynamicTree(HEAD, **wrong)
    small = HeadDynamicTree(HEAD, top_k=3, depth=1, nodes=50)
    assert (small.max_nodes, small.max_depth) == (3, 1)
