"""Safetensors files: what is read, and what is refused and how."""

import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from specjax.checkpoints import CheckpointError
from specjax.checkpoints.safetensors import SafetensorsReader


def rewrite_header(path, change):
    """Replace a file's header by what ``change`` makes of it, the data untouched."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(json.loads(raw[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_reads_every_tensor_bit_by_bit(tiny, bfloat16, dtype):
    weights = tiny.weights(dtype=bfloat16 if dtype == "bfloat16" else dtype)
    weights["model.norm.weight"][:2] = np.nan, np.inf  # values are nobody's business
    reader = SafetensorsReader(tiny.directory(weights=weights))
    for name, wanted in weights.items():
        found = reader.read(name, wanted.shape)
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()
    reader.finish()


def test_reads_shards(tiny):
    weights = tiny.weights()
    reader = SafetensorsReader(tiny.sharded(weights))
    assert len(reader.files) == 2
    for name, wanted in weights.items():
        np.testing.assert_array_equal(reader.read(name, wanted.shape), wanted)
    reader.finish()


def test_a_tensor_outlives_the_file(tiny):
    """Nothing read may change when the file is written again."""
    path = tiny.directory()
    import jax.numpy as jnp

    reader = SafetensorsReader(path)
    arrays = {n: jnp.asarray(reader.read(n, i.shape)) for n, i in reader.infos.items()}
    file = tiny.single(path)
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    for name, wanted in tiny.weights().items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), wanted)


def test_missing_names_the_tensor_the_file_and_its_like(tiny):
    path = tiny.directory()
    reader = SafetensorsReader(path)
    with pytest.raises(CheckpointError) as caught:
        reader.read("model.layers.0.self_attention.q_proj.weight", (64, 64))
    message = str(caught.value)
    assert "self_attention.q_proj.weight' is missing" in message
    assert str(path) in message
    assert "did you mean 'model.layers.0.self_attn.q_proj.weight'" in message


def test_a_missing_head_says_how_to_tie_it(tiny):
    reader = SafetensorsReader(tiny.directory())
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to true"):
        reader.read("lm_head.weight", (320, 64))


def test_another_shape(tiny):
    reader = SafetensorsReader(tiny.directory())
    with pytest.raises(CheckpointError, match=r"shape \[96, 64\].*asks for \[64, 96\]"):
        reader.read("model.layers.0.mlp.gate_proj.weight", (64, 96))


def test_integers_are_no_weights(tiny):
    weights = tiny.weights()
    weights["model.norm.weight"] = np.ones(64, np.int32)
    reader = SafetensorsReader(tiny.directory(weights=weights))
    with pytest.raises(CheckpointError) as caught:
        reader.read("model.norm.weight", (64,))
    assert "'model.norm.weight'" in str(caught.value)
    assert "model.safetensors is stored as I32" in str(caught.value)


def test_left_over_tensors_are_named(tiny):
    path = tiny.directory(weights={**tiny.weights(), "odd.one": np.zeros(3)})
    reader = SafetensorsReader(path)
    for name, array in tiny.weights().items():
        reader.read(name, array.shape)
    with pytest.raises(CheckpointError, match=r"1 tensors.*'odd.one' \(model.safe"):
        reader.finish()
    reader.finish(ignore=(r"odd\..*",))


def test_harmless_left_overs(tiny):
    weights = tiny.weights()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": weights["model.embed_tokens.weight"].copy(),
    }
    reader = SafetensorsReader(tiny.directory(weights={**weights, **extra}))
    for name, array in weights.items():
        reader.read(name, array.shape)
    reader.finish()


def test_a_tied_head_that_differs(tiny):
    weights = tiny.weights()
    head = weights["model.embed_tokens.weight"].copy()
    head[-1, -1] = np.nextafter(head[-1, -1], np.float32(9))
    path = tiny.directory(weights={**weights, "lm_head.weight": head})
    reader = SafetensorsReader(path)
    for name, array in weights.items():
        reader.read(name, array.shape)
    with pytest.raises(CheckpointError, match=r"differs from .*tie_word_embeddings"):
        reader.finish()


def _absurd_length(path):
    raw = path.read_bytes()
    path.write_bytes((1 << 62).to_bytes(8, "little") + raw[8:])


def _offsets_beyond(header):
    header["model.norm.weight"]["data_offsets"] = [0, 1 << 40]
    return header


def _too_few_bytes(header):
    header["model.norm.weight"]["shape"] = [63]
    return header


DAMAGE = {
    "empty": lambda p: p.write_bytes(b""),
    "four bytes": lambda p: p.write_bytes(b"abcd"),
    "cut in the header": lambda p: p.write_bytes(p.read_bytes()[:100]),
    "cut in the data": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "one byte more": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "absurd header length": _absurd_length,
    "no JSON": lambda p: rewrite_header(p, lambda h: b"{" * 50),
    "deep JSON": lambda p: rewrite_header(p, lambda h: b"[" * 100_000),
    "no object": lambda p: rewrite_header(p, lambda h: b"[1, 2]"),
    "no entries": lambda p: rewrite_header(p, lambda h: {"a": 3}),
    "offsets beyond the file": lambda p: rewrite_header(p, _offsets_beyond),
    "bytes that do not fit": lambda p: rewrite_header(p, _too_few_bytes),
    "a hole": lambda p: rewrite_header(p, lambda h: dict(list(h.items())[1:])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(tiny, damage):
    path = tiny.directory()
    DAMAGE[damage](tiny.single(path))
    with pytest.raises(CheckpointError, match=re.escape(str(tiny.single(path)))):
        SafetensorsReader(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), byte=st.integers(0, 255))
def test_any_byte_of_a_header_may_be_wrong(tiny, at, byte):
    """It loads as something or is refused; nothing else may happen."""
    path = tiny.folder / "fuzzed.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)}, path)
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] = byte
    path.write_bytes(raw)
    try:
        reader = SafetensorsReader(path)
    except CheckpointError:
        return
    for name, info in reader.infos.items():
        if info.dtype in reader.readable:
            assert reader.read(name, info.shape).shape == info.shape


class TestIndex:
    def change(self, path, change):
        index = path / "model.safetensors.index.json"
        value = json.loads(index.read_text())
        change(value["weight_map"])
        index.write_text(json.dumps(value))

    def test_a_shard_that_is_absent(self, tiny):
        path = tiny.sharded()
        (path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match="1 shards that are not there: model"):
            SafetensorsReader(path)

    def test_a_tensor_that_the_shard_lacks(self, tiny):
        path = tiny.sharded()
        shard = "model-00001-of-00002.safetensors"
        self.change(path, lambda m: m.update({"ghost": shard}))
        with pytest.raises(
            CheckpointError, match=f"'ghost' into {shard}, but it is no"
        ):
            SafetensorsReader(path)

    def test_a_tensor_in_another_shard(self, tiny):
        path = tiny.sharded()
        second = "model-00002-of-00002.safetensors"
        self.change(path, lambda m: m.update({"model.embed_tokens.weight": second}))
        with pytest.raises(CheckpointError, match="but it is in model-00001"):
            SafetensorsReader(path)

    def test_a_tensor_that_is_not_listed(self, tiny):
        path = tiny.sharded()
        self.change(path, lambda m: m.pop("model.norm.weight"))
        with pytest.raises(CheckpointError, match=r"norm.weight' in .* not listed"):
            SafetensorsReader(path)

    def test_a_shard_outside_the_folder(self, tiny):
        path = tiny.sharded()
        self.change(path, lambda m: m.update({"x": "../secret.safetensors"}))
        with pytest.raises(CheckpointError, match="no file name"):
            SafetensorsReader(path)

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}'])
    def test_a_broken_index(self, tiny, text):
        path = tiny.sharded()
        (path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            SafetensorsReader(path)

    def test_file_and_index_at_once(self, tiny):
        path = tiny.sharded()
        save_file(tiny.weights(), tiny.single(path))
        with pytest.raises(CheckpointError, match="remove the one that is stale"):
            SafetensorsReader(path)
