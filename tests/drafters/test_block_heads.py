"""How the slots of a block become laws and drafts: DFlash, DFlash2, DSpark, DDTree."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Context, Proposal, Sampling
from specjax.drafters.block import BlockChain, BlockTree, DFlash, DFlash2, DSpark
from specjax.drafters.block.dflash2 import DynamicConvolution
from specjax.drafters.drawing import Pick
from specjax.drafters.length import Confidence
from specjax.models.build import WeightType
from specjax.models.linear import Linear
from specjax.testing.toy_blocks import toy_block
from specjax.testing.toys import toy_llama

TARGET = toy_llama().decoder
VOCAB, HIDDEN = TARGET.vocab_size, TARGET.config.hidden_size
SLOTS = 3


ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


def heads(method: str, **changes: Any) -> Any:
    return toy_block(method, TARGET, **(ONE_LAYER | changes))


def rows(batch: int = 2, slots: int = SLOTS) -> jax.Array:
    return 2.0 * jax.random.normal(jax.random.key(5), (batch, slots, HIDDEN))


def context(lengths: list[int], room: int = 99, warm: float | None = None) -> Context:
    """Rows with so many tokens of text; each ends with token 7."""
    batch = len(lengths)
    temperature = None if warm is None else jnp.full((batch,), warm, jnp.float32)
    return Context(
        tokens=jnp.full((batch, 16), 7, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        room=jnp.full((batch,), room, jnp.int32),
        done=jnp.zeros((batch,), bool),
        seeds=jnp.arange(batch, dtype=jnp.uint32),
        sampling=Sampling(temperature=temperature),
        counts=None,
    )


def propose(drafter: Any, asked: Context, *, known: int = 1) -> Proposal:
    """Of a state that holds ``known`` rows of (empty) context less than the text."""
    state = drafter.init(asked.lengths.shape[0], 16)
    state = state.replace(lengths=asked.lengths - known)
    return run(drafter, state, asked)


@jax.jit
def run(drafter: Any, state: Any, asked: Context) -> Proposal:
    return drafter.propose(state, asked)[0]


@jax.jit
def slots_of(part: Any, lengths: jax.Array) -> jax.Array:
    """The slots of blocks behind so many rows of empty context; the anchor is 7."""
    state = part.backbone.init(lengths.shape[0], 16).replace(lengths=lengths)
    anchor = jnp.full(lengths.shape, 7, jnp.int32)
    return part.backbone.slot_rows(part.backbone.block(anchor, state))


def walk(head: Any, given: jax.Array, tokens: list[int]) -> list[np.ndarray]:
    """What each slot says behind these tokens, the anchor first; for one row."""
    reading, memory, said = head.read(given), head.start(1), []
    for step, token in enumerate(tokens):
        previous = jnp.asarray([token], jnp.int32)
        slot, memory = head.slot(reading, step, previous, memory)
        said.append(np.asarray(slot.logits[0]))
    return said


def test_convolutions_read_the_rows_before_and_nothing_before_the_block():
    x, draw = np.asarray(rows(1, 4)), np.random.default_rng(0)
    base = draw.normal(size=(2, 2, HIDDEN)).astype(np.float32)
    weight = draw.normal(size=(2 * 2 * 6, HIDDEN)).astype(np.float32)
    conv = DynamicConvolution(jnp.asarray(base), Linear(jnp.asarray(weight)))
    kernels = conv.kernels(jnp.asarray(x))
    delta = (x[0] @ weight.T).reshape(4, 2, 2, 6).repeat(HIDDEN // 6, axis=-1)
    y = draw.normal(size=x.shape).astype(np.float32)  # what a sublayer made of it
    for half, given in enumerate((x, y)):
        got = np.asarray(conv.convolve(jnp.asarray(given), kernels, half))[0]
        for row in range(4):
            wanted = (base[half, 0] + delta[row, half, 0]) * given[0, row]
            if row > 0:
                wanted += (base[half, 1] + delta[row, half, 1]) * given[0, row - 1]
            np.testing.assert_allclose(got[row], wanted, atol=1e-5)


def test_idle_convolutions_and_an_idle_selector_leave_plain_dflash():
    part = heads("dflash2")

    def idle(x: Any) -> Any:
        if not isinstance(x, DynamicConvolution):
            return x
        zeros = jnp.zeros_like(x.projection.weight)
        base = jnp.zeros_like(x.base).at[:, 0].set(1.0)
        return DynamicConvolution(base, x.projection.replace(weight=zeros))

    is_one = lambda x: isinstance(x, DynamicConvolution)  # noqa: E731
    quiet = jax.tree.map(idle, part, is_leaf=is_one)
    projection = quiet.selector.projection
    projection = projection.replace(weight=jnp.zeros_like(projection.weight))
    quiet = quiet.replace(selector=quiet.selector.replace(projection=projection))
    plain = DFlash(heads("dflash").backbone)  # the same tensors by the same names
    asked = context([5, 9])
    got = propose(BlockChain(quiet, 4, pick=Pick.BEST), asked)
    wanted = propose(BlockChain(plain, 4, pick=Pick.BEST), asked)
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    loud = propose(BlockChain(part, 4, pick=Pick.BEST), asked)
    assert (np.asarray(loud.tokens) != np.asarray(wanted.tokens)).any()


def test_the_selector_scores_candidates_behind_the_token_that_was_walked():
    part: DFlash2 = heads("dflash2")
    given = rows(1)
    unary = np.asarray(part.backbone.logits(given))[0]
    selector = part.selector
    before, behind = np.asarray(selector.predecessors), np.asarray(selector.successors)
    projected = np.asarray(selector.projection(given))[0]
    for step, said in enumerate(walk(part, given, [7, 3, 60])):
        previous = [7, 3, 60][step]
        scores = unary[step] + behind @ (before[previous] * projected[step])
        best = np.argsort(-unary[step])[: selector.top_k]
        assert set(np.flatnonzero(np.isfinite(said))) == set(best)
        np.testing.assert_allclose(said[best], scores[best], atol=1e-5)
    # the walk matters: behind another token a slot says something else
    other = walk(part, given, [7, 4, 60])[1]
    assert np.nanmax(np.abs(np.exp(other) - np.exp(walk(part, given, [7, 3, 60])[1])))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_look_at_the_tokens_drafted_before(kind):
    part: DSpark = heads("dspark", markov_head_type=kind)
    given = rows(1)
    base = np.asarray(part.backbone.logits(given))[0]
    first, second = walk(part, given, [7, 3, 9]), walk(part, given, [7, 4, 9])
    np.testing.assert_array_equal(first[0], second[0])
    assert np.abs(first[1] - second[1]).max() > 1e-2
    # one token back, or all of them
    remembers = np.abs(first[2] - second[2]).max() > 1e-4
    assert remembers == (kind == "rnn")
    assert part.markov is not None
    silent = part.markov.w2.replace(weight=jnp.zeros_like(part.markov.w2.weight))
    part = part.replace(markov=part.markov.replace(w2=silent))
    for tokens in ([7, 3, 9], [1, 2, 3]):
        np.testing.assert_allclose(walk(part, given, tokens), base, atol=1e-6)


def test_a_drafted_token_is_drawn_from_the_law_that_is_told():
    part: DSpark = heads("dspark")
    batch, warm = 600, 0.7
    drafter = BlockChain(part, 2, pick=Pick.DRAWN)
    proposal = propose(drafter, context([5] * batch, warm=warm))
    tokens, log_q = np.asarray(proposal.tokens), np.asarray(proposal.log_q)
    laws = np.exp(log_q)
    np.testing.assert_allclose(laws[:, :2].sum(axis=-1), 1.0, atol=1e-4)
    np.testing.assert_allclose(laws[:, 0], laws[:1, 0].repeat(batch, 0), atol=1e-6)
    # the first slot's draws are of its law
    share = np.bincount(tokens[:, 0], minlength=VOCAB) / batch
    deviation = np.sqrt(laws[0, 0] * (1 - laws[0, 0]) / batch)
    assert np.all(np.abs(share - laws[0, 0]) < 5 * deviation + 2 / batch)
    # and the second slot's law is the one behind that row's own first draft
    hidden = slots_of(part, jnp.asarray([4], jnp.int32))
    for row in range(3):
        said = walk(part, hidden, [7, int(tokens[row, 0])])[1] / warm
        wanted = said - np.log(np.exp(said - said.max()).sum()) - said.max()
        np.testing.assert_allclose(log_q[row, 1], wanted, atol=1e-3)
    assert (np.abs(laws[0, 1] - laws[:, 1]).max(axis=-1) > 1e-2).any()


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_confidence_head_ends_a_draft_before_the_token_it_doubts(whole):
    part: DSpark = heads("dspark")
    assert part.confidence is not None
    # this way round it is surest of the first slot
    proj = jax.tree.map(jnp.negative, part.confidence.proj)
    part = part.replace(confidence=part.confidence.replace(proj=proj))
    asked = context([5, 9, 12])
    free = propose(BlockChain(part, 5), asked)
    hidden = slots_of(part, asked.lengths - 1)
    rights = []
    for row in range(3):
        reading, memory = part.read(hidden[row : row + 1]), part.start(1)
        previous = [7, *np.asarray(free.tokens)[row, :-1].tolist()]
        rights.append([])
        for step, token in enumerate(previous):
            one = jnp.asarray([token], jnp.int32)
            slot, memory = part.slot(reading, step, one, memory)
            assert slot.right is not None
            rights[-1].append(float(slot.right[0]))
    held = np.cumprod(rights, axis=1) if whole else np.asarray(rights)
    # a first draft is let through, and a later one is not
    least = float(held[:, 0].max() + held[:, 1:].min()) / 2
    cut = propose(BlockChain(part, 5, length=Confidence(least, whole)), asked)
    wanted = np.cumprod(held >= least, axis=1).sum(axis=1)
    assert 0 < wanted.sum() < wanted.size * 5
    np.testing.assert_array_equal(cut.num_nodes, wanted)
    # what stands in front of the cut is what stood there
    for row, count in enumerate(wanted):
        kept = np.asarray(cut.tokens)[row, :count]
        np.testing.assert_array_equal(kept, np.asarray(free.tokens)[row, :count])


def best_paths(
    marginals: np.ndarray, nodes: int
) -> list[tuple[float, tuple[int, ...]]]:
    """All paths by the product of their marginals, the best first."""
    depths, width = marginals.shape
    paths = [
        (float(sum(marginals[d, r] for d, r in enumerate(path))), path)
        for depth in range(1, depths + 1)
        for path in itertools.product(range(width), repeat=depth)
    ]
    return sorted(paths, key=lambda pair: -pair[0])[:nodes]


@pytest.mark.parametrize("warm", [1.6, pytest.param(None, marks=pytest.mark.full)])
def test_a_tree_holds_the_best_paths_through_the_marginals(warm):
    part: DSpark = heads("dspark", block_size=2)
    norm = part.backbone.norm  # laws sharp enough for paths of two
    sharp = part.backbone.replace(norm=norm.replace(weight=3.0 * norm.weight))
    part, nodes = part.replace(backbone=sharp), 9
    proposal = propose(BlockTree(part, nodes), context([5], warm=warm))
    hidden = slots_of(part, jnp.asarray([4], jnp.int32))
    logits = np.array(part.backbone.logits(hidden)[0])
    logits[0] = walk(part, hidden, [7])[0]  # the anchor is known
    marginals = np.asarray(jax.nn.log_softmax(logits / (warm or 1.0), axis=-1))
    wanted = best_paths(marginals, nodes)
    tokens, parents = (np.asarray(x)[0] for x in (proposal.tokens, proposal.parents))
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), token))
    assert int(proposal.num_nodes[0]) == nodes
    assert set(paths) == {path for _, path in wanted}
    assert {len(path) for path in paths} == {1, 2}


MAKERS: dict[str, Callable[[Any], Any]] = {
    "chain": lambda part: BlockChain(part, 3),
    "tree": lambda part: BlockTree(part, 6),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_rows_without_context_or_room_draft_nothing(maker):
    drafter = MAKERS[maker](heads("dflash"))
    asked = context([1, 5, 5, 16])
    asked = dataclasses.replace(asked, room=jnp.asarray([99, 99, 1, 2], jnp.int32))
    proposal = propose(drafter, asked)
    count = np.asarray(proposal.num_nodes)
    assert count[0] == count[2] == 0 and count[1] == drafter.max_nodes
    # one token and the bonus; a tree leaves its depth to the window
    assert count[3] == (1 if maker == "chain" else drafter.max_nodes)
    assert np.asarray(proposal.tokens).min() >= 0
    assert np.asarray(proposal.tokens).max() < VOCAB


def test_a_head_of_nan_drafts_tokens_all_the_same():
    part = heads("dflash")
    head = part.backbone.ends.head
    broken = head.replace(weight=jnp.full_like(head.weight, jnp.nan))
    ends = part.backbone.ends.replace(head=broken)
    part = part.replace(backbone=part.backbone.replace(ends=ends))
    proposal = propose(BlockChain(part, 3), context([5, 9]))
    assert np.asarray(proposal.tokens).min() >= 0
    assert np.asarray(proposal.tokens).max() < VOCAB


def test_a_smaller_vocabulary_is_told_in_the_target_s():
    part: DSpark = heads("dspark", enable_confidence_head=False)
    ids = jnp.asarray([4, 9, 17, 33, 60], jnp.int32)
    assert part.markov is not None
    w2 = part.markov.w2.replace(weight=part.markov.w2.weight[ids])
    head = part.backbone.ends.head
    ends = part.backbone.ends.replace(head=head.replace(weight=head.weight[ids]))
    small = part.replace(
        markov=part.markov.replace(w2=w2),
        backbone=part.backbone.replace(ends=ends, draft_ids=ids),
    )
    drafter = BlockChain(small, 4, pick=Pick.DRAWN)
    proposal = propose(drafter, context([5, 9], warm=1.0))
    assert set(np.asarray(proposal.tokens).ravel()) <= set(np.asarray(ids).tolist())
    finite = np.isfinite(np.asarray(proposal.log_q)[:, :4]).any(axis=(0, 1))
    assert set(np.flatnonzero(finite)) == set(np.asarray(ids).tolist())


@pytest.mark.full
@pytest.mark.parametrize("weights", [WeightType.BFLOAT16, WeightType.INT8])
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_narrow_weights_draft_about_the_same(method, weights):
    narrow = toy_block(method, toy_llama(weights=weights).decoder, weights=weights)
    lengths = jnp.asarray([4, 8], jnp.int32)
    got, wanted = (
        np.asarray(slots_of(part, lengths))
        for part in (narrow, toy_block(method, TARGET))
    )
    error = np.abs(got - wanted).mean() / np.abs(wanted).mean()
    assert 0 < error < 0.1
    proposal = propose(
        BlockChain(narrow, 4, pick=Pick.DRAWN), context([5, 9], warm=1.0)
    )
    laws = np.exp(np.asarray(proposal.log_q)[:, :4])
    np.testing.assert_allclose(laws.sum(axis=-1), 1.0, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda part: BlockChain(part, 5), "k = 5: the block has 4 slots"),
        (lambda part: BlockChain(part, 0), "k = 0"),
        (lambda part: BlockTree(part, 0), "nodes = 0"),
    ],
)
def test_drafts_that_a_block_has_no_slots_for_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make(heads("dflash"))
