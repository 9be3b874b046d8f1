"""Loading a head and making its drafter; what is said of a folder that is none."""

import re
from pathlib import Path

import pytest

from specjax.checkpoints import CheckpointError, describe, load
from specjax.checkpoints.drafters import load_drafter, load_part
from specjax.drafters import DRAFTERS, DrafterOptions, HeadChain, HeadDynamicTree

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
