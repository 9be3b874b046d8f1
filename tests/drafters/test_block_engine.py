"""Block drafters in the engine: heads that know the answer, context after rounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Coupled, Greedy, rejection
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance
from specjax.decoding.windows import chunk_window
from specjax.drafters import BlockChain, BlockTree, NullDrafter
from specjax.drafters.block import DFlash, DSpark
from specjax.drafters.block.backbone import Backbone
from specjax.drafters.drawing import Pick
from specjax.drafters.length import Confidence
from specjax.models.decoder import Decoder
from specjax.models.stack import Block, canonical_mixers, mixers_of
from specjax.testing.conformance import check_drafter
from specjax.testing.toy_blocks import know_bigrams, toy_block
from specjax.testing.toys import toy_llama

TOY = toy_llama()
PROMPTS = ((5, 17, 40, 3, 22, 9, 1, 1, 30), (8,), (2, 2, 7, 50))


def requests(tokens: int, temperature: float = 0.0) -> list[Request]:
    return [
        Request(prompt_ids=p, max_tokens=tokens, temperature=temperature, seed=11 + i)
        for i, p in enumerate(PROMPTS)
    ]


def engine(target: Decoder, drafter: Any, rule: Any, **options: Any) -> Engine:
    made: dict[str, Any] = {
        "prefill_width": 8,
        "rounds_per_call": 4,
        "capacity_at_least": 64,
        "widths": (drafter.max_nodes + 1,),
    }
    return Engine(target, drafter, rule, EngineOptions(**(made | options)))


def silent(block: Block) -> Block:
    """A block that adds nothing to the residual stream."""
    assert block.mixer is not None and block.feedforward is not None
    body, mlp = block.mixer.body, block.feedforward.body
    out = body.out.replace(weight=jnp.zeros_like(body.out.weight))
    down = mlp.down.replace(weight=jnp.zeros_like(mlp.down.weight))
    return Block(
        mixer=block.mixer.replace(body=body.replace(out=out)),
        feedforward=block.feedforward.replace(body=mlp.replace(down=down)),
    )


def counting_target(step: int) -> Decoder:
    """A target that says the token plus ``step``; it cannot tell what a mask is."""
    decoder = TOY.decoder
    rows = decoder.embedding / jnp.linalg.norm(decoder.embedding, axis=1, keepdims=True)
    head = decoder.head.replace(weight=jnp.roll(rows, step, axis=0))
    norm = decoder.norm.replace(weight=jnp.ones_like(decoder.norm.weight))
    return decoder.replace(
        embedding=rows.at[-1].set(0.0),
        blocks=tuple(map(silent, decoder.blocks)),
        norm=norm,
        head=head,
    )


def copying(target: Decoder) -> DFlash:
    """A DFlash whose slots all say the anchor: the only row of a block that is not 0,
    and nothing is made of the context."""
    part: DFlash = toy_block(
        "dflash",
        target,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        head_dim=6,
        num_key_value_heads=4,
    )
    backbone, hidden = part.backbone, target.config.hidden_size
    mixer, feedforward = backbone.blocks[0].mixer, backbone.blocks[0].feedforward
    assert mixer is not None and feedforward is not None
    body, eye, ones = mixer.body.body, jnp.eye(hidden), jnp.ones((hidden,))
    body = body.replace(
        q=body.q.replace(weight=0.0 * body.q.weight),  # all keys alike
        v=body.v.replace(weight=eye),
        out=body.out.replace(weight=eye),
    )
    down = feedforward.body.down
    down = down.replace(weight=jnp.zeros_like(down.weight))
    block = Block(
        mixer=mixer.replace(
            norm=mixer.norm.replace(weight=ones), body=mixer.body.replace(body=body)
        ),
        feedforward=feedforward.replace(body=feedforward.body.replace(down=down)),
    )
    return DFlash(
        backbone.replace(
            fc=backbone.fc.replace(weight=jnp.zeros_like(backbone.fc.weight)),
            blocks=(block,),
            norm=backbone.norm.replace(weight=ones),
        )
    )


def knowing(kind: str) -> tuple[Decoder, Any]:
    """A target, and a drafter that knows all that it will say."""
    vocab = TOY.decoder.vocab_size
    if kind == "dspark":
        target = counting_target(1)
        part = toy_block("dspark", target, markov_rank=vocab, block_size=4)
        every = [[x, (x + 1) % vocab] for x in range(vocab)] * 8
        return target, BlockChain(know_bigrams(part, every), 4)
    target = counting_target(0)
    part = copying(target)
    return target, BlockChain(part, 4) if kind == "dflash" else BlockTree(part, 12)


@pytest.mark.parametrize(
    "kind",
    ["dflash", *(pytest.param(k, marks=pytest.mark.full) for k in ("dspark", "tree"))],
)
def test_a_head_that_knows_is_accepted_to_the_last_token(kind):
    target, drafter = knowing(kind)
    step = 1 if kind == "dspark" else 0
    rows = generate(engine(target, drafter, Greedy()), requests(41))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        wanted = [(prompt[-1] + step * (i + 1)) % target.vocab_size for i in range(41)]
        assert list(row.ids) == wanted
        steps = [(r.accepted, r.committed) for r in row.rounds]
        if len(prompt) == 1:  # the first round has no context, and drafts nothing
            assert row.rounds[0].drafted == 0 and steps[0] == (0, 1)
            assert set(steps[1:]) == {(4, 5)}
        else:
            assert set(steps[:-1]) == {(4, 5)} and sum(c for _, c in steps) == 41


@jax.jit
def held(target: Decoder, backbone: Backbone, tokens: jax.Array, lengths: Any) -> Any:
    """The context of these tokens, made in one go of the target's features."""
    batch, capacity = tokens.shape
    zeros = jnp.zeros((batch,), jnp.int32)
    window = chunk_window(tokens, zeros, lengths, capacity)
    verdict = target.verify(target.init(batch, capacity), window, taps=backbone.taps)
    rows = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), tokens.shape)
    taken = Acceptance(jnp.where(window.valid, rows, 0), tokens, lengths)
    state = backbone.take_in(backbone.init(batch, capacity), verdict, taken)
    return canonical_mixers(mixers_of(backbone.blocks), state)


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return generate(engine(TOY.decoder, NullDrafter(), Greedy()), requests(40))


def texts(rows: list[Any]) -> list[list[int]]:
    return [[*p, *row.ids] for p, row in zip(PROMPTS, rows, strict=True)]


def guessing(rows: list[Any], **changes: Any) -> BlockChain:
    """A drafter that is right now and then: it has counted the pairs of the text."""
    vocab = TOY.decoder.vocab_size
    part = toy_block("dspark", TOY.decoder, markov_rank=vocab, **changes)
    return BlockChain(know_bigrams(part, texts(rows)), 4)


def test_after_every_round_the_context_is_the_committed_text_but_its_end(plain):
    drafter, target = guessing(plain), TOY.decoder
    backbone = drafter.head.backbone
    run = engine(target, drafter, Greedy(), rounds_per_call=2, capacity_at_least=0)
    state, accepted = run.prefill(run.start(requests(40))), set()
    while not state.done.all():
        running = ~np.asarray(state.done)
        state, log = run.rounds(state)
        accepted |= set(np.asarray(log.steps.accepted)[:, running].ravel().tolist())
        lengths = state.lengths - 1
        np.testing.assert_array_equal(state.drafter.lengths, lengths)
        wanted = held(target, backbone, jnp.maximum(state.tokens, 0), lengths)
        got = canonical_mixers(mixers_of(backbone.blocks), state.drafter)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)
    assert {0, 4} <= accepted  # rejects and full accepts were among them
    for row, (prompt, wanted) in enumerate(zip(PROMPTS, plain, strict=True)):
        start = len(prompt)
        ids = np.asarray(state.tokens)[row, start : start + 40]
        assert ids.tolist() == list(wanted.ids)


@jax.jit
def law_behind(target: Decoder, tokens: jax.Array) -> jax.Array:
    """``[B, V]``: what the target says behind these rows of text."""
    batch, width = tokens.shape
    start = jnp.zeros((batch,), jnp.int32)
    window = chunk_window(tokens, start, start + width, width)
    verdict = target.verify(target.init(batch, width), window)
    assert verdict.logits is not None
    return jax.nn.softmax(verdict.logits[:, -1], axis=-1)


def doubting(anchor: int) -> DSpark:
    """A drafter that doubts behind every other token, but not behind the anchor."""
    part: DSpark = toy_block("dspark", TOY.decoder)
    assert part.markov is not None and part.confidence is not None
    direction = part.markov.w1[anchor]
    weight = jnp.zeros_like(part.confidence.proj.weight)
    weight = weight.at[0, -part.markov.rank :].set(9.0 * direction)
    proj = part.confidence.proj.replace(weight=weight, bias=jnp.zeros((1,)))
    return part.replace(confidence=part.confidence.replace(proj=proj))


@pytest.mark.full
@pytest.mark.parametrize("doubts", [False, True])
def test_drawn_drafts_leave_the_targets_law_wherever_they_end(doubts):
    """Two thousand rows of one prompt: the first three tokens have the target's laws,
    though drafts are often rejected, and often ended by the confidence head."""
    target, count, prompt = TOY.decoder, 2000, (5, 17, 40, 3)
    vocab, part = target.vocab_size, doubting(prompt[-1])
    length = Confidence(0.5, whole=False) if doubts else None
    drafter = BlockChain(part, 3, pick=Pick.DRAWN, length=length)
    asked = [
        Request(prompt_ids=prompt, max_tokens=3, temperature=1.0, seed=i)
        for i in range(count)
    ]
    rows = generate(engine(target, drafter, rejection()), asked)
    lengths = {row.rounds[0].drafted for row in rows}  # the last token needs no draft
    assert lengths == ({1, 2} if doubts else {2})
    assert {row.rounds[0].accepted for row in rows} == {0, 1, 2}
    ids = np.asarray([row.ids for row in rows])
    law = np.ones((1,))
    texts = np.asarray([prompt])
    for place in range(3):
        behind = np.asarray(law_behind(target, jnp.asarray(texts, jnp.int32)))
        joint = law[:, None] * behind
        wanted = joint.sum(axis=0)
        share = np.bincount(ids[:, place], minlength=vocab) / count
        deviation = np.sqrt(wanted * (1 - wanted) / count)
        assert np.all(np.abs(share - wanted) < 4.5 * deviation + 2 / count)
        law = joint.reshape(-1)
        last = np.tile(np.arange(vocab), len(texts))[:, None]
        texts = np.concatenate([texts.repeat(vocab, axis=0), last], axis=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark", "ddtree"])
def test_block_drafters_keep_the_contracts(method, plain):
    if method == "dspark":
        drafter: Any = guessing(plain)
    elif method == "ddtree":
        drafter = BlockTree(toy_block("dflash", TOY.decoder), 9)
    else:
        pick = Pick.BEST if method == "dflash2" else Pick.COUPLED
        drafter = BlockChain(toy_block(method, TOY.decoder), 4, pick=pick)
    check_drafter(drafter, TOY, Coupled()).assert_ok()
