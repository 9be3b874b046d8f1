"""EAGLE's heads: the authors' outputs, cut wires, and a head that must be right."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Coupled, Greedy
from specjax.checkpoints import Checkpoint, load
from specjax.checkpoints.drafters import load_part
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.drafters import DRAFTERS, DrafterOptions, HeadChain, NullDrafter
from specjax.drafters.eagle.eagle1 import AsItIs, Eagle1Head
from specjax.drafters.eagle.eagle3 import Recycled
from specjax.models.build import WeightType
from specjax.models.ends import Ends
from specjax.models.linear import Linear
from specjax.models.stack import Block, Sublayer
from specjax.testing.conformance import check_drafter
from specjax.testing.drafter_parity import eagle as replaying
from specjax.testing.drafter_parity.check import check_drafter_parity
from specjax.testing.toys import toy_llama

DATA = Path(__file__).resolve().parents[1] / "data"
ORACLES, TARGETS = DATA / "drafter_oracles", DATA / "oracles"
TARGET_OF = {"eagle1": "qwen3", "eagle3_normfc": "qwen3"}
QUICK = ("peagle",)
OTHERS = ("eagle1", "eagle3", "eagle31", "eagle31_specforge", "eagle3_normfc")
GIVEN = ("prompt_ids", "first_token", "next_token", "accepted", "round2_in_ids")


def target_of(name: str) -> Checkpoint:
    folder = TARGETS / TARGET_OF.get(name, "llama")
    return load(folder, WeightType.FLOAT32, tokenizer=False)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)]
)
def test_heads_say_what_their_authors_code_says(name):
    report = check_drafter_parity(ORACLES / name, TARGETS)
    assert report.passed, [c for c in report.checks if c.status != "pass"]
    with np.load(ORACLES / name / "oracle.npz") as oracle:
        outputs = [n for n in oracle.files if n.removeprefix("serve_") not in GIVEN]
    compared = {check.array for check in report.checks}
    assert compared == {n for n in outputs if "features" not in n}


@pytest.fixture(scope="module")
def scene():
    """EAGLE-3's part and oracle, and how far a replay's logits are from it."""
    part = load_part(ORACLES / "eagle3", target_of("eagle3")).part
    with np.load(ORACLES / "eagle3" / "oracle.npz") as arrays:
        oracle = {name: arrays[name] for name in arrays.files}

    def off(part, features=oracle.__getitem__):
        found = replaying.rounds(part, oracle, features)
        names = ("round1_logits", "refresh_logits", "round2_logits")
        return {n: np.abs(found[n] - oracle[n]).max(axis=-1) for n in names}

    return part, oracle, off


def halves_swapped(linear: Linear) -> Linear:
    return linear.replace(
        weight=jnp.roll(linear.weight, linear.weight.shape[1] // 2, 1)
    )


def test_every_wire_that_is_cut_shows(scene):
    part, oracle, off = scene
    first = part.first
    mixer = first.mixer
    swapped = mixer.replace(**{n: halves_swapped(getattr(mixer, n)) for n in "qkv"})
    ones = jnp.ones_like(part.norm.weight)
    cuts = {
        "embedding and feature in the other order": (
            part.replace(first=first.replace(mixer=swapped)),
            oracle.__getitem__,
        ),
        "norms of embedding and feature exchanged": (
            part.replace(
                first=first.replace(
                    token_norm=first.hidden_norm, hidden_norm=first.token_norm
                )
            ),
            oracle.__getitem__,
        ),
        "no weight in the last norm": (
            part.replace(norm=part.norm.replace(weight=ones)),
            oracle.__getitem__,
        ),
        "taps in another order": (part, lambda n: np.roll(oracle[n], 64, axis=1)),
        "features of the token before": (part, lambda n: np.roll(oracle[n], 1, axis=0)),
        "no features": (part, lambda n: 0 * oracle[n]),
    }
    assert all(errors.max() < 2e-4 for errors in off(part).values())
    for what, (cut, features) in cuts.items():
        assert all(e.max() > 0.3 for e in off(cut, features).values()), what


def test_the_second_round_reads_true_features_and_all_that_was_committed(scene):
    part, oracle, off = scene
    guessed = {"round2_features": np.tile(oracle["prefill_features"][-1:], (3, 1))}
    errors = off(part, lambda n: guessed.get(n, oracle[n]))
    assert errors["round1_logits"].max() < 2e-4
    assert errors["refresh_logits"].max() > 0.3
    # of keys and values that were lost: the same rows, on nothing
    drafter = HeadChain(part, replaying.STEPS)
    tokens = oracle["round2_in_ids"].tolist()
    found = [
        replaying.pairs(drafter, state, oracle["round2_features"], tokens, "x")[1]
        for state in (drafter.init(1, 64), drafter.init(1, 64))
    ]
    lost = np.abs(found[0]["x_logits"] - oracle["refresh_logits"]).max()
    assert lost > 0.3


def test_what_is_recycled_is_seen_from_the_second_draft_on():
    """Neither kind is right for the other's checkpoint: the oracle holds both."""
    part = load_part(ORACLES / "eagle31_specforge", target_of("")).part
    assert part.recycled is Recycled.BEFORE_NORM
    assert load_part(ORACLES / "eagle31", target_of("")).part.recycled is (
        Recycled.BEHIND_NORM
    )
    with np.load(ORACLES / "eagle31_specforge" / "oracle.npz") as oracle:
        pre, post = oracle["round1_logits"], oracle["serve_round1_logits"]
        np.testing.assert_allclose(pre[0], post[0], atol=1e-4)
        assert np.abs(pre[1] - post[1]).max() > 0.3


REACH = 4


def knowing(noise: float = 0.0):
    """A target of one block that looks ``REACH`` tokens back, and an EAGLE-1 head that
    is this block.

    The head's row ``i`` stands for the target's ``i + 1`` and knows all tokens but the
    first one, which no later row needs. It ends before the last norm, whose weight is
    one: the logits are the target's up to a factor. Embeddings have a mean square of 1,
    for the head has no norm before its block.
    """
    decoder = toy_llama(1, num_hidden_layers=1).decoder
    [block] = decoder.blocks
    assert block.mixer is not None
    unnormed: Any = AsItIs()
    rows = decoder.embedding
    rows = rows * jax.lax.rsqrt(jnp.mean(rows**2, axis=-1, keepdims=True))
    config = dataclasses.replace(block.mixer.body.config, reach=REACH)
    mixer = block.mixer.body
    # what came before must matter, or the text is soon one token again and again
    mixer = mixer.replace(
        config=config,
        q=mixer.q.replace(weight=2 * mixer.q.weight),
        out=mixer.out.replace(weight=3 * mixer.out.weight),
    )
    unit = block.mixer.norm.replace(weight=jnp.ones_like(block.mixer.norm.weight))
    block = block.replace(mixer=Sublayer(unit, mixer))
    target = decoder.replace(
        embedding=rows,
        blocks=(block,),
        norm=decoder.norm.replace(weight=jnp.ones_like(decoder.norm.weight)),
    )
    size = rows.shape[1]
    weight = decoder.head.weight
    rough = weight + noise * jax.random.normal(jax.random.key(0), weight.shape)
    rough = rough / 2  # about the factor, which matters where tokens are drawn
    head = Eagle1Head(
        ends=Ends(embedding=rows, head=decoder.head.replace(weight=rough)),
        fc=Linear(jnp.eye(size, 2 * size, dtype=jnp.float32)),
        blocks=(Block(Sublayer(unnormed, mixer), block.feedforward),),
        max_positions=512,
    )
    return target, head


def test_a_head_that_is_the_targets_block_is_right_to_the_last_token():
    target, head = knowing()
    prompts = ((5, 17, 40, 3, 22, 9, 1, 1, 30), (8, 2, 6, 1, 44))
    asked = [Request(prompt_ids=ids, max_tokens=100) for ids in prompts]
    options = EngineOptions(prefill_width=4)
    wide = dataclasses.replace(options, widths=(5,))
    rows = generate(Engine(target, HeadChain(head, 4), Greedy(), wide), asked)
    plain = generate(Engine(target, NullDrafter(), Greedy(), options), asked)
    assert [row.ids for row in rows] == [row.ids for row in plain]
    for row in rows:
        assert len(row.ids) == 100 and len(set(row.ids[50:])) > 20
        assert {(r.drafted, r.accepted) for r in row.rounds} == {(4, 4)}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "rule"), [("eagle1", Coupled()), ("eagle2", Greedy())]
)
def test_the_contracts_hold(name, rule):
    target, head = knowing(0.05)
    options = DrafterOptions(k=4, part=head, top_k=3, nodes=9)
    drafter = DRAFTERS[name].build(options)
    check_drafter(drafter, target, rule).assert_ok()
