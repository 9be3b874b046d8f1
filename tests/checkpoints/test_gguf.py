"""GGUF files: header, types, layout, and what is refused and how."""

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax.checkpoints import CheckpointError
from specjax.checkpoints.gguf import GGUFReader
from specjax.checkpoints.gguf_header import read_gguf_header
from specjax.checkpoints.gguf_names import ARCHITECTURES, FAMILIES_ELSEWHERE
from specjax.checkpoints.safetensors import SafetensorsReader
from specjax.models.build import Builder, WeightType
from specjax.models.families import FAMILIES, llama
from specjax.models.families.fields import ConfigError


def build(reader):
    config = llama.config(reader.config)
    decoder = llama.build(config, Builder(reader, WeightType.FLOAT32))
    reader.finish()
    return decoder


def test_header_is_what_the_gguf_package_reads(tiny):
    path = tiny.gguf(kinds={"model.layers.0.mlp.up_proj.weight": Kind.Q8_0})
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {
        key: field.contents()
        for key, field in theirs.fields.items()
        if not key.startswith("GGUF.")
    }
    assert ours.metadata == fields
    assert len(ours.tensors) == len(theirs.tensors) > 10
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert info.dtype == tensor.tensor_type.name
        assert info.nbytes == tensor.n_bytes
        assert ours.offsets[tensor.name] == tensor.data_offset


def test_same_decoder_as_from_a_directory(tiny):
    """Names, shapes and above all the row order of q and k."""
    import jax

    weights = tiny.weights()
    ours = build(GGUFReader(tiny.gguf(weights=weights)))
    reader = SafetensorsReader(tiny.directory(weights=weights))
    theirs = llama.build(llama.config(tiny.config), Builder(reader, WeightType.FLOAT32))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=str
)
def test_quantised_types(tiny, kind):
    name = "model.layers.1.self_attn.v_proj.weight"
    wanted = tiny.weights()[name]
    reader = GGUFReader(tiny.gguf(kinds={name: kind}))
    found = reader.read(name, wanted.shape)
    assert found.dtype == np.float32
    # q bits over the range of a block of normal numbers
    assert np.abs(found - wanted).max() < {"Q8": 0.04, "Q5": 0.3}.get(kind.name[:2], 1)


def test_q4_k_and_a_rotated_quantised_tensor(tiny):
    """Rows are permuted after they are made float, whatever they were stored as."""
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = tiny.weights(hidden_size=256)
    metadata = {
        "llama.embedding_length": 256,
        "llama.attention.head_count": 4,
        "llama.rope.dimension_count": 64,
    }
    path = tiny.gguf(weights=weights, kinds={name: Kind.Q4_K}, metadata=metadata)
    stored = next(
        t for t in gguf.GGUFReader(path).tensors if t.name.endswith("attn_q.weight")
    )
    rows = gguf.dequantize(stored.data, Kind.Q4_K)
    found = GGUFReader(path).read(name, (256, 256))
    for head in range(4):
        for i in range(32):
            first, second = head * 64 + 2 * i, head * 64 + 2 * i + 1
            np.testing.assert_array_equal(found[head * 64 + i], rows[first])
            np.testing.assert_array_equal(found[head * 64 + 32 + i], rows[second])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_float_types_are_kept(tiny, bfloat16, kind):
    dtype = bfloat16 if kind == "bfloat16" else np.dtype(np.float16)
    name = "model.embed_tokens.weight"
    weights = tiny.weights()
    wanted = weights[name] = weights[name].astype(dtype)
    stored = {}
    if kind == "bfloat16":
        weights[name] = wanted.astype(np.float32)
        stored = {name: Kind.BF16}
    found = GGUFReader(tiny.gguf(weights=weights, kinds=stored)).read(name, (320, 64))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wanted)


def test_config_is_the_one_of_the_directory(tiny):
    config = GGUFReader(tiny.gguf()).config
    assert {k: config[k] for k in tiny.config} == tiny.config
    assert llama.config(config) == llama.config(tiny.config)


def test_untied_head_and_explicit_head_dim(tiny):
    weights = tiny.weights(tie_word_embeddings=False, head_dim=32)
    metadata = {
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
    }
    reader = GGUFReader(tiny.gguf(weights=weights, metadata=metadata))
    assert reader.config["tie_word_embeddings"] is False
    assert reader.config["head_dim"] == 32
    head = np.asarray(build(reader).head.weight)
    np.testing.assert_array_equal(head, weights["lm_head.weight"])


def llama3_divisors(factor):
    """As llama.cpp's converter writes them, in its own words."""
    low, high, length, dim = 1.0, 4.0, 8192, 16
    freqs = 1.0 / (10000.0 ** (np.arange(0, dim, 2, dtype=np.float32) / dim))
    factors = []
    for freq in freqs:
        wavelen = 2 * np.pi / freq
        if wavelen < length / high:
            factors.append(1)
        elif wavelen > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelen - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_divisors_become_a_llama3_scaling(tiny, factor):
    divisors = llama3_divisors(factor)
    path = tiny.gguf(extra={"rope_freqs.weight": divisors})
    reader = GGUFReader(path)
    build(reader)  # the divisors are used, not left over
    rope = llama.config(reader.config).blocks[0].mixer.rope
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(rope.frequencies(), plain / divisors, rtol=1e-5)


def test_rope_divisors_of_one_do_nothing(tiny):
    path = tiny.gguf(extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert GGUFReader(path).config["rope_scaling"] is None


def test_other_rope_divisors_are_refused(tiny):
    divisors = np.linspace(1, 7, 8, dtype=np.float32)
    path = tiny.gguf(extra={"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*llama3"):
        GGUFReader(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 2.0),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 64),
        ("llama.logit_scale", 0.5),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.head_count", None),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.vocab_size", 321),
        ("llama.block_count", 0),
    ],
)
def test_metadata_that_changes_the_maths_is_refused(tiny, key, value):
    path = tiny.gguf(metadata={key: value})
    with pytest.raises(CheckpointError) as caught:
        GGUFReader(path)
    assert f"'{key}'" in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "family"), [("glm4moe", "glm4_moe"), ("qwen35moe", "qwen3_5_moe")]
)
def test_files_of_families_that_have_mtp_layers_name_the_way(tiny, arch, family):
    extra = {"blk.2.nextn.eh_proj.weight": np.zeros((4, 8), np.float32)}
    with pytest.raises(CheckpointError, match=f"{arch!r}.*{family!r}.*MTP layers"):
        GGUFReader(tiny.gguf(arch=arch, extra=extra))
    with pytest.raises(CheckpointError) as caught:
        GGUFReader(tiny.gguf(arch=arch))
    assert family in str(caught.value) and "MTP" not in str(caught.value)


def test_every_family_with_mtp_layers_is_named():
    told = {name for names in FAMILIES_ELSEWHERE.values() for name in names}
    assert told <= set(FAMILIES) and not set(FAMILIES_ELSEWHERE) & set(ARCHITECTURES)
    # text_config's name is never that of a whole checkpoint's file
    ahead = {name.removesuffix("_text") for name, each in FAMILIES.items() if each.mtp}
    assert ahead <= told


def test_an_unknown_architecture(tiny):
    path = tiny.gguf(arch="mamba")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf .*'mamba'.*known: llama"):
        GGUFReader(path)


def test_an_unknown_tensor_is_left_over(tiny):
    path = tiny.gguf(extra={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q_norm\.weight'"):
        build(GGUFReader(path))


def test_a_missing_tensor(tiny):
    weights = tiny.weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    path = tiny.gguf(weights=weights)
    with pytest.raises(CheckpointError, match=r"1\.mlp\.up_proj.* missing from .*gguf"):
        build(GGUFReader(path))


def test_integers_are_no_weights(tiny):
    weights = {**tiny.weights(), "model.norm.weight": np.ones(64, np.int32)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*stored as I32"):
        build(GGUFReader(tiny.gguf(weights=weights)))


def test_a_part_of_a_split_file(tiny):
    with pytest.raises(CheckpointError, match=r"merge the parts"):
        GGUFReader(tiny.gguf(metadata={"split.count": 3}))


class TestDamage:
    def test_no_gguf(self, tmp_path):
        path = tmp_path / "x.gguf"
        for content, said in [(b"", "is empty"), (b"PK\x03\x04" * 9, "no GGUF file")]:
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match=f"x.gguf {said}|{said}"):
                read_gguf_header(path)

    def test_absent(self, tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf_header(tmp_path / "x.gguf")

    @pytest.mark.parametrize("version", [1, 4, 0x03000000])
    def test_other_versions(self, tiny, version):
        path = tiny.gguf()
        raw = bytearray(path.read_bytes())
        raw[4:8] = version.to_bytes(4, "little")
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"version|big-endian"):
            read_gguf_header(path)

    @pytest.mark.parametrize("at", [8, 16])
    def test_absurd_counts_end_at_once(self, tiny, at):
        path = tiny.gguf()
        raw = bytearray(path.read_bytes())
        raw[at : at + 8] = b"\xff" * 7 + b"\x7f"
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match="truncated or corrupt"):
            read_gguf_header(path)

    def test_cut_anywhere(self, tiny):
        path = tiny.gguf()
        raw = path.read_bytes()
        end = read_gguf_header(path).offsets["output_norm.weight"]
        for length in [*range(1, 400, 7), *range(400, end, 997), len(raw) - 64]:
            path.write_bytes(raw[:length])
            with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
                read_gguf_header(path)

    @settings(
        max_examples=200,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data())
    def test_any_byte_may_be_wrong(self, tiny, data):
        """It reads as something or is refused; nothing else may happen."""
        path = tiny.folder / "fuzzed.gguf"
        if not path.exists():
            tiny.gguf("fuzzed.gguf")
            type(self).raw = path.read_bytes()
            type(self).end = min(read_gguf_header(path).offsets.values())
        raw = bytearray(self.raw)
        raw[data.draw(st.integers(0, self.end - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        try:
            reader = GGUFReader(path)
            build(reader)
        except (CheckpointError, ConfigError):  # load makes the former of the latter
            pass
