"""``specjax inspect`` and ``specjax zoo``."""

import json
from pathlib import Path

import pytest

from specjax.checkpoints import zoo


@pytest.fixture
def oracles() -> Path:
    return Path(__file__).resolve().parents[1] / "data/oracles"


def test_inspect_prints_a_table(run, model):
    result = run("inspect", model)
    assert result.status == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert ["family", "llama"] in lines
    assert ["layers", "by", "mixer", "1", "attention"] in lines
    assert ["tied", "yes"] in lines
    assert ["mtp", "tensors", "0"] in lines
    assert ["has", "tokenizer", "yes"] in lines


def test_inspect_prints_json(run, model):
    result = run("inspect", model, "--json")
    assert result.status == 0
    described = json.loads(result.out)
    assert described["family"] == "llama" and described["implemented"] is True
    assert described["layers_by_mixer"] == {"attention": 1}
    assert "tensors" not in described
    listed = json.loads(run("inspect", model, "--json", "--tensors").out)["tensors"]
    assert len(listed) == described["num_tensors"]
    assert {"name", "dtype", "shape"} == set(listed[0])


def test_inspect_says_what_a_pass_needs_beside_recurrent_states(run, oracles):
    result = run("inspect", oracles / "nemotron_h", "--window", 4)
    assert result.status == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert "for a pass of 4 rows" in result.out
    header = ["mixer", "layers", "matrix", "snapshot", "replay", "ring"]
    numbers = lines[lines.index(header) + 1]
    assert numbers[:2] == ["mamba2", "3"]
    matrix, snapshot = (int(n.replace(",", "")) for n in numbers[2:4])
    assert snapshot == 4 * matrix
    told = json.loads(run("inspect", oracles / "nemotron_h", "--json").out)
    assert told["scratch_bytes"][0]["window"] == 9
    assert run("inspect", oracles / "nemotron_h", "--window", 0).status == 2


def test_inspect_lists_the_tensors_of_a_family_that_is_not_implemented(
    run, model, tmp_path
):
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "odd"}))
    result = run("inspect", tmp_path)
    assert result.status == 0
    assert "not implemented" in result.out
    assert "model.embed_tokens.weight" in result.out and "256 × 64" in result.out


@pytest.mark.parametrize("arguments", [[], ["list"]])
def test_zoo_lists(run, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    result = run("zoo", *arguments)
    assert result.status == 0
    line = next(x for x in result.out.splitlines() if x.startswith("smollm2-135m"))
    assert "98 MB" in line and "Apache-2.0" in line and " no " in line


def test_zoo_fetches(run, tmp_path, monkeypatch):
    asked = []

    def fetch(name, progress):
        asked.append(name)
        return tmp_path / "weights.gguf"

    monkeypatch.setattr(zoo, "fetch", fetch)
    result = run("zoo", "fetch", "smollm2-135m")
    assert result.status == 0
    assert asked == ["smollm2-135m"]
    assert result.out.strip() == str(tmp_path / "weights.gguf")
