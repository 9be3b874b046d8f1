"""P-EAGLE: slots that know the text, and no draft."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Coupled
from specjax.checkpoints import load
from specjax.checkpoints.drafters import load_part
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance, Verdict
from specjax.drafters import DRAFTERS, DrafterOptions, NullDrafter
from specjax.drafters.eagle.parallel import with_slots
from specjax.drafters.features import pairs_window
from specjax.drafters.layouts import Host, p_eagle
from specjax.drafters.layouts.eagle3 import NESTED
from specjax.models.build import Builder, WeightType
from specjax.testing.conformance import check_drafter
from specjax.testing.toys import RandomReader, toy_llama

DATA = Path(__file__).resolve().parents[1] / "data"
K = 5


@pytest.fixture(scope="module")
def loaded():
    target = load(DATA / "oracles" / "llama", WeightType.FLOAT32, tokenizer=False)
    part = load_part(DATA / "drafter_oracles" / "peagle", target).part
    return target.decoder, DRAFTERS["p-eagle"].build(DrafterOptions(k=K, part=part))


def path(nums, tokens):
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    taken = rows < jnp.asarray(nums, jnp.int32)[:, None]
    return Acceptance(
        path=jnp.where(taken, rows, 0),
        tokens=jnp.where(taken, tokens, -1),
        num_tokens=jnp.asarray(nums, jnp.int32),
    )


def test_slots_stand_behind_the_last_pair_of_each_row():
    acceptance = path([2, 0, 3], jnp.full((3, 3), 7, jnp.int32))
    lengths = jnp.array([10, 4, 0], jnp.int32)
    pairs = pairs_window(acceptance, lengths)
    window = with_slots(pairs, acceptance.num_tokens, 2, 9)
    assert window.tokens.tolist() == [
        [7, 7, 0, 9, 9],
        [0, 0, 0, 9, 9],
        [7] * 3 + [9] * 2,
    ]
    assert window.positions[:, 3:].tolist() == [[12, 13], [4, 5], [3, 4]]
    assert window.valid.tolist() == [
        [True, True, False, True, True],
        [False] * 5,
        [True] * 5,
    ]
    last = window.ancestors[:, 4].astype(jnp.int32)
    assert last.tolist() == [[1, 1, 0, 1, 1], [0, 0, 0, 0, 1], [1] * 5]
    # no pair sees a slot
    assert not bool(window.ancestors[:, :3, 3:].any())


def test_rows_of_a_batch_say_what_they_say_alone_and_keep_no_slot(loaded):
    _, drafter = loaded
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(0, 256, (3, 8)), jnp.int32)
    features = {
        tap: jnp.asarray(draw.normal(size=(3, 8, 64)), jnp.float32)
        for tap in drafter.taps
    }
    bad = jnp.zeros((3, 8), bool)

    @jax.jit
    def observed(drafter, state, features, acceptance):
        verdict = Verdict(logits=None, features=features, pending=None, bad=bad)
        window = pairs_window(acceptance, state.lengths)
        return drafter.observe(state, None, window, verdict, acceptance)

    def after(*nums, row=None):
        state = drafter.init(3, 32)
        for num in nums:
            only = [n if row in (None, i) else 0 for i, n in enumerate(num)]
            state = observed(drafter, state, features, path(only, tokens))
        return state

    first, second = (8, 3, 0), (2, 0, 0)
    together = after(first, second)
    assert together.lengths.tolist() == [10, 3, 0]
    assert bool((together.outs[2] == 0).all())  # no pair yet
    for row in (0, 1):
        alone = after(first, second, row=row)
        np.testing.assert_array_equal(together.outs[row], alone.outs[row])
    # a round in which a row takes nothing leaves it as it was
    np.testing.assert_array_equal(together.outs[1], after(first).outs[1])
    for x in jax.tree.leaves(together.own.blocks):
        written = jnp.any(x != 0, axis=(1, 3)).sum(axis=-1)
        assert written.tolist() == [10, 3, 0]


@pytest.mark.full
def test_it_changes_no_token_and_a_prompt_of_one_token_waits_a_round(loaded):
    target, drafter = loaded
    asked = [
        Request(prompt_ids=ids, max_tokens=12, temperature=0.8, seed=5 + i)
        for i, ids in enumerate(((5, 17, 40, 3), (8,)))
    ]
    options = EngineOptions(prefill_width=4)
    rows = generate(Engine(target, drafter, Coupled(), options), asked)
    plain = generate(Engine(target, NullDrafter(), Coupled(), options), asked)
    assert [row.ids for row in rows] == [row.ids for row in plain]
    assert [row.rounds[0].drafted for row in rows] == [K, 0]
    assert rows[1].rounds[1].drafted == K


class Random(RandomReader):
    """Of a checkpoint that stores neither an embedding nor a draft vocabulary."""

    def has(self, name):
        return name not in ("d2t", "embed_tokens.weight")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_contracts_hold():
    toy = toy_llama()
    target = toy.decoder
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    heads = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    others = ("rms_norm_eps", "max_position_embeddings")
    raw = {
        NESTED: {name: toy.config[name] for name in sizes + heads + others},
        "draft_vocab_size": target.vocab_size,
        "mask_token_id": target.vocab_size - 1,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
    }
    host = Host(target.config, target.ends, target.norm)
    part = p_eagle.build(raw, Builder(Random(7), WeightType.FLOAT32), host)
    drafter = DRAFTERS["p-eagle"].build(DrafterOptions(k=4, part=part))
    check_drafter(drafter, toy, Coupled()).assert_ok()
