"""``specjax generate --checkpoint`` and ``--resume``, and ``specjax convert``."""

import json
import shutil

import pytest

PROMPT = "abcabcabcabc"

OPTIONS = ("--prompt", PROMPT, "--k", 4, "--max-tokens", 40, "--ignore-eos")
OPTIONS += ("--temperature", 0.8, "--seed", 3, "--logprobs", 1)

TIMES = {"prefill_seconds", "seconds", "tokens_per_second"}


def without_times(line: dict) -> dict:
    kept = {n: v for n, v in line["stats"].items() if n not in TIMES}
    return line | {"stats": kept}


@pytest.fixture
def generate(run, model):
    def generate(*more):
        return run("generate", "--model", model, *more)

    return generate


@pytest.fixture
def begun(generate, tmp_path):
    """A run that was kept, less its last step; and what it gave."""
    folder = tmp_path / "kept"
    text = generate(*OPTIONS, "--json").json["text"]
    options = (*OPTIONS, "--stop", text[25:28], "--checkpoint", folder, "--every", 8)
    whole = generate(*options, "--json")
    assert whole.status == 0 and whole.err == ""
    steps = sorted(folder.glob("steps/*"), key=lambda path: int(path.name))
    assert len(steps) == 2 and int(steps[0].name) % 8 == 0
    shutil.rmtree(steps[1])
    return folder, whole, options


def test_a_resumed_run_ends_as_if_it_had_not_been_cut_off(begun, run):
    folder, whole, options = begun
    assert whole.json["finish_reason"] == "stop_string"
    again = folder.with_name("again")
    shutil.copytree(folder, again)
    # its own options need not be repeated; those that only show may change
    resumed = run("generate", "--checkpoint", folder, "--resume", "--json")
    assert resumed.status == 0
    assert without_times(resumed.json) == without_times(whole.json)
    assert "going on after round" in resumed.err
    # they may be repeated, too; the text so far comes first
    shown = run("generate", *options[:-4], "--checkpoint", again, "--resume")
    assert shown.status == 0
    assert shown.out.startswith(whole.json["text"] + "\n")
    assert "rounds" in shown.err.splitlines()[-1]
    # a run that has ended is printed
    ended = run("generate", "--checkpoint", folder, "--resume", "--json")
    assert without_times(ended.json) == without_times(whole.json)


def test_options_that_contradict_the_run_are_named(
    begun, run, other_tokenizer, tmp_path
):
    folder, _, _ = begun
    file = tmp_path / "prompt"
    file.write_text("another")

    def refused(*more):
        result = run("generate", "--checkpoint", folder, "--resume", *more)
        assert result.status == 2
        return result.err

    for more, said in (
        (("--k", 5), "--k 5: the run in"),
        (("--drafter", "none"), "--drafter none: the run in"),
        (("--temperature", 0), "--temperature 0.0: the run in"),
        (("--seed", 4), "--seed 4: the run in"),
        (("--stop", "a", "b"), "--stop a b: the run in"),
        (("--chat",), "--chat True: the run in"),
        (("--prompt", "abc"), f"--prompt abc: the run in {folder} has {PROMPT}"),
        (("--prompt-file", file), f"--prompt-file {file} is not the prompt of the run"),
        (("--dtype", "int8"), "--dtype int8: the run in"),
        (("--max-tokens", 41), "--max-tokens 41: the run in"),
    ):
        assert said in refused(*more)

    # options that another version may have had, in a group and as a group
    manifest = json.loads((folder / "run.json").read_text())
    memory = manifest["options"]["memory"]
    less = {name: memory[name] for name in memory if name != "pages"}
    for other, said in ((memory | {"odd": 1}, "odd"), (less, "pages"), (3, "memory")):
        manifest["options"]["memory"] = other
        (folder / "run.json").write_text(json.dumps(manifest))
        assert f"options differ in {said})" in refused()


def test_another_model_is_refused(begun, run, model, tmp_path):
    folder, _, _ = begun
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(model, moved)
    resume = ("generate", "--checkpoint", folder, "--resume", "--json")
    # the weights count, not where they lie
    assert run(*resume, "--model", moved).status == 0
    shutil.copytree(model, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-4096:] = bytes(4096)
    (other / "model.safetensors").write_bytes(weights)
    result = run(*resume, "--model", other)
    assert result.status == 2
    assert f"--model {other}: the run in {folder} had another model" in result.err


def test_a_folder_in_use_is_not_taken_unasked(begun, generate, model):
    _, whole, options = begun
    result = generate(*options)
    assert result.status == 2
    assert "holds a run already: add --resume" in result.err
    result = generate("--prompt", "x", "--checkpoint", model, "--overwrite")
    assert result.status == 2 and "files that are no run's" in result.err
    assert (model / "config.json").exists()
    anew = generate(*options, "--overwrite", "--json")
    assert without_times(anew.json) == without_times(whole.json)


def test_options_that_cannot_be_meant(run, generate, tmp_path):
    for more, said in (
        (("--resume",), "--resume needs --checkpoint DIR"),
        (("--prompt", "x", "--every", 3), "--every needs --checkpoint DIR"),
        (("--prompt", "x", "--checkpoint", ""), "--checkpoint is empty"),
        (("--prompt", "x", "--checkpoint", "d", "--every", 0), "--every 0: it must be"),
        (("--prompt", "x", "--checkpoint", "d", "--keep", 0), "--keep 0: it must be"),
        (
            ("--checkpoint", "d", "--resume", "--overwrite"),
            "give one of them",
        ),
        (("--checkpoint", tmp_path / "none", "--resume"), "there is no folder"),
        (("--checkpoint", tmp_path, "--resume"), "run.json is missing"),
    ):
        result = generate(*more)
        assert result.status == 2 and said in result.err


def test_a_run_without_a_step_starts_from_its_prompt(begun, run):
    folder, whole, _ = begun
    shutil.rmtree(folder / "steps")
    result = run("generate", "--checkpoint", folder, "--resume", "--json")
    assert without_times(result.json) == without_times(whole.json)
    assert "nothing was saved yet" in result.err


def test_a_converted_model_is_a_model(run, generate, model, tmp_path):
    folder = tmp_path / "converted"
    result = run("convert", model, folder)
    assert result.status == 0 and "as float32" in result.out
    expected = generate(*OPTIONS, "--json").json
    assert (
        run("generate", "--model", folder, *OPTIONS, "--json").json["ids"]
        == (expected["ids"])
    )
    result = run("generate", "--model", folder, "--prompt", "x", "--dtype", "int8")
    assert result.status == 2 and "holds float32 weights, not int8" in result.err
    result = run("convert", model, folder)
    assert result.status == 2 and "name a new folder" in result.err


def test_convert_teaches(run):
    result = run("convert", "--help")
    assert "Example: `specjax convert" in result.out and "MODEL DIR" in result.out
    assert "• convert" in run("--help").out
