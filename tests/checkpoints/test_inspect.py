"""Descriptions come from headers alone, and of any family."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from specjax.checkpoints import CheckpointError, describe
from specjax.checkpoints.layer_bytes import (
    kv_bytes_per_token,
    state_bytes_per_row,
    window_bytes_per_row,
)
from specjax.checkpoints.safetensors import SafetensorsReader
from specjax.models.config import (
    AttentionConfig,
    GatedDeltaConfig,
    IndexerConfig,
    LatentAttentionConfig,
    Mamba2Config,
    ShortConvConfig,
)


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch):
    monkeypatch.setattr(SafetensorsReader, "_data", None)


def test_a_directory(tiny):
    found = describe(tiny.directory(tokenizer=True)).as_dict()
    parameters = sum(w.size for w in tiny.weights().values())
    assert found | {"path": ""} == {
        "path": "",
        "format": "safetensors",
        "family": "llama",
        "implemented": True,
        "note": "",
        "num_layers": 2,
        "layers_by_mixer": {"attention": 2},
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "tied": True,
        "context_length": 128,
        "kv_bytes_per_token": 2 * 2 * 2 * 16 * 2,
        "window_bytes_per_row": 0,
        "state_bytes_per_row": 0,
        "scratch_bytes": [],
        "num_parameters": parameters,
        "bytes_by_dtype": {"F32": 4 * parameters},
        "num_tensors": 20,
        "num_files": 1,
        "mtp_tensors": 0,
        "has_tokenizer": True,
        "has_chat_template": True,
    }
    json.dumps(found)


def test_a_gguf_file_is_described_alike(tiny):
    kinds = {"model.embed_tokens.weight": Kind.Q8_0}
    found = describe(tiny.gguf(kinds=kinds)).as_dict()
    same = describe(tiny.directory(tokenizer=True)).as_dict()
    differ = {key for key in found if found[key] != same[key]}
    assert differ == {"path", "format", "bytes_by_dtype"}
    assert found["bytes_by_dtype"]["Q8_0"] == 320 * 64 // 32 * 34


def test_shards(tiny):
    assert describe(tiny.sharded()).num_files == 2


def test_an_unknown_family_and_its_mtp_tensors(tiny):
    weights = {
        "model.layers.0.x.weight": np.ones((2, 3), np.float32),
        "model.layers.2.eh_proj.weight": np.ones(4, np.float16),
        "mtp.fc.weight": np.ones(5, np.int8),
    }
    config = {"model_type": "unheard", "text_config": {"num_hidden_layers": 2}}
    found = describe(tiny.directory(weights=weights, config=config))
    assert not found.implemented
    assert found.note == "family 'unheard' is not implemented yet: listing the tensors"
    assert (found.num_layers, found.hidden_size, found.mtp_tensors) == (2, None, 2)
    listed = {t["name"]: t for t in found.as_dict()["tensors"]}
    assert listed["mtp.fc.weight"]["dtype"] == "I8"
    assert listed["model.layers.0.x.weight"]["shape"] == [2, 3]
    assert "tensors" not in found.as_dict(tensors=False)


def test_a_gguf_file_of_an_unknown_architecture(tiny):
    found = describe(tiny.gguf(arch="mamba"))
    assert (found.family, found.implemented) == ("mamba", False)
    assert found.has_tokenizer


def test_a_configuration_that_is_not_implemented(tiny):
    config = {**tiny.config, "hidden_act": "gelu"}
    found = describe(tiny.directory(config=config))
    assert not found.implemented
    assert "'hidden_act'" in found.note
    assert found.num_layers == 2


def test_what_a_layer_keeps():
    """Of a token, of a window and of a state; sizes of Qwen3.5, Kimi and GLM-5."""

    def sizes(mixer):
        parts = (kv_bytes_per_token, window_bytes_per_row, state_bytes_per_row)
        return tuple(size(mixer) for size in parts)

    attention = AttentionConfig(num_heads=24, num_kv_heads=4, head_dim=256, rope=None)
    assert sizes(attention) == (2 * 4 * 256 * 2, 0, 0)
    sliding = dataclasses.replace(attention, reach=128)
    assert sizes(sliding) == (0, 128 * 2 * 4 * 256 * 2, 0)
    latent = LatentAttentionConfig(
        num_heads=64,
        query_rank=2048,
        latent_dim=512,
        content_dim=192,
        rotary_dim=64,
        value_dim=256,
        rope=None,
        scale=1.0,
        latent_eps=1e-6,
    )
    assert sizes(latent) == ((512 + 64) * 2, 0, 0)
    indexer = IndexerConfig(num_heads=32, head_dim=128, top_k=2048)
    indexed = dataclasses.replace(latent, indexer=indexer)
    assert sizes(indexed) == ((512 + 64 + 128) * 2, 0, 0)
    delta = GatedDeltaConfig(
        num_key_heads=16,
        num_value_heads=48,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        norm_eps=1e-6,
    )
    channels = 2 * 16 * 128 + 48 * 128
    assert sizes(delta) == (0, 0, (48 * 128 * 128 + 3 * channels) * 4)
    mamba = Mamba2Config(
        num_heads=128,
        head_dim=64,
        state_dim=128,
        num_groups=8,
        conv_width=4,
        conv_bias=True,
        bias=False,
        norm_eps=1e-5,
    )
    channels = 128 * 64 + 2 * 8 * 128
    assert sizes(mamba) == (0, 0, (128 * 64 * 128 + 3 * channels) * 4)
    assert sizes(ShortConvConfig(channels=2048, conv_width=3)) == (0, 0, 2 * 2048 * 4)


ORACLES = Path(__file__).resolve().parents[1] / "data/oracles"


def test_what_a_pass_needs_beside_recurrent_states():
    """By strategy, of one layer; window rows multiply all but the ring's slots."""
    found = describe(ORACLES / "qwen3_5")
    assert found.layers_by_mixer == {"gated_delta": 3, "attention": 1}
    config = json.loads((ORACLES / "qwen3_5/config.json").read_text())["text_config"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, dv = config["linear_num_value_heads"], config["linear_value_head_dim"]
    matrix = heads * dv * config["linear_key_head_dim"] * 4
    record = (keys + heads * dv + heads) * 4
    (delta,) = found.scratch_bytes
    assert (delta.mixer, delta.layers, delta.window) == ("gated_delta", 3, 9)
    assert (delta.matrix, delta.snapshot) == (matrix, 9 * matrix)
    assert (delta.replay, delta.ring) == (9 * record, (9 + 16) * record + 4)
    (delta,) = describe(ORACLES / "qwen3_5", window=65).scratch_bytes
    assert (delta.snapshot, delta.replay) == (65 * matrix, 65 * record)
    states = found.state_bytes_per_row
    past = (config["linear_conv_kernel_dim"] - 1) * (2 * keys + heads * dv) * 4
    assert states == 3 * (matrix + past)


@pytest.mark.parametrize(
    ("name", "dtypes", "mixers"),
    [
        ("deepseek_v3_fp8", {"F8_E4M3", "BF16", "F32"}, {"latent_attention": 3}),
        ("gpt_oss_mxfp4", {"MXFP4", "BF16"}, {"attention": 3}),
        ("nemotron_h", {"F32"}, {"mamba2": 3, "none": 2, "attention": 1}),
        ("lfm2", {"F32"}, {"short_conv": 3, "attention": 2}),
    ],
)
def test_tiny_checkpoints_of_other_families(name, dtypes, mixers):
    found = describe(ORACLES / name)
    assert found.implemented and found.note == ""
    assert set(found.bytes_by_dtype) == dtypes
    assert found.layers_by_mixer == mixers
    file = ORACLES / name / "model.safetensors"
    stored = sum(found.bytes_by_dtype.values())
    assert 0 < file.stat().st_size - stored < 60_000  # the header


def test_a_sliding_window_and_a_full_layer():
    config = json.loads((ORACLES / "gpt_oss/config.json").read_text())
    token = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    found = describe(ORACLES / "gpt_oss")
    assert found.kv_bytes_per_token == token  # of one layer of three
    assert found.window_bytes_per_row == 2 * config["sliding_window"] * token


def test_a_truncated_file(tiny):
    path = tiny.directory()
    file = tiny.single(path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        describe(path)
