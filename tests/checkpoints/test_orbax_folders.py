"""Folders of runs: what may be opened, and what is refused by name."""

import dataclasses
import logging

import pytest

from specjax.acceptance import Block, Coupled
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.orbax import describe_run, new_run, resume_run
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Completion, Snapshot, Times
from specjax.decoding.requests import Request
from specjax.decoding.types import FinishReason
from specjax.drafters import DraftModel, NGram
from specjax.testing.markov import markov

OPTIONS = EngineOptions(rounds_per_call=2, prefill_width=4)
VOCAB = 12


def requests(**more) -> list[Request]:
    settings = {"temperature": 0.9} | more
    return [
        Request(prompt_ids=(1, 2, row + 1), max_tokens=14, seed=row, **settings)
        for row in range(3)
    ]


def table_engine(**changes) -> Engine:
    parts = {
        "target": markov(0, VOCAB),
        "drafter": DraftModel(markov(1, VOCAB), 3),
        "rule": Coupled(),
        "options": OPTIONS,
    }
    return Engine(**parts | changes)


def keep_start(folder, engine, rows) -> None:
    """A run of which only the start is kept: nothing is compiled for it."""
    with new_run(folder, describe_run(engine, rows)) as run:
        done = [
            Completion(tuple(r.prompt_ids), (), None, FinishReason.NONE, (), None)
            for r in rows
        ]
        run.save(Snapshot(engine.start(rows), tuple(done), Times(0.0, 0.0), 0))


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        (
            {"drafter": DraftModel(markov(1, VOCAB), 2)},
            {},
            "drafter.k is 3 there and 2",
        ),
        ({"drafter": NGram(3)}, {}, "drafter.class is 'specjax.drafters.draft_model"),
        ({"drafter": DraftModel(markov(2, VOCAB), 3)}, {}, "drafter.model is"),
        ({"target": markov(5, VOCAB)}, {}, "target.table is"),
        ({"rule": Block()}, {}, "rule.class is 'specjax.acceptance.coupled.Coupled'"),
        (
            {"options": dataclasses.replace(OPTIONS, eos_ids=(3,))},
            {},
            "engine.eos_ids is [] there and [3] here",
        ),
        ({}, {"temperature": 0.5}, "requests[0].temperature is 0.9 there and 0.5"),
        ({}, {"stop": ("x",)}, "requests[0].stop is [] there and ['x']"),
        ({}, {"logit_bias": {3: 1.0}}, "requests[0].logit_bias.3 is None there and 1"),
    ],
)
def test_another_run_is_an_error_that_says_what_differs(changes, more, said, tmp_path):
    with new_run(tmp_path, describe_run(table_engine(), requests())):
        pass
    other = describe_run(table_engine(**changes), requests(**more))
    with (
        pytest.raises(CheckpointError, match="holds another run") as error,
        resume_run(tmp_path, other),
    ):
        pass
    assert said in str(error.value)


def test_what_changes_no_token_may_differ(tmp_path):
    with new_run(tmp_path, describe_run(table_engine(), requests())):
        pass
    finer = dataclasses.replace(OPTIONS, rounds_per_call=1)
    again = describe_run(table_engine(options=finer), requests(top_p=1.0))
    with resume_run(tmp_path, again) as run:
        assert run.restore(table_engine().start(requests())) is None  # nothing yet


def test_another_state_is_an_error_that_names_the_leaf(tmp_path):
    engine, rows = table_engine(), requests()
    keep_start(tmp_path, engine, rows)
    wide = table_engine(options=dataclasses.replace(OPTIONS, capacity_at_least=200))
    with (
        resume_run(tmp_path, describe_run(engine, rows)) as run,
        pytest.raises(CheckpointError) as error,
    ):
        run.restore(wide.start(rows))
    assert "tokens: found int32[3,128], expected int32[3,256]" in str(error.value)


def test_other_versions_are_told(tmp_path, caplog):
    manifest = describe_run(table_engine(), requests())
    old = dataclasses.replace(manifest, versions=manifest.versions | {"jax": "0.1"})
    with new_run(tmp_path, old):
        pass
    with caplog.at_level(logging.WARNING), resume_run(tmp_path, manifest):
        pass
    assert "jax 0.1" in caplog.text and "near-ties" in caplog.text


def test_a_folder_is_not_overwritten_unasked(tmp_path):
    engine, rows = table_engine(), requests()
    manifest = describe_run(engine, rows)
    keep_start(tmp_path / "run", engine, rows)

    def open_new(folder, **more):
        with new_run(folder, manifest, **more):
            pass

    with pytest.raises(CheckpointError, match="holds a run already"):
        open_new(tmp_path / "run")
    open_new(tmp_path / "run", overwrite=True)
    assert list((tmp_path / "run" / "steps").iterdir()) == []
    with pytest.raises(CheckpointError, match="files that are no run's"):
        open_new(tmp_path, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        open_new(tmp_path / "file")
    with (
        resume_run(tmp_path / "run", manifest),
        pytest.raises(CheckpointError, match="in use by another process"),
    ):
        open_new(tmp_path / "run", overwrite=True)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    manifest = describe_run(table_engine(), requests())

    def resume(folder):
        with resume_run(folder, manifest):
            pass

    with pytest.raises(CheckpointError, match="there is no folder"):
        resume(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no run .*run\.json is missing"):
        resume(tmp_path)
    with new_run(tmp_path / "run", manifest):
        pass
    file = tmp_path / "run" / "run.json"
    for text, said in (
        ("{", "no valid JSON.*start the run anew"),
        ("{}", "format None"),
        ('{"format": 1}', "has no 'run'.*start the run anew"),
        ('{"format": 1, "run": {}, "options": {}, "versions": null}', "no 'versions'"),
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=said):
            resume(tmp_path / "run")
