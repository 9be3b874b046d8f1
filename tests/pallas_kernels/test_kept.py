"""Files of kernels' figures, and what is held to them."""

import json

import pytest

from pallas_kernels import compat
from pallas_kernels.aot import bundles, cuda, registers
from pallas_kernels.aot.case import all_cases
from pallas_kernels.aot.kept import ACCEPT, Kept


@pytest.fixture
def kept(tmp_path):
    """Of two numbers: the first may not change, the second grow by two."""
    file = Kept(
        tmp_path / "kept.json",
        "compiler",
        ("calls", "bytes"),
        lambda old: [(old[0], old[0]), (0, old[1] + 2)],
    )
    file.write("1.0", {"b": (1, 20), "a": (2, 10)}, whole=True)
    return file


def test_what_is_written_is_read(kept):
    assert kept.made_by() == "1.0"
    assert kept.figures() == {"a": (2, 10), "b": (1, 20)}
    assert kept.file.read_text().splitlines()[2:4] == [
        '  "a": [2, 10],',
        '  "b": [1, 20]',
    ]


def test_what_is_out_of_bounds_is_told_and_how_to_accept_it(kept):
    assert kept.told("a", (2, 12)) == [] and kept.told("a", (2, 0)) == []
    assert kept.told("a", (1, 13)) == [
        f"1 calls, were 2: {ACCEPT}",
        f"13 bytes, were 10: {ACCEPT}",
    ]
    assert "--write" in ACCEPT
    assert kept.told("c", (1, 1)) == ["not in kept.json: --write adds it"]


def test_changes_have_names_and_only_a_whole_may_miss_none(kept):
    now = {"a": (2, 13), "c": (1, 1)}
    some = kept.changes(now, whole=False)
    assert [told.split(":")[0] for told in some] == ["a", "c"]
    gone, *rest = kept.changes(now, whole=True)
    assert gone.startswith("b: no longer there") and rest == some
    assert kept.changes(kept.figures(), whole=True) == []


def test_a_whole_replaces_and_a_part_is_added(kept):
    kept.write("1.0", {"b": (1, 1), "c": (3, 3)}, whole=False)
    assert kept.figures() == {"a": (2, 10), "b": (1, 1), "c": (3, 3)}
    kept.write("2.0", {"c": (3, 3)}, whole=True)
    assert (kept.made_by(), kept.figures()) == ("2.0", {"c": (3, 3)})


def test_figures_of_two_compilers_are_not_mixed(kept):
    before = kept.file.read_bytes()
    with pytest.raises(
        ValueError, match=r"is of compiler 1\.0, this is 2\.0; write all"
    ):
        kept.write("2.0", {"c": (3, 3)}, whole=False)
    assert kept.file.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"compiler": "1.0"}',
        '{"compiler": "1.0", "figures": []}',
        '{"compiler": "1.0", "figures": {"a": [1]}}',
        '{"compiler": "1.0", "figures": {"a": [1, "x"]}}',
        '{"compiler": "1.0", "figures": {"a": 3}}',
        "<<<<<<< HEAD",
    ],
)
def test_a_damaged_file_is_named_and_what_to_do(kept, text):
    kept.file.write_text(text)
    with pytest.raises(ValueError, match=r"kept\.json is damaged .*take it from git"):
        kept.told("a", (1, 1))


def test_registers_are_kept_of_every_program_for_a_gpu_and_of_no_other():
    programs = {f"{case.operation}/{case.name}" for case in all_cases("cuda")}
    kept = set(registers.KEPT.figures())
    older = compat.VERSION < (0, 12)  # which leaves wide latents to the reference
    assert programs < kept if older else programs == kept


@pytest.mark.parametrize(
    "file", [bundles.KEPT, registers.KEPT], ids=lambda x: x.compiler
)
def test_the_files_that_are_kept_are_as_they_would_be_written(file, tmp_path):
    copy = Kept(tmp_path / "copy.json", file.compiler, file.words, file.bounds)
    copy.write(file.made_by(), file.figures(), whole=True)
    assert copy.file.read_text() == file.file.read_text()
    assert set(json.loads(copy.file.read_text())) == {file.compiler, "figures"}
    assert all(len(row) == len(file.words) for row in file.figures().values())
    assert file.changes(file.figures(), whole=True) == []


def test_a_tenth_more_registers_or_shared_memory_is_told(tmp_path, monkeypatch):
    kept = Kept(tmp_path / "k.json", "jax", registers.KEPT.words, registers.KEPT.bounds)
    monkeypatch.setattr(registers.jax, "__version__", "1")
    found = {"a": cuda.Resources(100, 0, 1000), "b": cuda.Resources(50, 0, None)}
    registers.write(found, whole=True, kept=kept)
    assert kept.figures() == {"a": (100, 1000), "b": (50, 0)}
    assert registers.grown("a", cuda.Resources(110, 0, 900), kept) == []
    registers_told, shared_told = registers.grown(
        "a", cuda.Resources(111, 0, 1101), kept
    )
    assert "111 registers, were 100" in registers_told
    assert "1101 bytes of shared memory, were 1000" in shared_told
    assert "not in k.json" in registers.grown("c", cuda.Resources(1, 0, 1), kept)[0]
    monkeypatch.setattr(registers.jax, "__version__", "2")  # whose code is another
    assert registers.grown("a", cuda.Resources(255, 0, 9000), kept) == []


def test_a_tenth_of_the_bundles_either_way_is_told():
    def told(old: bundles.Figures, new: bundles.Figures) -> list[str]:
        bounds = bundles.KEPT.bounds(old)
        return [
            word
            for word, n, (least, most) in zip(
                bundles.KEPT.words, new, bounds, strict=True
            )
            if not least <= n <= most
        ]

    old = bundles.Figures(kernels=1, bundles=1000, spills=10)
    for near in (old, (1, 1100, 110), (1, 900, 0)):
        assert told(old, bundles.Figures(*near)) == []
    assert told(old, bundles.Figures(1, 1101, 10)) == ["bundles"]
    assert told(old, bundles.Figures(1, 899, 10)) == ["bundles"]
    assert told(old, bundles.Figures(2, 1000, 111)) == ["kernels", "spills"]
