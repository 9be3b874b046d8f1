"""Loading MTP layers: what is read, and what is said where something is wrong."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from specjax.checkpoints import CheckpointError, load
from specjax.checkpoints.mtp import load_mtp
from specjax.drafters.mtp import MTPHead, MTPModules
from specjax.drafters.mtp_shared_choice import SharedChoiceHead
from specjax.models.build import WeightType

ORACLES = Path(__file__).resolve().parents[1] / "data/oracles"


@pytest.fixture
def changed(tmp_path):
    """A checkpoint's folder with other tensors or another configuration."""

    def changed(name: str, change=lambda tensors: None, **fields) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = json.loads((ORACLES / name / "config.json").read_text())
        inner = config.get("text_config", config)
        inner.update(fields)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(ORACLES / name / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return changed


def refused(folder: Path, *said: str) -> None:
    target = load(folder, tokenizer=False)
    with pytest.raises(CheckpointError) as caught:
        load_mtp(target)
    for text in (str(folder), *said):
        assert text in str(caught.value)


def without_mtp(tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_a_family_without_any():
    refused(ORACLES / "llama", "'llama' have no MTP layers", "glm_moe_dsa, nemotron_h")


def test_a_configuration_that_says_none(changed):
    folder = changed("qwen3_5", without_mtp, mtp_num_hidden_layers=0)
    refused(folder, "configuration says that there are no MTP", "mtp_num_hidden_layers")


def test_a_file_that_holds_none(changed):
    refused(changed("qwen3_5", without_mtp), "holds no MTP layers", r"mtp\\..*")


def test_a_missing_tensor_is_named(changed):
    def change(tensors):
        del tensors["mtp.pre_fc_norm_hidden.weight"]

    refused(changed("qwen3_5", change), "'mtp.pre_fc_norm_hidden.weight' is missing")


def test_a_tensor_of_no_use_is_named(changed):
    def change(tensors):
        tensors["mtp.strange.weight"] = tensors["mtp.norm.weight"]

    refused(changed("qwen3_5", change), "'mtp.strange.weight'", "of no use")


def test_an_embedding_of_its_own(changed):
    folder = changed("qwen3_5", mtp_use_dedicated_embeddings=True)
    refused(folder, "'mtp_use_dedicated_embeddings': true is not implemented")


def test_several_modules_of_nemotron(changed):
    folder = changed("nemotron_h_moe", num_nextn_predict_layers=2)
    refused(folder, "'num_nextn_predict_layers': 2 is not implemented")


def test_embedding_and_head_are_the_targets_own():
    target = load(ORACLES / "deepseek_v3", tokenizer=False)
    head = load_mtp(target)
    assert isinstance(head, MTPHead)
    assert head.ends.embedding is target.decoder.embedding
    assert head.ends.head.weight is target.decoder.head.weight
    narrow = load_mtp(target, WeightType.BFLOAT16)
    assert isinstance(narrow, MTPHead)
    assert narrow.module.join.weight.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "first", "second", "field"),
    [
        ("glm4_moe", "model.layers.3.", "model.layers.4.", "num_nextn_predict_layers"),
        ("qwen3_5", "mtp.layers.0.", "mtp.layers.1.", "mtp_num_hidden_layers"),
    ],
)
def test_several_modules(changed, name, first, second, field):
    """The second one like the first, but for one tensor."""

    def change(tensors):
        for key in [key for key in tensors if key.startswith(first)]:
            tensors[key.replace(first, second)] = tensors[key]
        norm = f"{second}input_layernorm.weight"
        tensors[norm] = tensors[norm] + 1

    modules = load_mtp(load(changed(name, change, **{field: 2}), tokenizer=False))
    assert isinstance(modules, MTPModules) and len(modules.heads) == 2
    leaves = [jax.tree.leaves(head.module) for head in modules.heads]
    same = [np.array_equal(a, b) for a, b in zip(*leaves, strict=True)]
    assert same.count(False) == 1
    mixers = [head.module.blocks[0].mixer for head in modules.heads]
    first_norm, second_norm = (mixer.norm.weight for mixer in mixers if mixer)
    np.testing.assert_allclose(second_norm, first_norm + 1, atol=1e-2)


def test_a_choice_that_is_shared(changed):
    folder = changed("glm_moe_dsa", index_share_for_mtp_iteration=True)
    assert isinstance(load_mtp(load(folder, tokenizer=False)), SharedChoiceHead)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("qwen3_5", "mtp_num_hidden_layers"),
        ("deepseek_v3", "num_nextn_predict_layers"),
        ("nemotron_h_moe", "num_nextn_predict_layers"),
    ],
)
def test_a_count_that_must_be_a_mistake_is_refused(changed, name, field):
    with pytest.raises(CheckpointError, match=f"{field}.*more than 64"):
        load(changed(name, **{field: 10**9}), tokenizer=False)
