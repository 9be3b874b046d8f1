"""Converted weights: kept once, and read back bit for bit or not at all."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checkpoints import CheckpointError, load
from specjax.checkpoints.orbax import load_parameters, save_parameters
from specjax.checkpoints.orbax.sums import write_sums
from specjax.models.build import WeightType

ORACLES = Path(__file__).resolve().parent.parent / "data/oracles"
DTYPES = [WeightType.FLOAT32, WeightType.BFLOAT16, WeightType.INT8]


def same_bits(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def kept(tiny, tmp_path):
    """A tiny llama with a tokenizer, as bfloat16."""
    source = tiny.directory(tokenizer=True)
    checkpoint = load(source, WeightType.BFLOAT16)
    folder = tmp_path / "kept"
    save_parameters(checkpoint, folder)
    return folder, checkpoint


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_reload_is_equal_bit_for_bit(tiny, tmp_path, dtype, tied):
    config = tiny.config | {"tie_word_embeddings": tied}
    weights = tiny.weights(tie_word_embeddings=tied)
    source = tiny.directory(weights=weights, config=config)
    expected = load(source, dtype)
    save_parameters(expected, tmp_path / "kept")
    found = load_parameters(tmp_path / "kept")
    same_bits(found.decoder, expected.decoder)
    assert found.config == expected.config
    assert found.raw_config == expected.raw_config
    # what was one array is one again, in memory and on disk
    shared = tied and dtype is not WeightType.INT8
    assert (found.decoder.head.weight is found.decoder.embedding) == shared
    about = json.loads((tmp_path / "kept" / "parameters.json").read_text())
    assert ("head.weight" in about["leaves"]) != shared


def test_load_takes_such_a_folder_for_a_model(kept):
    folder, expected = kept
    found = load(folder, WeightType.BFLOAT16)
    same_bits(found.decoder, expected.decoder)
    assert (found.source, found.path) == (expected.source, folder)
    assert found.eos_ids == expected.eos_ids
    text = "hello <tool> a"
    assert found.tokenizer.encode(text) == expected.tokenizer.encode(text)
    assert found.tokenizer.chat([text]) == expected.tokenizer.chat([text])
    assert load(folder, WeightType.BFLOAT16, tokenizer=False).tokenizer is None


def test_another_weight_type_is_an_error(kept):
    folder, _ = kept
    with pytest.raises(CheckpointError, match="holds bfloat16 weights, not float32"):
        load(folder)


def reseal(folder: Path) -> None:
    """Sums that fit: somebody, or a later version, meant the change."""
    (folder / "sums.json").unlink()
    write_sums(folder)


def test_another_configuration_is_an_error_that_names_the_field(kept):
    folder, _ = kept
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 1e-6
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"damaged: .*config\.json"):
        load_parameters(folder)
    reseal(folder)
    said = r"converted with norm_eps = 1e-05, config\.json says 1e-06: convert"
    with pytest.raises(CheckpointError, match=said):
        load_parameters(folder)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("specjax.models.norms:RMSNorm", "specjax.models.norms:Gone", "no class"),
        ("specjax.models.norms:RMSNorm", "os:system", "no class os:system here"),
        ('"eps"', '"epsilon"', "has other fields now (eps, epsilon)"),
    ],
)
def test_a_decoder_of_another_version_is_refused(kept, old, new, said):
    folder, _ = kept
    file = folder / "parameters.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    reseal(folder)
    with pytest.raises(CheckpointError, match="convert the model again") as error:
        load_parameters(folder)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        # recurrent layers, attention, experts and a shared one with a gate
        ("qwen3_5_moe", WeightType.BFLOAT16),
        *(
            pytest.param(path.name, dtype, marks=pytest.mark.full)
            for path in sorted(ORACLES.iterdir())
            for dtype in DTYPES
        ),
    ],
)
def test_decoders_of_every_family(tmp_path, family, dtype):
    expected = load(ORACLES / family, dtype)
    save_parameters(expected, tmp_path / "kept")
    found = load(tmp_path / "kept", dtype)
    same_bits(found.decoder, expected.decoder)
    assert found.config == expected.config


@pytest.mark.parametrize("kind", ["missing", "truncated", "changed"])
def test_damage_is_an_error_that_names_the_file(kept, kind):
    folder, _ = kept
    file = max((folder / "arrays").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name}.*convert the model again"):
        load_parameters(folder)


def test_nothing_is_overwritten_and_other_formats_are_refused(kept):
    folder, checkpoint = kept
    with pytest.raises(CheckpointError, match="exists: name a new folder"):
        save_parameters(checkpoint, folder)
    (folder / "parameters.json").write_text('{"format": 0}')
    with pytest.raises(CheckpointError, match="format 0"):
        load_parameters(folder)


def test_a_decoder_that_was_changed_is_refused(kept):
    folder, checkpoint = kept
    config = dataclasses.replace(checkpoint.config, embedding_scale=2.0)
    changed = dataclasses.replace(
        checkpoint, decoder=checkpoint.decoder.replace(config=config)
    )
    with pytest.raises(CheckpointError, match="changed after it was loaded"):
        save_parameters(changed, folder.parent / "other")


def test_a_folder_appears_whole_or_not_at_all(kept, monkeypatch):
    folder, checkpoint = kept
    parameters = sys.modules["specjax.checkpoints.orbax.parameters"]

    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(parameters, "write_sums", full)
    with pytest.raises(OSError, match="No space"):
        save_parameters(checkpoint, folder.parent / "other")
    assert sorted(p.name for p in folder.parent.iterdir()) == ["kept", "tiny"]
