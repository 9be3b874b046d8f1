"""GGUF files of every architecture give the decoder that the original directory gives.

The names of tensors are the gguf package's, and what its converter does to weights and
to the configuration is said here once more.
"""

import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from safetensors.numpy import load_file

from specjax.checkpoints import CheckpointError, describe, load
from specjax.checkpoints.gguf import GGUFReader
from specjax.checkpoints.gguf_names import ARCHITECTURES
from specjax.models.build import Builder, WeightType
from specjax.models.families import FAMILIES

ORACLES = Path(__file__).resolve().parents[1] / "data/oracles"
ARCHES = {arch.name.lower(): arch for arch in MODEL_ARCH}
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def original(family: str) -> tuple[dict, dict]:
    """A tiny model: its configuration and weights, as the converter can keep them."""
    config = json.loads((ORACLES / family / "config.json").read_text())
    if family == "gemma3":  # a file cannot say otherwise
        config["query_pre_attn_scalar"] = config["head_dim"]
    return config, load_file(ORACLES / family / "model.safetensors")


def metadata(family: str, config: dict) -> dict:
    """What the converter writes of a configuration."""
    keys = {key: config[name] for key, name in SIZES.items()}
    keys["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    keys["rope.freq_base"] = float(config["rope_theta"])
    if "head_dim" in config:
        keys["attention.key_length"] = keys["attention.value_length"] = config[
            "head_dim"
        ]
    if family == "gemma3":
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    return keys


def write(
    path: Path,
    family: str,
    weights: dict,
    keys: dict,
    *,
    extra: dict | None = None,
    matrices: GGMLQuantizationType | None = None,
    file_type: int | None = None,
) -> Path:
    """A GGUF file; ``None`` among ``keys`` leaves one out."""
    names = gguf.get_tensor_name_map(ARCHES[family], keys["block_count"])
    writer = gguf.GGUFWriter(path, family)
    if file_type is not None:
        writer.add_file_type(file_type)
    for key, value in keys.items():
        full = f"{family}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    for name, array in weights.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        if family == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if matrices is not None and array.ndim == 2:
            array = gguf.quantize(array, matrices)
            writer.add_tensor(own, array, raw_dtype=matrices)
        else:
            writer.add_tensor(own, array.astype(np.float32))
    for own, array in (extra or {}).items():
        writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_same_decoder_as_from_the_directory(tmp_path, cache, family):
    config, weights = original(family)
    path = write(tmp_path / "x.gguf", family, weights, metadata(family, config))
    ours = load(path).decoder
    assert ours.config == FAMILIES[config["model_type"]].config(config)
    theirs = load(ORACLES / family).decoder
    # a norm's weight has been increased and decreased by one
    rounding = 1e-6 if family == "gemma3" else 0.0
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=rounding)
    assert describe(path).family == config["model_type"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "llama"])
def test_every_tensor_of_a_block_has_the_gguf_packages_name(family):
    names = gguf.get_tensor_name_map(ARCHES[family], 3)
    architecture = ARCHITECTURES[family]
    for own, theirs in architecture.block_names.items():
        full = f"model.layers.2.{theirs}.weight"
        assert names.get_name(full, (".weight",)) == f"blk.2.{own}.weight"
        assert architecture.hugging_face_name(f"blk.2.{own}.weight") == full
    assert architecture.hugging_face_name("blk.2.else.weight") == "blk.2.else.weight"


def test_a_head_of_its_own(tmp_path):
    config, weights = original("qwen2")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + np.float32(1)
    path = write(tmp_path / "x.gguf", "qwen2", weights, metadata("qwen2", config))
    reader = GGUFReader(path)
    assert reader.config["tie_word_embeddings"] is False
    family = FAMILIES["qwen2"]
    decoder = family.build(
        family.config(reader.config), Builder(reader, WeightType.FLOAT32)
    )
    np.testing.assert_array_equal(decoder.head.weight, weights["lm_head.weight"])


def gemma(tmp_path, **changes):
    """The reader of a Gemma file whose metadata is changed (dots are ``__``)."""
    config, weights = original("gemma3")
    keys = metadata("gemma3", config)
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return GGUFReader(write(tmp_path / "x.gguf", "gemma3", weights, keys))


def decoder_config(reader):
    return FAMILIES["gemma3_text"].config(reader.config)


class TestGemma:
    """What a file leaves out, and what newer files say."""

    def test_what_the_file_leaves_out(self, tmp_path):
        reader = gemma(tmp_path, attention__sliding_window_pattern=None)
        assert reader.config["sliding_window_pattern"] == 6
        assert reader.config["rope_local_base_freq"] == 10000.0
        assert reader.config["query_pre_attn_scalar"] == 32
        assert reader.config["tie_word_embeddings"] is True
        assert reader.config["final_logit_softcapping"] is None

    def test_layers_by_themselves(self, tmp_path):
        flags = [True, False, False, True]
        reader = gemma(tmp_path, attention__sliding_window_pattern=flags)
        reaches = [b.mixer.reach for b in decoder_config(reader).blocks]
        assert reaches == [9, None, None, 9]

    def test_linear_scaling_is_of_the_layers_that_see_everything(self, tmp_path):
        reader = gemma(
            tmp_path, rope__scaling__type="linear", rope__scaling__factor=8.0
        )
        blocks = decoder_config(reader).blocks
        plain = decoder_config(gemma(tmp_path)).blocks
        for block, other in zip(blocks, plain, strict=True):
            ratio = other.mixer.rope.frequencies() / block.mixer.rope.frequencies()
            np.testing.assert_allclose(ratio, 1 if block.mixer.reach else 8)

    def test_other_keys(self, tmp_path):
        reader = gemma(
            tmp_path, rope__freq_base_swa=5000.0, final_logit_softcapping=30.0
        )
        assert reader.config["rope_local_base_freq"] == 5000.0
        assert decoder_config(reader).logit_softcap == 30.0

    def test_the_largest_scales_its_queries_differently(self, tmp_path):
        """27B has 62 layers, 5376 / 32 of its own and heads of 128."""
        reader = gemma(tmp_path, block_count=62)
        assert reader.config["query_pre_attn_scalar"] == 64 // 4
        small = gemma(tmp_path, block_count=48)
        assert small.config["query_pre_attn_scalar"] == 32

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rope.scaling.type", "yarn"),
            ("attn_logit_softcapping", 50.0),
            ("attention.sliding_window", None),
            ("attention.sliding_window_pattern", [True, False]),
            ("attention.value_length", 16),
            ("expert_count", 8),
        ],
    )
    def test_what_is_not_known_is_named(self, tmp_path, key, value):
        with pytest.raises(CheckpointError, match=rf"'gemma3\.{key}'"):
            gemma(tmp_path, **{key.replace(".", "__"): value})

    def test_a_factor_of_no_type(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"'gemma3\.rope\.scaling\.type'"):
            gemma(tmp_path, rope__scaling__factor=8.0)

    def test_rope_divisors(self, tmp_path):
        config, weights = original("gemma3")
        path = write(
            tmp_path / "x.gguf",
            "gemma3",
            weights,
            metadata("gemma3", config),
            extra={"rope_freqs.weight": np.ones(16, np.float32)},
        )
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            GGUFReader(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.key_length", 32),
        ("attention.sliding_window", 64),
        ("rope.scaling.type", "yarn"),
    ],
)
def test_qwen2_refuses_by_name(tmp_path, key, value):
    config, weights = original("qwen2")
    keys = metadata("qwen2", config) | {key: value}
    if key == "attention.key_length":
        keys["attention.value_length"] = value
    path = write(tmp_path / "x.gguf", "qwen2", weights, keys)
    with pytest.raises(CheckpointError, match=rf"'qwen2\.{key}'"):
        GGUFReader(path)


def test_a_mixture_goes_by_its_own_name(tmp_path):
    config, weights = original("qwen2")
    keys = metadata("qwen2", config)

    def named(**options):
        path = write(tmp_path / "x.gguf", "qwen2", weights, keys, **options)
        return GGUFReader(path).quantised_type

    q8 = GGMLQuantizationType.Q8_0
    assert named() is None and named(file_type=15) is None
    assert named(matrices=q8, file_type=15) == "Q4_K_M"
    for unsaid in (None, 1, 999):  # 1: F16, which these are not
        assert named(matrices=q8, file_type=unsaid) == "Q8_0"
