"""Hydra heads: their authors' outputs, cut wires, files, and what they may draft."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.acceptance import Coupled, Greedy
from specjax.checkpoints import load
from specjax.checkpoints.drafters import load_drafter, load_part, save_part
from specjax.checkpoints.errors import CheckpointError
from specjax.decoding.trees import full
from specjax.drafters import DRAFTERS, DrafterOptions, HeadChain, HeadDynamicTree
from specjax.drafters.draft_tree import HeadTree
from specjax.drafters.hydra import HydraHead, HydraHeads, HydraPrefix
from specjax.drafters.medusa import MedusaHead
from specjax.models.ends import Ends
from specjax.models.linear import Linear
from specjax.testing.conformance import check_drafter
from specjax.testing.drafter_parity import eagle as replaying
from specjax.testing.drafter_parity.check import check_drafter_parity
from specjax.testing.toys import toy_llama

DATA = Path(__file__).resolve().parents[1] / "data"
ORACLES, TARGETS = DATA / "drafter_oracles", DATA / "oracles"
NAMES = ("hydra", "hydra_prefix")


@pytest.fixture(scope="module")
def target():
    return load(TARGETS / "llama", tokenizer=False)


def oracle_of(name):
    with np.load(ORACLES / name / "oracle.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


@pytest.mark.parametrize("name", NAMES)
def test_heads_say_what_their_authors_code_says(name):
    report = check_drafter_parity(ORACLES / name, TARGETS)
    assert {check.status for check in report.checks} == {"pass"}
    compared = {check.array for check in report.checks}
    rounds = {f"round{n}_{what}" for n in (1, 2) for what in ("ids", "logits")}
    assert compared == rounds | {"prefill_logits", "refresh_logits", "tree_ids"}


def error(part, oracle, features=None):
    """How far each step of the first round is off, and the rows of the second."""
    given = oracle.__getitem__ if features is None else features
    found = replaying.rounds(part, oracle, given, steps=3)
    first = np.abs(found["round1_logits"] - oracle["round1_logits"]).max(axis=1)
    second = np.abs(found["refresh_logits"] - oracle["refresh_logits"]).max()
    return first, float(second)


def with_first(part, change):
    heads = tuple(
        head.replace(first=change(head.first), skip=change(head.skip))
        for head in part.heads
    )
    return part.replace(heads=heads)


def rolled(linear):
    size = linear.weight.shape[0]
    return linear.replace(weight=jnp.roll(linear.weight, size, axis=1))


def without(slot):
    """The hidden state's columns (slot 0) or a token's, as if they were not read."""

    def cut(linear):
        size = linear.weight.shape[0]
        columns = slice(slot * size, (slot + 1) * size)
        return linear.replace(weight=linear.weight.at[:, columns].set(0, mode="drop"))

    return cut


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.full) for n in NAMES[1:])]
)
def test_every_wire_that_is_cut_shows(name, target):
    part, oracle = load_part(ORACLES / name, target).part, oracle_of(name)
    first, second = error(part, oracle)
    assert first.max() < 2e-4 and second < 2e-4
    cuts = {
        "vectors in another order": with_first(part, rolled),
        "no hidden state": with_first(part, without(0)),
        "no anchor": with_first(part, without(1)),
        "first and skip exchanged": part.replace(
            heads=tuple(h.replace(first=h.skip, skip=h.first) for h in part.heads)
        ),
        "one layer less": part.replace(
            heads=tuple(
                h.replace(rest=h.rest.replace(blocks=h.rest.blocks[1:]))
                for h in part.heads
            )
        ),
    }
    if part.prefix is not None:
        cuts["no prefix"] = part.replace(prefix=None)
        ones = jnp.ones_like(part.prefix.norm.weight)
        bare = part.prefix.replace(norm=part.prefix.norm.replace(weight=ones))
        cuts["no weight in the prefix's norm"] = part.replace(prefix=bare)
    for what, cut in cuts.items():
        first, second = error(cut, oracle)
        assert first.min() > 0.1 and second > 0.1, what
    shifted = {n: np.roll(oracle[n], 1, axis=0) for n in oracle if "features" in n}
    first, second = error(part, oracle, shifted.__getitem__)
    assert first.min() > 0.1 and second > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_head_reads_the_drafts_before_it_and_none_beyond(name, target):
    part, oracle = load_part(ORACLES / name, target).part, oracle_of(name)
    blind = with_first(part, without(2))  # of the first draft
    first, second = error(blind, oracle)
    assert first[0] < 2e-4 and (first[1:] > 0.1).all() and second < 2e-4
    blind = with_first(part, without(3))
    first, _ = error(blind, oracle)
    assert first[:2].max() < 2e-4 and first[2] > 0.1


def test_the_prefix_reads_true_rows_and_keeps_them(target):
    """Rows of the first round that were guessed, or lost, would show in the second."""
    part, oracle = load_part(ORACLES / "hydra_prefix", target).part, oracle_of(NAMES[1])
    stale = {"round2_features": np.tile(oracle["prefill_features"][-1:], (3, 1))}
    first, second = error(part, oracle, lambda n: stale.get(n, oracle[n]))
    assert first.max() < 2e-4 and second > 0.1
    drafter, tokens = HeadChain(part, 3), oracle["round2_in_ids"].tolist()
    empty = drafter.init(1, 64)
    rows = oracle["round2_features"]
    _, found = replaying.pairs(drafter, empty, rows, tokens, "x")
    assert np.abs(found["x_logits"] - oracle["refresh_logits"]).max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(name, target, tmp_path):
    loaded = load_part(ORACLES / name, target)
    assert loaded.part.ends.embedding is target.decoder.ends.embedding
    again = load_part(save_part(loaded, tmp_path / "copy"), target)
    held = load_file(tmp_path / "copy/model.safetensors")
    assert not any("embed" in name.split(".")[-2] for name in held)
    assert again.layout.name == loaded.layout.name
    assert jax.tree.structure(again.part) == jax.tree.structure(loaded.part)
    jax.tree.map(np.testing.assert_array_equal, again.part, loaded.part)
    written = json.loads((tmp_path / "copy/config.json").read_text())
    theirs = json.loads((ORACLES / name / "config.json").read_text())
    assert written == {key: theirs[key] for key in written}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("hydra", {"hydra_num_heads": 2}, "'hydra_num_heads'.*holds more heads"),
        ("hydra", {"hydra_num_heads": 4}, "hydra_mlp.3.[01].linear.weight"),
        ("hydra", {"hydra_num_layers": 4}, "hydra_mlp.0.3.linear.weight"),
        ("hydra", {"hydra_num_layers": None}, "'hydra_num_layers'.*missing"),
        ("hydra", {"hydra_head_arch": "eagle-attn"}, "'eagle-attn' is not impl.*mlp"),
        ("hydra", {"hydra_head_arch": "prefix-mlp"}, "prefix_embeding_layer|hydra_mlp"),
        ("hydra", {"grounded_heads": False}, "'grounded_heads'.*Medusa"),
        ("hydra", {"hidden_state_offset": 5}, "'hidden_state_offset'.*5.*4 layers"),
        ("hydra", {"hydra_gate": 1}, "'hydra_gate'.*not implemented"),
    ],
)
def test_errors_name_the_field(name, changes, problem, target, tmp_path):
    folder = save_part(load_part(ORACLES / name, target), tmp_path / "heads")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_part(folder, target)
    assert re.search(problem, str(caught.value))


def test_a_prefix_needs_a_target_of_its_kind():
    with pytest.raises(CheckpointError, match=r"like a Llama.*qwen3"):
        load_part(ORACLES / "hydra_prefix", load(TARGETS / "qwen3", tokenizer=False))


def test_an_offset_is_a_tap_before_the_last_norm(target, tmp_path):
    folder = save_part(load_part(ORACLES / "hydra", target), tmp_path / "heads")
    config = json.loads((folder / "config.json").read_text())
    config["hidden_state_offset"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    assert load_part(folder, target).part.taps == (3,)


def test_layers_that_are_not_one_are_refused(target, tmp_path):
    loaded = load_part(ORACLES / "hydra", target)
    head = loaded.part.heads[1]
    one, two = head.rest.blocks
    other = two.replace(bias=two.bias + 1)
    wrong = head.replace(rest=head.rest.replace(blocks=(one, other)))
    part = loaded.part.replace(heads=(loaded.part.heads[0], wrong))
    folder = save_part(
        type(loaded)(part, loaded.layout, loaded.path, {}), tmp_path / "x"
    )
    with pytest.raises(CheckpointError, match=r"'hydra_mlp\.1\.2\.linear' is another"):
        load_part(folder, target)


def test_more_drafts_than_heads_are_refused(target):
    part = load_part(ORACLES / "hydra", target).part
    with pytest.raises(ValueError, match="k 4: there are 3 heads"):
        load_drafter(ORACLES / "hydra", target, k=4)
    with pytest.raises(ValueError, match="depth 4: there are 3 heads"):
        HeadTree(part, full((1,) * 4))
    with pytest.raises(ValueError, match="depth 4: there are 3 heads"):
        HeadDynamicTree(part, depth=4)


def test_the_registry_builds_both(target):
    chain = load_drafter(ORACLES / "hydra", target, k=2)
    assert isinstance(chain, HeadChain) and chain.k == 2
    tree = load_drafter(ORACLES / "hydra", target, "hydra-tree", branching=(3, 1))
    assert isinstance(tree, HeadTree) and tree.tree == full((3, 1))
    medusa = load_part(ORACLES / "medusa", target).part
    with pytest.raises(ValueError, match="HydraHeads, and this is a MedusaHeads"):
        DRAFTERS["hydra"].build(DrafterOptions(part=medusa))


def toy_heads(toy, prefixed: bool) -> HydraHeads:
    """Two heads that go by their last token, as the target does by and large."""
    decoder, draw = toy.decoder, np.random.default_rng(5)
    size = decoder.config.hidden_size

    def head(i: int) -> HydraHead:
        wide = (i + 2) * size
        last = jnp.eye(size, wide, k=wide - size, dtype=jnp.float32)
        rough = jnp.asarray(draw.normal(0, 0.1, (size, wide)), jnp.float32)
        out = decoder.ends.head.replace(bias=jnp.zeros(decoder.vocab_size))
        return HydraHead(Linear(rough), Linear(last), MedusaHead((), out))

    prefix = HydraPrefix(decoder.blocks[0], decoder.norm) if prefixed else None
    ends = Ends(embedding=decoder.ends.embedding, head=decoder.ends.head)
    return HydraHeads(ends, (head(0), head(1)), prefix)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "prefixed", "rule"),
    [
        ("hydra", True, Greedy()),
        ("hydra", False, Coupled()),
        ("hydra-tree", True, None),
    ],
)
def test_the_contracts_hold(name, prefixed, rule):
    toy = toy_llama()
    part = toy_heads(toy, prefixed)
    drafter = DRAFTERS[name].build(DrafterOptions(k=2, part=part, branching=(3, 2)))
    widths = (drafter.max_nodes + 1,)
    check_drafter(drafter, toy, rule or Coupled(), widths=widths).assert_ok()
