"""EAGLE's published layouts: there and back, and what is wrong is named."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file as flax_load_file
from safetensors.numpy import load_file, save_file

from specjax.checkpoints import Checkpoint, load
from specjax.checkpoints.drafters import load_part, save_part
from specjax.checkpoints.errors import CheckpointError
from specjax.drafters.eagle.eagle3 import Recycled
from specjax.models.build import WeightType

DATA = Path(__file__).resolve().parents[1] / "data"
ORACLES = DATA / "drafter_oracles"
TARGET_OF = {"eagle1": "qwen3", "eagle3_normfc": "qwen3"}
NAMES = (
    "eagle1",
    "eagle3",
    "eagle31",
    "eagle31_specforge",
    "eagle3_normfc",
    "peagle",
)
EMBED = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def targets() -> dict[str, Checkpoint]:
    return {
        name: load(DATA / "oracles" / name, WeightType.FLOAT32, tokenizer=False)
        for name in ("llama", "qwen3")
    }


def changed(tmp_path: Path, name: str, tensors=None, **fields) -> Path:
    """A copy of an oracle's checkpoint with other fields (``None``: without) and
    tensors."""
    folder = tmp_path / name
    shutil.copytree(ORACLES / name, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw = {k: v for k, v in (raw | fields).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors:
        held = load_file(folder / "model.safetensors")
        held = {k: v for k, v in (held | tensors(held)).items() if v is not None}
        save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_as_the_same_part(name, targets, tmp_path):
    target = targets[TARGET_OF.get(name, "llama")]
    loaded = load_part(ORACLES / name, target)
    again = load_part(save_part(loaded, tmp_path / "copy"), target)
    assert again.layout == loaded.layout
    assert jax.tree.structure(again.part) == jax.tree.structure(loaded.part)
    for a, b in zip(
        jax.tree.leaves(again.part), jax.tree.leaves(loaded.part), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_embeddings_are_shared_unless_the_heads_are_its_own(targets):
    target = targets["llama"]
    shared = target.decoder.embedding
    for name in ("eagle3", "eagle31"):  # stored nowhere, stored as a copy
        assert load_part(ORACLES / name, target).part.ends.embedding is shared
    own = load_part(ORACLES / "peagle", target).part.head.ends.embedding
    assert own.shape == shared.shape and bool((own != shared).any())


@pytest.mark.parametrize("dtype", [WeightType.FLOAT32, WeightType.BFLOAT16])
def test_an_embedding_is_written_if_it_is_the_heads_own(dtype, targets, tmp_path):
    """Of bfloat16 heads a copy was rounded, and is the target's all the same."""
    target = targets["llama"]
    for name, own in (("eagle3", False), ("eagle31", False), ("peagle", True)):
        loaded = load_part(ORACLES / name, target, dtype)
        folder = save_part(loaded, tmp_path / name)
        held = flax_load_file(folder / "model.safetensors")
        assert ("embed_tokens.weight" in held) == own, name
        assert held["fc.weight"].dtype == jnp.dtype(dtype.value)
        again = load_part(folder, target, dtype).part
        ends = (again.head if own else again).ends
        assert (ends.embedding is target.decoder.embedding) != own
    folder = changed(tmp_path / "x", "eagle31", lambda held: {EMBED: held[EMBED] + 1})
    part = load_part(folder, target, dtype).part
    assert part.own_embedding and part.ends.embedding.dtype == jnp.dtype(dtype.value)


def test_flags_reach_the_part(targets):
    llama, qwen = targets["llama"], targets["qwen3"]
    part = load_part(ORACLES / "eagle3_normfc", qwen).part
    assert part.fused_norm is not None and part.tap_norms is None
    assert part.first.residual_normed and part.vocabulary is None
    assert part.taps == (0, 1, 2)
    part = load_part(ORACLES / "eagle31", llama).part
    assert part.fused_norm is None and len(part.tap_norms) == 3
    assert not part.first.residual_normed
    part = load_part(ORACLES / "eagle1", qwen).part
    assert part.fc.bias is not None and part.taps == (-1,)
    assert load_part(ORACLES / "peagle", llama).part.mask_token == 253


def test_draft_ids_are_offsets(targets):
    part = load_part(ORACLES / "eagle3", targets["llama"]).part
    held = load_file(ORACLES / "eagle3" / "model.safetensors")
    ids = np.arange(160) + held["d2t"]
    np.testing.assert_array_equal(part.vocabulary.ids, ids)
    np.testing.assert_array_equal(np.flatnonzero(held["t2d"]), ids)
    said = np.arange(160, dtype=np.float32)[None, None]
    spread = np.asarray(part.vocabulary.spread(jnp.asarray(said)))[0, 0]
    assert spread.shape == (256,) and np.isneginf(spread).sum() == 96
    np.testing.assert_array_equal(spread[ids], said[0, 0])


def test_a_file_may_say_what_is_recycled(targets, tmp_path):
    told = {"recycled_hidden": "post-norm"}
    folder = changed(tmp_path, "eagle31_specforge", **told)
    part = load_part(folder, targets["llama"]).part
    assert part.recycled is Recycled.BEHIND_NORM


def test_taps_that_nobody_names_are_the_usual_ones(targets, tmp_path):
    folder = changed(tmp_path, "eagle3", eagle_config=None)
    with pytest.raises(CheckpointError, match="L/2, L-3 does not fit 4 layers"):
        load_part(folder, targets["llama"])


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("eagle1", {"vocab_size": 255}, "'vocab_size'.*the target's is 256"),
        ("eagle1", {"hidden_size": 32}, "'hidden_size'.*the target's is 64"),
        ("eagle1", {"strange": 1}, "'strange'.*not implemented"),
        ("eagle3", {"target_hidden_size": 32}, "'target_hidden_size'"),
        ("eagle3", {"num_aux_hidden_states": 5}, "'num_aux_hidden_states'.*5, for 3"),
        ("eagle3", {"eagle_config": {IDS: [1, 2, 4]}}, f"'{IDS}'.*4 layers"),
        ("eagle3", {IDS: [0, 1, 2]}, f"'{IDS}'.*contradicts"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden"),
        ("eagle3", {"eagle_config": {IDS: [1, 2, 3], "odd": 1}}, "'odd'"),
        (
            "eagle3_normfc",
            {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
            "'norm_before_fc'.*contradicts",
        ),
        (
            "eagle3",
            {"eagle_config": {IDS: [1, 2, 3], "norm_before_fc": "no"}},
            "'norm_before_fc'.*true or false",
        ),
        ("eagle3", {"draft_vocab_size": None}, "'draft_vocab_size'.*missing"),
        ("eagle3", {"num_hidden_layers": 2}, "'num_hidden_layers'.*midlayer is one"),
        ("eagle3", {"norm_output": False}, "'norm_output'.*recycled_hidden"),
        ("eagle31", {"recycled_hidden": "both"}, "'recycled_hidden'.*'post-norm'"),
        ("eagle31", {"norm_output": 1}, "'norm_output'.*true or false"),
        ("peagle", {"mask_token_id": 256}, "'mask_token_id'.*256 tokens"),
        ("peagle", {"mask_token_id": None}, "'mask_token_id.*missing"),
    ],
)
def test_a_wrong_field_is_named(name, fields, problem, targets, tmp_path):
    target = targets[TARGET_OF.get(name, "llama")]
    folder = changed(tmp_path, name, **fields)
    with pytest.raises(CheckpointError, match=f"(?s){problem}"):
        load_part(folder, target)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (lambda held: {"d2t": held["d2t"] + 1}, "d2t"),
        (lambda held: {"d2t": held["d2t"][::-1].copy()}, "d2t"),
        (lambda held: {"t2d": ~held["t2d"]}, "d2t and t2d"),
        (lambda held: {"d2t": None}, "d2t"),
        (lambda held: {"fc_norm.0.weight": held["norm.weight"]}, "fc_norm"),
    ],
)
def test_a_wrong_tensor_is_named(tensors, problem, targets, tmp_path):
    folder = changed(tmp_path, "eagle3", tensors)
    with pytest.raises(CheckpointError, match=problem):
        load_part(folder, targets["llama"])
