"""``python -m pallas_kernels.check``, which holds kernels to the reference anywhere."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import check, check_plot, measure, platforms
from pallas_kernels.window_attention import api, checks, library
from pallas_kernels.window_attention.problems import random_call
from pallas_kernels.window_attention.specs import MODELS

ONE = ("--interpret", "--quick", "--only")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        "skinny_matmul/small-up-int4-gated",
        pytest.param("delta_window/nemotron-h-8b/ring", marks=pytest.mark.full),
    ],
)
def test_a_kernel_that_is_right_passes(name, tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    assert check.main([*ONE, name, "--seed", "3", "--out", str(out)]) == 0
    assert "all that ran agree with the reference\n" in capsys.readouterr().out
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["passed"] and 0 < line["error"] <= line["tolerance"]
    assert f"{line['operation']}/{line['name']}".startswith(name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_a_kernel_that_is_wrong_fails(wrong, monkeypatch, capsys):
    plan = next(checks.make_checks(quick=True, seed=0))

    def spoilt() -> check.Check:
        made = plan.make()

        def run(by, *arguments):
            out = made.run("reference", *arguments)
            return out if by == "reference" else out.at[0, 0, 0, 0].add(wrong)

        return dataclasses.replace(made, run=run)

    planned = [check.Planned(plan.name, spoilt)]
    monkeypatch.setattr(check, "_planned", lambda *_: planned)
    assert check.main(["--interpret"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_what_has_no_kernel_here_is_said_and_not_counted_as_wrong(monkeypatch, capsys):
    plan = next(checks.make_checks(quick=True, seed=0))

    def refused() -> check.Check:
        def run(by, *arguments):
            raise platforms.NoKernelError("no cuda kernel takes this: too odd")

        return dataclasses.replace(plan.make(), run=run)

    def right() -> check.Check:
        made = plan.make()
        return dataclasses.replace(made, run=lambda by, *x: made.run("reference", *x))

    planned = [check.Planned(plan.name, make) for make in (refused, right)]
    monkeypatch.setattr(check, "_planned", lambda *_: planned)
    assert check.main(["--interpret"]) == 0
    told = capsys.readouterr().out
    assert f"window_attention/{plan.name}: no cuda kernel takes this: too odd" in told
    assert "1 have no kernel here" in told
    # a run in which nothing was compared has shown nothing
    monkeypatch.setattr(check, "_planned", lambda *_: planned[:1])
    assert check.main(["--interpret"]) == 2
    assert "nothing was shown" in capsys.readouterr().out


def test_what_tells_the_most_comes_first_and_time_is_kept(monkeypatch, capsys):
    planned = check._planned(check._parser().parse_args([]), 0)
    later = [plan.later for plan in planned]
    assert later == sorted(later) and 50 < later.count(False) < 120
    first = {plan.make.func.__module__ for plan in planned[:3]}
    assert len(first) == 3  # one of each operation
    quick = check.Planned("x", next(checks.make_checks(quick=True, seed=0)).make)
    right = check.Planned(
        "x", lambda: dataclasses.replace(quick.make(), run=lambda _, *x: x[0])
    )
    monkeypatch.setattr(check, "_planned", lambda *_: [right] * 3)
    assert check.main(["--interpret", "--seconds", "1e-9"]) == 0
    assert "; 2 were left for lack of time" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["llama-3-8b", "phi-2", "deepseek-v3"])
def test_the_library_is_asked_for_the_same(model):
    call, options = random_call(
        MODELS[model], lengths=[5, 0, 19], width=6, capacity=24, seed=1
    )
    assert library.refusal(call, options) is None
    wanted = api.window_attention(**call, **options, implementation="reference")
    made = library.arguments_of(call)
    got = library.attention(options["scale"])(*made)
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), atol=3e-5)
    # with a mask that hides one slot more it is another call
    spoilt = (*made[:3], made[3].at[0, 0, :, 2].set(False))
    other = np.asarray(library.attention(options["scale"])(*spoilt))
    assert np.max(np.abs(other[0] - np.asarray(wanted)[0])) > 1e-2


def test_what_a_library_has_no_argument_for_is_not_compared():
    for model, why in (("gpt-oss-20b-local", "a ring"), ("gemma-2-2b", "a soft cap")):
        call = random_call(MODELS[model], lengths=[5], width=2, capacity=16)
        assert library.refusal(*call) == why


def test_the_plot_shows_what_was_timed(tmp_path):
    pytest.importorskip("matplotlib")
    line = {
        "operation": "window_attention",
        "family": "llama/B1",
        "device": "a device",
        "jax": "0",
        "width": 1,
        "kernel_seconds": 1e-5,
        "over_floor": 1.2,
        "over_one_row": 1.0,
    }
    lines = [line, line | {"width": 8, "over_one_row": 1.1}]
    assert check_plot.plot(lines, tmp_path / "a.png") is None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    told = check_plot.plot([line | {"kernel_seconds": None}], tmp_path / "b.png")
    assert told == "nothing was timed"


def test_without_a_device_or_a_check_of_that_name_it_says_so(capsys):
    assert check.main([]) == 2
    assert "no accelerator here" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        check.main([*ONE, "no such check"])
    assert "no check has 'no such check' in its name" in capsys.readouterr().err


def test_calls_that_are_timed_go_on_from_what_they_have_written():
    started = []

    def step(x, y):
        jax.debug.callback(lambda value: started.append(float(value)), x[0])
        return {"new": x + y, "else": y}

    arguments = (jnp.zeros(2), jnp.ones(2))
    assert measure.seconds_of(step, arguments, 3, carried=lambda out: out["new"]) > 0
    jax.effects_barrier()
    assert set(started) == {0.0, 1.0, 2.0}
    started.clear()
    assert measure.seconds_of(step, arguments, 3) > 0
    jax.effects_barrier()
    assert set(started) == {0.0}
