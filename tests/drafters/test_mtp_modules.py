"""Several MTP modules, against a recomputation that keeps nothing between rounds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax.acceptance import Coupled, Greedy
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.interfaces import FINAL, ProposalLaw
from specjax.decoding.requests import Request
from specjax.decoding.round import context_of
from specjax.decoding.types import Acceptance
from specjax.decoding.windows import chunk_window
from specjax.drafters import NullDrafter
from specjax.drafters.drawing import Pick
from specjax.drafters.head_chain import HeadChain
from specjax.drafters.mtp import MTPModules
from specjax.drafters.mtp_modules import ModuleChain, mtp_drafter
from specjax.testing.conformance import check_drafter
from specjax.testing.toy_mtp import toy_mtp
from specjax.testing.toys import toy_llama

TOY = toy_llama(num_hidden_layers=1)
HEADS = toy_mtp(TOY, 3)
PROMPTS = ((5, 17, 40, 3, 22, 9, 1), (8,), (30, 2), (7, 7, 50))
K, LONGEST = 4, 32


class AcceptSome(struct.PyTreeNode):
    """Accepts none, some or all drafts of a chain, as the position has it."""

    name = "accept-some"
    takes = frozenset(ProposalLaw)

    def accept(self, proposal, window, laws, draws, *, max_depth):
        wanted = window.positions[:, 0] * 3 % (max_depth + 1)
        drafts = window.valid.sum(axis=1, dtype=jnp.int32) - 1
        count = jnp.minimum(wanted, jnp.minimum(drafts, proposal.num_nodes))[:, None]
        rows = jnp.arange(max_depth + 1, dtype=jnp.int32)
        following = jnp.pad(proposal.tokens, [(0, 0), (0, 1)])
        tokens = jnp.where(rows < count, following, 7)
        return Acceptance(
            path=jnp.where(rows <= count, rows, 0),
            tokens=jnp.where(rows <= count, tokens, -1),
            num_tokens=count[:, 0] + 1,
        )


def requests(temperature: float = 1.0, tokens: int = 16) -> list[Request]:
    return [
        Request(prompt_ids=ids, max_tokens=tokens, temperature=temperature, seed=3 + i)
        for i, ids in enumerate(PROMPTS)
    ]


def engine(drafter, rule, **options) -> Engine:
    usual = {
        "prefill_width": 3,
        "rounds_per_call": 1,
        "widths": (drafter.max_nodes + 1,),
    }
    return Engine(TOY.decoder, drafter, rule, EngineOptions(**usual | options))


@jax.jit
def finals(decoder, tokens):
    zero = jnp.zeros((1,), jnp.int32)
    window = chunk_window(tokens, zero, zero + LONGEST, LONGEST)
    verdict = decoder.verify(decoder.init(1, LONGEST), window, taps=(FINAL,))
    return verdict.features[FINAL]


@partial(jax.jit, static_argnames="first")
def all_rows(head, hidden, tokens, first):
    """A module on its rows ``first ..``, whose tokens are those that follow."""
    zero = jnp.zeros((1,), jnp.int32)
    width = LONGEST - 1 - first
    window = chunk_window(tokens[:, first + 1 :], zero, zero + width, width)
    out, _ = head.run(hidden[:, first:], window, head.init(1, LONGEST))
    return jnp.pad(out, [(0, 0), (first, 0), (0, 0)])


def recomputed(heads, text: list[int], drafts: list[int]) -> np.ndarray:
    """``[K, V]``: what is said behind a text and the first drafts, for each number."""
    known = len(text) - 1  # rows whose hidden state the target has said
    padded = [*text, *drafts]
    padded = jnp.asarray([padded + [0] * (LONGEST - len(padded))], jnp.int32)
    true = finals(TOY.decoder, padded)[:, :-1]
    outs = [jnp.zeros_like(true)] * len(heads)
    # every time, what depends on more rows before it becomes right
    for _ in range(LONGEST if len(heads) > 1 else len(drafts)):
        before = [o.copy() for o in map(np.asarray, outs)]
        for m, head in enumerate(heads):
            later = jnp.pad(outs[m - 1][:, :-1], [(0, 0), (1, 0), (0, 0)])
            ahead = jnp.arange(LONGEST - 1)[:, None] >= known
            hidden = later if m else jnp.where(ahead, later, true)
            outs[m] = all_rows(head, hidden, padded, m)
        if all(np.array_equal(a, b) for a, b in zip(before, outs, strict=True)):
            break
    rows = [outs[s % len(heads)][0, known - 1 + s] for s in range(len(drafts))]
    return np.asarray(HEADS[0].logits(jnp.stack(rows)[None])[0])


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.full)])
def test_what_is_drafted_is_what_a_recomputation_says(count):
    """Rows of one, two, four and seven tokens, and any number of accepted drafts."""
    heads = HEADS[:count]
    drafter = ModuleChain(MTPModules(heads), K, pick=Pick.DRAWN)
    run = engine(drafter, AcceptSome())
    state = run.prefill(run.start(requests()))
    propose = jax.jit(lambda drafter, own, context: drafter.propose(own, context)[0])
    compared, accepted = 0, set()
    while not bool(state.done.all()):
        proposal = propose(drafter, state.drafter, context_of(state))
        lengths = np.asarray(state.lengths)
        for row in range(len(PROMPTS)):
            nodes = int(proposal.num_nodes[row])
            pairs, room = int(lengths[row]) - 1, int(state.limits[row] - lengths[row])
            usual = K if pairs >= count else min(pairs and count, K)
            assert nodes == min(usual, max(room - 1, 0))
            if nodes:
                text = state.tokens[row, : lengths[row]].tolist()
                drafts = proposal.tokens[row, :nodes].tolist()
                law = jax.nn.log_softmax(recomputed(heads, text, drafts))
                np.testing.assert_allclose(proposal.log_q[row, :nodes], law, atol=2e-4)
                compared += 1
        state, log = run.rounds(state)
        accepted |= set(np.asarray(log.steps.accepted[0]).tolist())
    assert compared > 12 and accepted >= {0, 1, 3}


@pytest.mark.full
def test_one_module_drafts_as_a_chain_does():
    tokens = []
    for drafter in (
        HeadChain(HEADS[0], K, pick=Pick.DRAWN),
        ModuleChain(MTPModules(HEADS[:1]), K, pick=Pick.DRAWN),
    ):
        run = engine(drafter, AcceptSome(), rounds_per_call=16)
        state, _ = run.rounds(run.prefill(run.start(requests())))
        assert bool(state.done.all())
        tokens.append(np.asarray(state.tokens))
    np.testing.assert_array_equal(*tokens)


def test_stale_rows_would_show():
    """Rows of the second module that read what the first one guessed, kept."""
    text, drafts = [5, 17, 40, 3, 22, 9, 1], [4, 20, 33]
    right = recomputed(HEADS[:2], [*text, *drafts], [11, 12])
    # the hidden states of the drafts are the first module's guesses
    stale = recomputed(HEADS[:2], text, [*drafts, 11, 12])[len(drafts) :]
    assert np.abs(right - stale).max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize(("temperature", "rule"), [(0.0, Greedy()), (0.9, Coupled())])
def test_tokens_are_those_of_plain_decoding(temperature, rule):
    some = requests(temperature, tokens=12)
    drafter = mtp_drafter(MTPModules(HEADS), 4)
    assert isinstance(drafter, ModuleChain)
    got = generate(engine(drafter, rule, rounds_per_call=8), some)
    plain = generate(engine(NullDrafter(), rule, rounds_per_call=8), some)
    assert [c.ids for c in got] == [c.ids for c in plain]
    assert got[1].rounds[0].drafted == 0  # one token, no pair
    assert got[2].rounds[0].drafted == 3 and got[0].rounds[0].drafted == 4


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_contracts():
    drafter = ModuleChain(MTPModules(HEADS[:2]), 3)
    check_drafter(drafter, TOY, Coupled()).assert_ok()
