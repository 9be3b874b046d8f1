"""The published layouts of block drafters: read, written, and refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax.checkpoints import load
from specjax.checkpoints.drafters import LoadedPart, host_of, load_part, save_part
from specjax.checkpoints.load import Checkpoint
from specjax.drafters import DRAFTERS, BlockChain, BlockTree, DrafterOptions
from specjax.drafters.block import DFlash, DFlash2, DSpark
from specjax.drafters.layouts import LAYOUTS, dspark
from specjax.models.build import Builder, WeightType
from specjax.models.families.fields import ConfigError
from specjax.testing.toy_blocks import OwnTensors, host_of_toy, toy_block, toy_fields
from specjax.testing.toys import toy_llama

DATA = Path(__file__).resolve().parents[1] / "data"
ORACLES = {
    "dflash": (DFlash, "DFlash (z-lab"),
    "dflash_swa": (DFlash, "DFlash (z-lab"),
    "dflash2": (DFlash2, "DFlash2 (z-lab"),
    "dspark": (DSpark, "DSpark (DeepSpec)"),
    "dspark_gated": (DSpark, "DSpark (DeepSpec)"),
    "dspark_rnn": (DSpark, "DSpark (DeepSpec)"),
    "dspark_speculators": (DSpark, "DSpark (speculators)"),
}


def folder(name: str) -> Path:
    return DATA / "drafter_oracles" / name


@pytest.fixture(scope="module")
def targets() -> dict[str, Checkpoint]:
    return {
        name: load(DATA / "oracles" / name, WeightType.FLOAT32, tokenizer=False)
        for name in ("llama", "qwen3")
    }


def target_of(name: str, targets: dict[str, Checkpoint]) -> Checkpoint:
    meta = json.loads((folder(name) / "meta.json").read_text("utf-8"))
    return targets[meta["target"]]


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ORACLES)
def test_a_part_is_written_as_it_was_read(name, targets, tmp_path):
    target = target_of(name, targets)
    loaded = load_part(folder(name), target)
    kind, layout = ORACLES[name]
    assert type(loaded.part) is kind and loaded.layout.name.startswith(layout)
    again = load_part(save_part(loaded, tmp_path / "out"), target)
    assert again.layout is loaded.layout
    same(again.part, loaded.part)


def test_copies_of_the_targets_ends_are_the_targets(targets):
    target = target_of("dspark", targets)
    part = load_part(folder("dspark"), target).part
    assert part.backbone.ends.embedding is target.decoder.embedding
    assert part.backbone.ends.head is target.decoder.head
    own = load_part(folder("dspark_speculators"), targets["llama"]).part.backbone
    assert own.ends.embedding is targets["llama"].decoder.embedding
    assert own.ends.head.out_features == len(own.draft_ids) == 120


def test_specforge_nests_what_deepspec_has_side_by_side(targets, tmp_path):
    target = target_of("dspark", targets)
    loaded = load_part(folder("dspark"), target)
    nested = next(x for x in LAYOUTS if x.name == "DSpark (SpecForge)")
    moved = dataclasses.replace(loaded, layout=nested)
    path = save_part(moved, tmp_path / "out")
    raw = json.loads((path / "config.json").read_text("utf-8"))
    assert raw["dflash_config"]["projector_type"] == "dspark"
    assert "markov_rank" not in raw
    raw["architectures"] = ["DFlashDraftModel"]  # as its own examples have it
    (path / "config.json").write_text(json.dumps(raw), "utf-8")
    again = load_part(path, target)
    assert again.layout is nested
    same(again.part, loaded.part)


def test_a_draft_vocabulary_is_of_one_layout_alone(targets, tmp_path):
    loaded = load_part(folder("dspark_speculators"), targets["llama"])
    flat = next(x for x in LAYOUTS if x.name == "DSpark (DeepSpec)")
    moved: LoadedPart = dataclasses.replace(loaded, layout=flat)
    with pytest.raises(ValueError, match="draft vocabulary"):
        save_part(moved, tmp_path / "out")


TOY = toy_llama().decoder


def test_a_dflash_of_the_speculators_library_is_a_dspark_without_heads():
    plain = toy_block("dflash", TOY)
    fields = toy_fields("dflash", TOY)
    raw = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {
            k: v
            for k, v in fields.items()
            if k not in ("architectures", "target_layer_ids", "mask_token_id")
            and k not in ("block_size", "num_target_layers")
        },
        "aux_hidden_state_layer_ids": [1, 0],
        "block_size": 5,
        "mask_token_id": fields["mask_token_id"],
        "draft_vocab_size": TOY.vocab_size,
    }
    layout = next(x for x in LAYOUTS if x.fits(raw, frozenset()))
    make = Builder(OwnTensors(0), WeightType.FLOAT32)
    part = layout.build(raw, make, host_of_toy(TOY))
    assert part.markov is None and part.confidence is None
    same(part.backbone, plain.backbone)
    assert part.backbone.taps == plain.backbone.taps == (1, 0)
    assert not part.backbone.from_anchor


def test_where_drafting_is_told_does_not_matter():
    nested = {"target_layer_ids": [0, -1], "mask_token_id": TOY.vocab_size - 1}
    same(
        toy_block("dflash", TOY, dflash_config=nested, is_causal=False),
        toy_block("dflash", TOY, dflash_config={**nested, "causal": False}),
    )


def test_a_drafter_takes_the_bare_matrices_and_its_own_scales():
    scaled = TOY.replace(
        config=dataclasses.replace(TOY.config, embedding_scale=3.0, logit_softcap=5.0)
    )
    ends = toy_block("dflash", scaled).backbone.ends
    assert (ends.scale, ends.softcap) == (1.0, None)
    given = {"input_embedding_scale": 3.0, "final_logit_softcapping": 5.0}
    part = toy_block("dflash", scaled, dflash_config=given)
    assert (part.backbone.ends.scale, part.backbone.ends.softcap) == (3.0, 5.0)
    rows = jax.random.normal(jax.random.key(0), (1, 2, TOY.config.hidden_size))
    multiplied = toy_block("dflash", scaled, output_multiplier=0.5).backbone
    wanted = 0.5 * np.asarray(TOY.head(rows))
    np.testing.assert_allclose(multiplied.logits(rows), wanted, rtol=1e-6)
    capped = 5.0 * np.tanh(np.asarray(TOY.head(rows)) / 5.0)
    np.testing.assert_allclose(part.backbone.logits(rows), capped, rtol=1e-5)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("dflash", {"hidden_size": 32}, "hidden_size"),
    ("dflash", {"vocab_size": 60}, "vocab_size"),
    ("dflash", {"num_target_layers": 3}, "num_target_layers"),
    ("dflash", {"target_layer_ids": [1]}, "target_layer_ids"),
    ("dflash", {"target_layer_ids": [-2]}, "target_layer_ids"),
    ("dflash", {"target_layer_ids": None}, "target_layer_ids"),
    ("dflash", {"mask_token_id": 61}, "mask_token_id"),
    ("dflash", {"block_size": 1}, "block_size"),
    ("dflash", {"block_size": 10**9}, "block_size"),
    ("dflash", {"block_size": 5, "dflash_config": {"block_size": 4}}, "block_size"),
    ("dflash", {"is_causal": True, "causal": False}, "causal"),
    ("dflash", {"is_causal": False, "sliding_window": 4}, "sliding_window"),
    ("dflash", {"use_sliding_window": False}, "layer_types"),
    ("dflash", {"markov_rank": 8}, "markov_rank"),
    ("dflash", {"dflash_config": {"emb_dim": 8}}, "emb_dim"),
    ("dflash", {"attention_sinks": True}, "attention_sinks"),
    ("dflash", {"model_type": "llama"}, "model_type"),
    ("dflash2", {"model_type": "gpt_oss"}, "model_type"),
    ("dspark", {"model_type": "llama"}, "model_type"),
    ("dflash2", {"conv_group_size": 5}, "conv_group_size"),
    ("dflash2", {"conv_kernel_size": 6}, "conv_kernel_size"),
    ("dflash2", {"selector_top_k": 62}, "selector_top_k"),
    ("dflash2", {"selector_rank": None}, "selector_rank"),
    ("dspark", {"markov_head_type": "lstm"}, "markov_head_type"),
    ("dspark", {"markov_rank": 0}, "confidence_head_with_markov"),
    ("dspark", {"block_size": 0}, "block_size"),
]


@pytest.mark.parametrize(("method", "changes", "field"), WRONG)
def test_a_configuration_that_does_not_fit_names_the_field(method, changes, field):
    with pytest.raises(ConfigError, match=f"'{field}'"):
        toy_block(method, TOY, **changes)


def test_heads_may_be_absent():
    part = toy_block("dspark", TOY, markov_rank=0, enable_confidence_head=False)
    assert part.markov is None and part.confidence is None
    alone = toy_block("dspark", TOY, markov_rank=0, confidence_head_with_markov=False)
    assert alone.confidence.proj.weight.shape == (1, TOY.config.hidden_size)
    again = dspark.export_flat(alone)
    assert again.config["markov_rank"] == 0
    assert not again.config["confidence_head_with_markov"]


def test_drafters_are_made_by_name(targets):
    part = load_part(folder("dflash2"), targets["llama"]).part
    options = DrafterOptions(k=7, nodes=12, part=part)
    for name in ("dflash", "dflash2", "dspark"):
        chain = DRAFTERS[name].build(options)
        assert isinstance(chain, BlockChain) and chain.max_depth == 7
    tree = DRAFTERS["ddtree"].build(options)
    assert isinstance(tree, BlockTree) and tree.max_nodes == 12
    host = host_of(targets["llama"])
    assert tree.vocab_size == host.vocab_size
