"""Loading a head and making its drafter; what is said of a folder that is none."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.acceptance import RULES
from specjax.checkpoints import CheckpointError, describe, load
from specjax.checkpoints.drafters import load_drafter, load_part, save_part
from specjax.decoding.pairs import PairError, check_pair
from specjax.drafters import DRAFTERS, DrafterOptions, HeadChain, HeadDynamicTree
from specjax.models.build import WeightType

DATA = Path(__file__).resolve().parents[1] / "data"
HEADS = DATA / "drafter_oracles"
PAGE = DATA.parents[1] / "docs/drafters.md"


@pytest.fixture(scope="module")
def target():
    return load(DATA / "oracles/llama", tokenizer=False)


def test_the_pages_example_makes_drafters(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    [code] = [block for block in blocks if "load_drafter" in block]
    monkeypatch.chdir(DATA.parents[1])
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert isinstance(names["drafter"], HeadChain) and names["drafter"].k == 4
    assert isinstance(names["tree"], HeadDynamicTree)
    assert names["tree"].max_nodes == 12


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("medusa", "eagle3", "medusa or medusa-tree runs, and not eagle3"),
        ("eagle3", "nothing", "eagle2 or eagle3 runs, and not nothing"),
        ("absent", None, "there is no draft head"),
        ("eagle3/model.safetensors", None, "no folder"),
    ],
)
def test_what_is_no_head_of_this_drafter(target, folder, name, said):
    with pytest.raises(CheckpointError, match=said):
        load_drafter(HEADS / folder, target, name)


def test_a_part_of_another_kind_is_refused(target):
    loaded = load_part(HEADS / "medusa", target)
    for part, kind in ((loaded, "LoadedPart"), (loaded.part, "MedusaHeads")):
        with pytest.raises(ValueError, match=f"FeatureHead, and this is a {kind}"):
            DRAFTERS["eagle3"].build(DrafterOptions(part=part))
    with pytest.raises(ValueError, match="a draft head's checkpoint is needed: load"):
        DRAFTERS["medusa"].build(DrafterOptions())


@pytest.mark.parametrize(("folder", "k"), [("medusa", 5), ("dflash", 6)])
def test_more_drafts_than_a_head_was_made_for(target, folder, k):
    with pytest.raises(ValueError, match=str(k - 1)):
        load_drafter(HEADS / folder, target, k=k)


def test_inspect_knows_a_head():
    told = describe(HEADS / "eagle3")
    assert told.implemented and told.family == "eagle3"
    assert "EAGLE-3" in told.note and "--drafter eagle3:" in told.note
    assert describe(DATA / "oracles/llama").family == "llama"


def changed(tmp_path, name, **fields):
    """A head's folder with other fields in its configuration."""
    folder = tmp_path / name
    shutil.copytree(HEADS / name, folder)
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("eagle3", {"architectures": 5}, "architectures 5 must be a list"),
        ("eagle31", {"transformer_layer_config": None}, "transformer_layer_config"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(target, tmp_path, name, fields, said):
    with pytest.raises(CheckpointError, match=said):
        load_part(changed(tmp_path, name, **fields), target)


def test_a_head_of_narrow_weights_is_not_written(target, tmp_path):
    loaded = load_part(HEADS / "dflash", target, WeightType.INT8)
    with pytest.raises(CheckpointError, match="int8 weights cannot be written"):
        save_part(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ends_of_its_own_are_written(target, tmp_path):
    """An embedding that differs from the target's, and what is done around it."""
    folder = changed(tmp_path, "dspark_speculators", final_logit_softcapping=5.0)
    tensors = load_file(folder / "model.safetensors")
    draw = np.random.default_rng(0)
    tensors["embed_tokens.weight"] = draw.normal(size=(256, 64)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    first = load_part(folder, target)
    save_part(first, tmp_path / "out")
    again = load_part(tmp_path / "out", target)
    assert again.part.backbone.ends.softcap == 5.0
    assert again.part.backbone.own == ("embed_tokens", "lm_head")
    for a, b in zip(*map(jax.tree.leaves, (first.part, again.part)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_tree_as_deep_as_it_has_nodes_is_no_chain(target):
    for name, folder in (("ddtree", "dflash"), ("eagle2", "eagle3")):
        drafter = load_drafter(HEADS / folder, target, name, k=3, nodes=3)
        with pytest.raises(PairError, match="chain"):
            check_pair(target.decoder, drafter, RULES["block"].build())
