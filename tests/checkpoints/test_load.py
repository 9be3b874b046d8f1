"""Loading: parity with transformers, converted copies, every way to fail."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax.checkpoints.converted as converted
from specjax.checkpoints import CheckpointError, describe, load
from specjax.checkpoints.tokenizer_files import tokenizer_from_folder
from specjax.decoding.interfaces import FINAL
from specjax.decoding.windows import chunk_window
from specjax.models.build import WeightType

ORACLE = Path(__file__).parents[1] / "data/oracles/llama"

pytestmark = pytest.mark.usefixtures("cache")


def leaves_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_llama_oracle():
    """Logits and the residual stream after every block are transformers' own."""
    oracle = np.load(ORACLE / "oracle.npz")
    checkpoint = load(ORACLE, WeightType.FLOAT32)
    ids = jnp.asarray(oracle["input_ids"], jnp.int32)
    batch, length = ids.shape
    layers = len(checkpoint.config.blocks)
    starts = jnp.zeros(batch, jnp.int32)
    window = chunk_window(ids, starts, starts + length, length)
    state = checkpoint.decoder.init(batch, 64)
    wanted = oracle["hidden_states"]  # of prompt 0; the last one is after the norm
    blocks = tuple(range(layers))
    verdict = checkpoint.decoder.verify(state, window, taps=blocks, logits="all")
    np.testing.assert_allclose(verdict.logits, oracle["logits"], atol=5e-4, rtol=0)
    for tap in blocks:
        rows = verdict.features[tap][0]
        np.testing.assert_allclose(rows, wanted[tap], atol=5e-4, rtol=0)
    final = checkpoint.decoder.verify(state, window, taps=(FINAL,), logits="none")
    rows = final.features[FINAL][0]
    np.testing.assert_allclose(rows, wanted[layers], atol=5e-4, rtol=0)
    assert not verdict.bad.any()
    assert checkpoint.eos_ids == (2,)
    assert checkpoint.tokenizer is None
    assert checkpoint.source == "llama"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_weight_types(tiny, dtype):
    checkpoint = load(tiny.directory(tokenizer=True), WeightType(dtype))
    assert checkpoint.decoder.blocks[0].mixer.body.q.weight.dtype == dtype
    assert checkpoint.decoder.norm.weight.dtype == jnp.float32
    assert checkpoint.tokenizer is not None
    assert checkpoint.raw_config == tiny.config


def test_float64_is_not_cut_short(tiny):
    with pytest.raises(CheckpointError, match="jax_enable_x64"):
        load(tiny.directory(), WeightType.FLOAT64)


def test_directory_shards_and_gguf_give_the_same(tiny):
    weights = tiny.weights()
    one = load(tiny.directory(weights=weights)).decoder
    leaves_equal(one, load(tiny.sharded(weights)).decoder)
    leaves_equal(one, load(tiny.gguf(weights=weights)).decoder)


class TestDirectory:
    def fails(self, path, *said):
        with pytest.raises(CheckpointError) as caught:
            load(path)
        for part in said:
            assert part in str(caught.value)

    def test_nothing_there(self, tmp_path):
        self.fails(tmp_path / "nope", "there is no", "nope", "smollm2-135m")
        self.fails("smollm2-135M", "did you mean 'smollm2-135m'")

    def test_empty(self, tmp_path):
        self.fails(tmp_path, str(tmp_path), "is empty")

    def test_no_config(self, tiny):
        path = tiny.directory()
        (path / "config.json").unlink()
        self.fails(path, "has no config.json")
        (path / "x.gguf").touch()
        self.fails(path, "such as", "x.gguf")

    @pytest.mark.parametrize("text", ["", "{", "[]", "3"])
    def test_broken_config(self, tiny, text):
        path = tiny.directory()
        (path / "config.json").write_text(text)
        self.fails(path, str(path / "config.json"))

    def test_no_weights(self, tiny):
        path = tiny.directory()
        tiny.single(path).rename(path / "pytorch_model.bin")
        self.fails(path, "holds no weights", "pytorch_model.bin")

    @pytest.mark.parametrize("kind", ["lama", None, 3])
    def test_unknown_family(self, tiny, kind):
        config = {**tiny.config, "model_type": kind}
        path = tiny.directory(config=config)
        self.fails(path, repr(kind), "config.json", "llama")

    def test_a_field_that_is_not_implemented(self, tiny):
        path = tiny.directory(config={**tiny.config, "hidden_act": "gelu"})
        self.fails(path, "config.json", "'hidden_act'", "'gelu'")

    def test_heads_that_do_not_divide(self, tiny):
        path = tiny.directory(config={**tiny.config, "num_key_value_heads": 3})
        self.fails(path, "config.json", "num_key_value_heads")

    def test_fewer_layers_than_the_config_and_more(self, tiny):
        config = {**tiny.config, "num_hidden_layers": 3}
        self.fails(tiny.directory("a", config=config), "layers.2.", "is missing")
        config["num_hidden_layers"] = 1
        self.fails(tiny.directory("b", config=config), "layers.1.", "are of no use")

    def test_three_faults_three_messages(self, tiny):
        """Drop one tensor, rename one, add one: each says which."""
        weights = tiny.weights()
        name = "model.layers.0.mlp.down_proj.weight"
        dropped = {n: w for n, w in weights.items() if n != name}
        renamed = {**dropped, name.replace("down_proj", "down_projj"): weights[name]}
        added = {**weights, "model.extra.weight": np.ones(2, np.float32)}
        self.fails(tiny.directory("a", dropped), name, "missing")
        self.fails(tiny.directory("b", renamed), name, "did you mean", "down_projj")
        self.fails(tiny.directory("c", added), "'model.extra.weight'", "of no use")

    def test_a_transposed_matrix(self, tiny):
        weights = tiny.weights()
        name = "model.layers.0.mlp.down_proj.weight"
        weights[name] = np.ascontiguousarray(weights[name].T)
        self.fails(tiny.directory(weights=weights), name, "[96, 64]", "[64, 96]")

    def test_ids_beyond_the_vocabulary(self, tiny):
        path = tiny.directory("a", config={**tiny.config, "eos_token_id": 320})
        self.fails(path, "eos id 320", "vocabulary of 320")
        config = {**tiny.config, "vocab_size": 256}
        path = tiny.directory("b", tiny.weights(**config), config, tokenizer=True)
        self.fails(path, "the tokenizer has 266 ids", "256")

    @pytest.mark.parametrize("value", ["2", [1, "a"], True, -1, {"a": 1}])
    def test_eos_ids_that_are_none(self, tiny, value):
        path = tiny.directory(config={**tiny.config, "eos_token_id": value})
        self.fails(path, "config.json, eos_token_id", repr(value))


class TestConvertedCopy:
    def copies(self, cache):
        return sorted(cache.glob("converted/*/model.safetensors"))

    def test_second_load_reads_the_copy(self, tiny, cache, monkeypatch):
        path = tiny.gguf("Tiny-Q8.Q8_0.gguf", kinds=_all_q8(tiny))
        seen = []
        first = load(path, progress=lambda *step: seen.append(step))
        assert first.source == "Tiny-Q8, dequantised from Q8_0"
        assert first.path == path
        assert {what.split()[0] for what, _, _ in seen} == {"checking", "converting"}
        assert all(done <= total for _, done, total in seen)
        monkeypatch.setattr(converted, "write_copy", None)  # not called again
        monkeypatch.setattr(converted.GGUFReader, "__init__", None)
        second = load(path)
        leaves_equal(first.decoder, second.decoder)
        assert second.source == first.source and second.path == path
        assert second.eos_ids == first.eos_ids == (2,)
        assert second.tokenizer.tokens == first.tokenizer.tokens
        assert second.raw_config == first.raw_config
        assert len(self.copies(cache)) == 1

    def test_the_copy_is_what_the_file_dequantises_to(self, tiny):
        path = tiny.gguf(kinds=_all_q8(tiny))
        direct = load(path, tokenizer=False)  # makes no copy
        leaves_equal(direct.decoder, load(path).decoder)

    def test_without_its_tokenizer_nothing_is_kept(self, tiny, cache):
        path = tiny.gguf(metadata={"tokenizer.ggml.pre": "unheard-of"})
        with pytest.raises(CheckpointError, match="unheard-of"):
            load(path)
        assert load(path, tokenizer=False).tokenizer is None
        assert self.copies(cache) == []

    @pytest.mark.parametrize("damage", ["cut", "header", "manifest", "config", "gone"])
    def test_a_broken_copy_is_made_again(self, tiny, cache, caplog, damage):
        path = tiny.gguf()
        first = load(path)
        (copy,) = self.copies(cache)
        if damage == "cut":
            copy.write_bytes(copy.read_bytes()[:-4])
        elif damage == "header":
            copy.write_bytes(b"\xff" * copy.stat().st_size)
        elif damage == "manifest":
            (copy.parent / "specjax.json").write_text('{"size": 1')
        elif damage == "config":
            (copy.parent / "config.json").write_text("{}")
        else:
            (copy.parent / "tokenizer.json").unlink()
        with caplog.at_level(logging.WARNING):
            leaves_equal(first.decoder, load(path).decoder)
        assert "is broken, making it again" in caplog.text
        caplog.clear()
        load(path)
        assert caplog.text == ""

    def test_another_file_under_the_same_name(self, tiny):
        path = tiny.gguf()
        load(path)
        path.unlink()
        weights = tiny.weights(seed=1)
        tiny.gguf(weights=weights)
        found = np.asarray(load(path).decoder.embedding)
        np.testing.assert_array_equal(found, weights["model.embed_tokens.weight"])

    def test_too_large_a_copy_is_not_made(self, tiny, cache, caplog, monkeypatch):
        monkeypatch.setattr(converted, "LARGEST_COPY", 1000)
        path = tiny.gguf()
        assert load(path).tokenizer is not None
        assert self.copies(cache) == []
        assert "is not kept in converted form" in caplog.text

    def test_a_cache_that_cannot_be_written(self, tiny, cache, caplog):
        cache.write_text("a file where the folder should be")
        assert load(tiny.gguf()).eos_ids == (2,)
        assert "is not kept in converted form" in caplog.text

    def test_left_overs_of_a_killed_process_go(self, tiny, cache):
        path = tiny.gguf()
        stale = converted.copy_folder(path)
        stale = stale.with_name(f".{stale.name}.abcd")
        stale.mkdir(parents=True)
        (stale / "model.safetensors").write_bytes(b"half")
        load(path)
        assert not stale.exists()

    def test_two_processes_at_once(self, tiny, cache):
        path = tiny.gguf(kinds=_all_q8(tiny))
        code = f"from specjax.checkpoints import load; load({str(path)!r})"
        both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        assert [p.wait(120) for p in both] == [0, 0]
        assert len(self.copies(cache)) == 1
        assert not list(cache.glob("converted/.*"))

    def test_the_copy_is_a_hugging_face_directory(self, tiny, cache):
        path = tiny.gguf()
        first = load(path)
        folder = self.copies(cache)[0].parent
        leaves_equal(first.decoder, load(folder).decoder)
        assert tokenizer_from_folder(folder).template == first.tokenizer.template


def _all_q8(tiny):
    from gguf.constants import GGMLQuantizationType

    names = (n for n, w in tiny.weights().items() if w.ndim == 2)
    return dict.fromkeys(names, GGMLQuantizationType.Q8_0)


def test_a_gguf_file_that_lacks_a_tensor_is_named_and_leaves_no_copy(tiny, cache):
    weights = tiny.weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    path = tiny.gguf(weights=weights)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"up_proj.* missing from .*tiny\.gguf"
        ):
            load(path)
    assert not list(cache.glob("converted/*/*"))


class TestHub:
    def test_a_hub_id(self, tiny, monkeypatch):
        import huggingface_hub

        asked = {}
        folder = tiny.directory()

        def download(name, **options):
            asked.update(options, name=name)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        loaded = load("org/tiny-model")
        assert (loaded.path, loaded.source) == (folder, "org/tiny-model")
        assert asked["name"] == "org/tiny-model"
        assert "*.safetensors" in asked["allow_patterns"]
        assert not any(re.search("bin|pth|pt$|py$", p) for p in asked["allow_patterns"])

    def test_offline_says_what_to_do(self, monkeypatch):
        import huggingface_hub

        def download(name, **options):
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(
            CheckpointError, match=r"'org/x' is no local path.*go online"
        ):
            load("org/x")


@pytest.mark.network
class TestSmolLM2:
    """The real model; the cache is the user's own, so that it is fetched once."""

    @pytest.fixture(autouse=True)
    def _real_cache(self, monkeypatch, cache):
        monkeypatch.delenv("SPECJAX_CACHE")

    @pytest.fixture
    def checkpoint(self):
        try:
            return load("smollm2-135m", WeightType.FLOAT32)
        except CheckpointError as error:
            if "could not be downloaded" not in str(error):
                raise
            pytest.skip(f"SmolLM2 cannot be had: {error}")

    def test_tokenizer_is_llama_cpps(self, checkpoint):
        data = Path(__file__).parents[1] / "data/smollm2_tokenizer.json"
        texts = json.loads(data.read_text("utf-8"))["texts"]
        assert len(texts) > 50
        for record in texts:
            assert checkpoint.tokenizer.encode(record["text"]) == record["ids"]

    def test_what_it_is(self, checkpoint):
        assert checkpoint.source == "SmolLM2-135M-Instruct, dequantised from Q4_1"
        assert checkpoint.eos_ids == (2,)
        assert len(checkpoint.config.blocks) == 30
        text = checkpoint.tokenizer.render(["Hi"])
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    def test_it_knows_a_capital(self, checkpoint):
        ids = jnp.asarray([checkpoint.tokenizer.encode("The capital of France is")])
        zero, width = jnp.zeros(1, jnp.int32), ids.shape[1]
        window = chunk_window(ids, zero, zero + width, width)
        logits = checkpoint.decoder.verify(
            checkpoint.decoder.init(1, 16), window
        ).logits
        assert checkpoint.tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"


@pytest.mark.parametrize("value", ["x", [1, "a"], 3.5, True, {"a": -1}], ids=repr)
def test_no_field_of_a_config_may_be_anything(tiny, value):
    """A wrong value loads (where it means nothing) or is refused by the one error."""
    path = tiny.directory(tokenizer=True)
    more = {"head_dim": 16, "rope_scaling": None, "rope_parameters": None}
    config = {**tiny.config, **more, "text_config": None}
    for field in config:
        tiny.write(path / "config.json", {**config, field: value})
        _loads_or_refuses(path)
    tiny.write(path / "config.json", config)
    for field in ("bos_token", "eos_token", "add_bos_token", "chat_template"):
        tiny.write(path / "tokenizer_config.json", {field: value})
        _loads_or_refuses(path)


@pytest.mark.parametrize("value", ["x", 3.5, 10**6, ["a"]], ids=repr)
def test_no_key_of_a_gguf_file_may_be_anything(tiny, value):
    for key in [k for k in tiny.metadata() if k != "general.architecture"]:
        path = tiny.gguf(metadata={key: value})
        _loads_or_refuses(path)
        path.unlink()


def _loads_or_refuses(path):
    said = path.name
    try:
        checkpoint = load(path)
        describe(path)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.chat(["hello"])
    except CheckpointError as error:
        said = str(error)
    assert path.name in said
