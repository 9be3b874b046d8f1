"""Medusa heads: against their authors' outputs, cut wires, and what a row may draft."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Coupled
from specjax.checkpoints import Checkpoint, load
from specjax.checkpoints.drafters import load_part, save_part
from specjax.checkpoints.errors import CheckpointError
from specjax.decoding.interfaces import FINAL, ProposalLaw
from specjax.decoding.trees import Tree, from_choices, full
from specjax.decoding.types import (
    Acceptance,
    Context,
    Counts,
    Proposal,
    Sampling,
    Verdict,
    Window,
)
from specjax.drafters import DRAFTERS, DrafterOptions
from specjax.drafters.drawing import Pick
from specjax.drafters.medusa import MedusaChain, MedusaHead, MedusaHeads, MedusaTree
from specjax.models.build import WeightType
from specjax.models.linear import Linear
from specjax.testing.conformance import check_drafter
from specjax.testing.drafter_parity.check import check_drafter_parity
from specjax.testing.parity_arrays import OracleError
from specjax.testing.toys import toy_llama

DATA = Path(__file__).resolve().parents[1] / "data"
ORACLES = DATA / "drafter_oracles"
TARGETS = {"medusa": "llama", "medusa_merged": "qwen3"}
B, K, D, V = 3, 4, 6, 11

propose = jax.jit(lambda drafter, state, context: drafter.propose(state, context)[0])


def target_of(name: str) -> Checkpoint:
    folder = DATA / "oracles" / TARGETS[name]
    return load(folder, WeightType.FLOAT32, tokenizer=False)


def heads_of(seed: int, count: int = K, hidden: int = D, vocab: int = V) -> MedusaHeads:
    draw = np.random.default_rng(seed)

    def linear(outputs: int, bias: bool) -> Linear:
        weight = draw.standard_normal((outputs, hidden)).astype(np.float32)
        offset = draw.standard_normal(outputs).astype(np.float32)
        return Linear(jnp.asarray(weight), bias=jnp.asarray(offset) if bias else None)

    return MedusaHeads(
        tuple(
            MedusaHead((linear(hidden, True),), linear(vocab, False))
            for _ in range(count)
        )
    )


HEADS = heads_of(0)
CHAIN = MedusaChain(HEADS, K, pick=Pick.BEST)


def context_of(room: int = 9, **fields) -> Context:
    full = {
        "tokens": jnp.zeros((B, 8), jnp.int32),
        "lengths": jnp.array([3, 5, 4], jnp.int32),
        "room": jnp.full((B,), room, jnp.int32),
        "done": jnp.zeros((B,), bool),
        "seeds": jnp.arange(B, dtype=jnp.uint32),
        "sampling": Sampling(),
        "counts": None,
    }
    return Context(**(full | fields))


def observe(drafter, state, features: np.ndarray, path, num):
    """The state after ``path`` in a window of these features ``[B, W, D]``."""
    rows = jnp.asarray(features, jnp.float32)
    batch, width, _ = rows.shape
    verdict = Verdict(None, {FINAL: rows}, None, jnp.zeros((batch, width), bool))
    path = jnp.asarray(path, jnp.int32)
    taken = Acceptance(path, jnp.ones_like(path), jnp.asarray(num, jnp.int32))
    window = Window(
        tokens=jnp.zeros((batch, width), jnp.int32),
        positions=jnp.zeros((batch, width), jnp.int32),
        ancestors=jnp.zeros((batch, width, width), bool),
        valid=jnp.ones((batch, width), bool),
    )
    return drafter.observe(state, None, window, verdict, taken)


def some_features(seed: int = 1, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, width, D))


def expected(hidden: np.ndarray) -> np.ndarray:
    """``[K, V]`` logits in plain numpy."""
    rows = []
    for head in HEADS.heads:
        [block] = head.blocks
        y = np.asarray(block.weight, np.float64) @ hidden + np.asarray(block.bias)
        rows.append(np.asarray(head.out.weight) @ (hidden + y / (1 + np.exp(-y))))
    return np.array(rows)


@pytest.mark.parametrize("name", TARGETS)
def test_it_says_what_its_authors_code_says(name):
    report = check_drafter_parity(ORACLES / name, DATA / "oracles")
    assert {check.status for check in report.checks} == {"pass"}
    assert len(report.checks) == 10


@pytest.mark.parametrize("name", TARGETS)
def test_cut_wires_are_seen(name):
    """What the oracle says is missed by far when anything is wired otherwise."""
    oracle = dict(np.load(ORACLES / name / "oracle.npz"))
    target = target_of(name)
    part = load_part(ORACLES / name, target).part
    hidden = jnp.asarray(oracle["hidden"])
    wanted = oracle["head_logits"].swapaxes(0, 1)

    def error(part: MedusaHeads, hidden) -> float:
        return float(np.abs(np.asarray(part.logits(hidden)) - wanted).max())

    assert error(part, hidden) < 2e-4
    assert error(part, jnp.roll(hidden, 1, axis=0)) > 0.3  # another position
    assert error(part, hidden / target.decoder.norm.weight) > 0.3  # another norm
    assert error(MedusaHeads(part.heads[::-1]), hidden) > 0.3  # another head
    plain = [head.replace(blocks=()) for head in part.heads]
    assert error(MedusaHeads(tuple(plain)), hidden) > 0.1  # no blocks
    if len(part.heads[0].blocks) > 1:
        turned = [head.replace(blocks=head.blocks[::-1]) for head in part.heads]
        assert error(MedusaHeads(tuple(turned)), hidden) > 0.1
        same = [head.replace(blocks=head.blocks[:1] * 2) for head in part.heads]
        assert error(MedusaHeads(tuple(same)), hidden) > 0.1


def test_a_fresh_head_is_the_targets_own():
    """As it is trained from: blocks of zeros, and a copy of the output head."""
    target = target_of("medusa")
    size = target.decoder.config.hidden_size
    zeros = Linear(jnp.zeros((size, size)), bias=jnp.zeros((size,)))
    fresh = MedusaHeads((MedusaHead((zeros,), target.decoder.ends.head),))
    oracle = np.load(ORACLES / "medusa" / "oracle.npz")
    got = fresh.logits(jnp.asarray(oracle["hidden"]))[:, 0]
    np.testing.assert_allclose(got, oracle["base_logits"], atol=2e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_is_read_back(name, tmp_path):
    target = target_of(name)
    loaded = load_part(ORACLES / name, target)
    again = load_part(save_part(loaded, tmp_path / "copy"), target)
    assert again.layout.name == loaded.layout.name
    assert jax.tree.structure(again.part) == jax.tree.structure(loaded.part)
    jax.tree.map(np.testing.assert_array_equal, again.part, loaded.part)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("medusa", {"medusa_num_heads": 2}, "'medusa_num_heads'.*holds more heads"),
        ("medusa", {"medusa_num_heads": 5}, "4.0.linear.weight"),
        ("medusa", {"medusa_num_heads": 0}, "'medusa_num_heads'"),
        ("medusa", {"medusa_num_layers": 2}, "0.1.linear.weight"),
        ("medusa", {"medusa_num_layers": None}, "'medusa_num_layers'.*missing"),
        ("medusa", {"hidden_size": 32}, "'hidden_size'.*32.*target's is 64"),
        ("medusa_merged", {"vocab_size": 7}, "'vocab_size'.*7.*target's is 256"),
        ("medusa", {"medusa_gate": True}, "'medusa_gate'.*not implemented"),
    ],
)
def test_errors_name_the_field(name, changes, problem, tmp_path):
    folder = tmp_path / "heads"
    save_part(load_part(ORACLES / name, target_of(name)), folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_part(folder, target_of(name))
    assert re.search(problem, str(caught.value))


def test_every_row_drafts_from_its_own_last_accepted_row():
    features = some_features()
    start = CHAIN.init(B, 8)
    assert propose(CHAIN, start, context_of()).num_nodes.tolist() == [0] * B
    # a tree's path is no prefix of its window; the second row takes nothing
    path, num = [[0, 2, 4], [0, 0, 0], [0, 3, 0]], [3, 0, 2]
    state = observe(CHAIN, start, features, path, num)
    assert state.ready.tolist() == [True, False, True]
    got = propose(CHAIN, state, context_of())
    assert got.num_nodes.tolist() == [K, 0, K]
    for row, last in ((0, 4), (2, 3)):
        best = expected(features[row, last]).argmax(axis=1)
        assert got.tokens[row].tolist() == best.tolist()
    # later rounds replace it; a row that commits nothing keeps what it had
    later = observe(CHAIN, state, some_features(2), [[0, 1, 0]] * B, [0, 2, 2])
    np.testing.assert_array_equal(later.hidden[0], state.hidden[0])
    assert later.ready.tolist() == [True] * B
    assert np.any(np.asarray(later.hidden[2]) != np.asarray(state.hidden[2]))


def drafted(drafter, **fields) -> Proposal:
    state = observe(CHAIN, CHAIN.init(B, 8), some_features(), [[0, 1, 2]] * B, [3] * B)
    return propose(drafter, state, context_of(**fields))


def test_a_tree_takes_each_heads_candidates_by_rank():
    tree = from_choices([(0,), (2,), (0, 1), (2, 0), (2, 0, 3)])
    got = drafted(MedusaTree(HEADS, tree))
    assert got.parents[0].tolist() == list(tree.parents) and got.log_q is None
    assert got.num_nodes.tolist() == [5] * B
    for row in range(B):
        order = np.argsort(-expected(some_features()[row, 2]), axis=1, kind="stable")
        wanted = [order[0, 0], order[0, 2], order[1, 1], order[1, 0], order[2, 3]]
        assert got.tokens[row].tolist() == [int(x) for x in wanted]


def test_a_tree_that_is_a_chain_is_the_chain_of_best_tokens():
    tree = drafted(MedusaTree(HEADS, full((1,) * K)))
    chain = drafted(CHAIN)
    np.testing.assert_array_equal(tree.tokens, chain.tokens)
    np.testing.assert_array_equal(tree.parents, chain.parents)


def test_drawn_drafts_carry_the_law_they_were_drawn_from():
    sampling = Sampling(temperature=jnp.array([0.7, 0.0, 1.0], jnp.float32))
    drawn = MedusaChain(HEADS, K, pick=Pick.DRAWN)
    assert drawn.law is ProposalLaw.INDEPENDENT
    got = drafted(drawn, sampling=sampling)
    assert got.log_q is not None and got.log_q.shape == (B, K + 1, V)
    logits = expected(some_features()[0, 2]) / 0.7
    law = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got.log_q[0, :K], law, atol=1e-4)
    best = expected(some_features()[1, 2]).argmax(axis=1)
    assert got.tokens[1].tolist() == best.tolist()  # temperature 0


def test_penalties_count_the_drafts_before_a_head():
    """With a strong presence penalty no token is drafted twice."""
    twice = MedusaHeads((HEADS.heads[0],) * K)  # all heads say the same
    chain = MedusaChain(twice, K, pick=Pick.BEST)
    tokens = drafted(chain).tokens[0].tolist()
    assert len(set(tokens)) == 1
    counts = Counts(jnp.zeros((B, V), jnp.int32), jnp.zeros((B, V), jnp.int32))
    sampling = Sampling(presence=jnp.full((B,), 100.0))
    got = drafted(chain, sampling=sampling, counts=counts)
    order = np.argsort(-expected(some_features()[0, 2])[0], kind="stable")
    assert got.tokens[0].tolist() == order[:K].tolist()


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_drafts_fit_the_room_that_is_left(room):
    assert drafted(CHAIN, room=room).num_nodes.tolist() == [max(room - 1, 0)] * B
    tree = drafted(MedusaTree(HEADS, full((2, 1))), room=room)
    assert tree.num_nodes.tolist() == [4 if room > 1 else 0] * B


def test_more_drafts_than_heads_are_refused():
    with pytest.raises(ValueError, match="k 5: there are 4 heads"):
        MedusaChain(HEADS, 5)
    with pytest.raises(ValueError, match="depth 5: there are 4 heads"):
        MedusaTree(HEADS, full((1,) * 5))
    with pytest.raises(ValueError, match="at least one node"):
        MedusaTree(HEADS, Tree(()))
    with pytest.raises(ValueError, match="rank 11, and the vocabulary has 11"):
        MedusaTree(HEADS, Tree((-1,), ranks=(11,)))


def test_the_registry_builds_both():
    options = DrafterOptions(k=3, part=HEADS, branching=(3, 1), pick=Pick.BEST)
    chain = DRAFTERS["medusa"].build(options)
    assert isinstance(chain, MedusaChain) and (chain.k, chain.pick) == (3, Pick.BEST)
    tree = DRAFTERS["medusa-tree"].build(options)
    assert isinstance(tree, MedusaTree) and tree.tree == full((3, 1))
    with pytest.raises(ValueError, match="checkpoint"):
        DRAFTERS["medusa"].build(dataclasses.replace(options, part=None))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tree", [False, True])
def test_conformance(tree):
    toy = toy_llama()
    hidden, vocab = toy.decoder.config.hidden_size, toy.decoder.vocab_size
    heads = heads_of(3, 2, hidden, vocab)
    # a fresh head says what the target said last: right now and then
    first = heads.heads[0].replace(out=toy.decoder.ends.head)
    heads = MedusaHeads((first, *heads.heads[1:]))
    drafter = MedusaTree(heads, full((4, 1))) if tree else MedusaChain(heads, 2)
    widths = (drafter.max_nodes + 1,)
    check_drafter(drafter, toy, Coupled(), widths=widths).assert_ok()


@pytest.mark.parametrize(
    ("meta", "absent", "told"),
    [
        ('{"target": 5}', "", "meta.json should say which target.*target is 5"),
        ("[]", "", "meta.json should say which target"),
        ('{"target": "nobody"}', "", "'nobody', and .* is no directory"),
        ('{"target": "llama"}', "accepted", r"oracle\.npz has no accepted"),
    ],
)
def test_an_oracle_that_is_not_whole_says_what_is_missing(tmp_path, meta, absent, told):
    shutil.copytree(ORACLES / "medusa", tmp_path / "medusa")
    (tmp_path / "medusa/meta.json").write_text(meta)
    with np.load(ORACLES / "medusa/oracle.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != absent}
    np.savez(tmp_path / "medusa/oracle.npz", **kept)
    with pytest.raises(OracleError, match=told):
        check_drafter_parity(tmp_path / "medusa", DATA / "oracles")
