"""From seconds and rounds to a prediction, on numbers worked out by hand."""

import dataclasses
import json

import numpy as np
import pytest

from specjax.analysis.costs.calibrated import (
    Calibrated,
    Curve,
    Machine,
    from_dict,
    read_calibrated,
)
from specjax.analysis.costs.chart_svg import curve_svg
from specjax.analysis.costs.oddities import oddities
from specjax.analysis.costs.predict import best, predict
from specjax.analysis.costs.sample import Sample
from specjax.analysis.law import chain_tau
from specjax.cli.calibration_tables import best_sentence
from specjax.decoding.generate import Completion, Round
from specjax.decoding.types import FinishReason

TURNS = 5


def curve(batch=1, **rounds):
    """``w1=10`` is ten milliseconds in every turn."""
    return Curve(
        batch=batch,
        context=64,
        rounds={
            int(name[1:]): [1e-3 * v for v in np.broadcast_to(value, TURNS).tolist()]
            for name, value in rounds.items()
        },
        accept={1: 1e-4},
        commit={1: 1e-4, 5: 3e-4},
        drafts={"ngram k=4": [1e-3] * TURNS},
    )


def calibrated(curve, dtype="float32", weight_bytes=10**8, about=None, **rates):
    machine = Machine(1e10, rates or {"float32": 5e10, "bfloat16": 3e11})
    return Calibrated(
        "toy", dtype, "cpu: X", weight_bytes, machine, [curve], about or {}
    )


FLAT = {"w1": 10.0, "w2": 10.0, "w5": 10.0}


def test_every_round_drafting_is_the_plain_law():
    found = predict(
        curve(w1=10, w2=14, w5=15),
        "ngram",
        k=4,
        nodes=4,
        drafting=np.full(TURNS, 0.1),
        found=chain_tau(0.7, 4),
    )
    assert found.tau == pytest.approx(chain_tau(0.7, 4))
    assert found.c_verify == pytest.approx(1.5)
    assert found.speedup == pytest.approx(chain_tau(0.7, 4) / 1.6)
    assert found.low == pytest.approx(found.high)  # nothing differs
    assert found.go and found.sure
    assert found.alpha == pytest.approx(0.7)
    assert found.limit == "acceptance"
    assert found.without_limit == pytest.approx(5 / 1.6)
    assert chain_tau(found.break_even_alpha, 4) == pytest.approx(1.6)


def test_rounds_without_drafts_cost_a_plain_step():
    """Two rounds of four drafts, two of none: widths 1 and 5 in equal shares."""
    sample = Sample(drafted=((4, 0), (4, 0)), tokens=(6, 4))
    found = predict(
        curve(w1=10, w5=18),
        "ngram",
        k=4,
        nodes=4,
        drafting=np.full(TURNS, 0.1),
        found=sample,
    )
    assert found.tau == 2.5
    assert found.c_verify == pytest.approx((1.0 + 1.8) / 2)
    # were all accepted, all rounds would draft, and be wide
    assert found.limit == "acceptance"
    assert found.without_limit == pytest.approx(5 / 1.9)
    assert found.speedup == pytest.approx(2.5 / 1.5)
    # texts differ: the spread is that of drawing two of them
    assert found.low == pytest.approx(2.0 / 1.5) and found.high == pytest.approx(2.0)


def test_in_a_batch_the_largest_draft_decides():
    """Half of the rounds draft: of two requests, three pairs of four need width 5."""
    sample = Sample(drafted=((4, 0),), tokens=(5,))
    found = predict(
        curve(batch=2, w1=10, w5=18),
        "ngram",
        k=4,
        nodes=4,
        drafting=np.zeros(TURNS),
        found=sample,
    )
    assert found.c_verify == pytest.approx(0.25 * 1.0 + 0.75 * 1.8)
    assert found.tau == 2.5


def test_noise_of_turns_shows_in_the_spread():
    noisy = [10.0, 11.0, 12.0, 9.0, 10.0]
    found = predict(
        curve(w1=10, w5=noisy),
        "ngram",
        k=4,
        nodes=4,
        drafting=np.zeros(TURNS),
        found=2.0,
    )
    assert found.low < 2.0 / 1.0 < found.high
    assert found.low >= 2.0 / 1.2 and found.high <= 2.0 / 0.9


@pytest.mark.parametrize(
    ("tau", "go", "sure"), [(1.3, False, True), (1.6, True, True), (1.5, False, False)]
)
def test_the_verdict_is_the_sign_of_the_gain(tau, go, sure):
    found = predict(
        curve(w1=10, w5=[14.0, 15.0, 15.1, 15.2, 16.0] if not sure else 15),
        "ngram",
        k=4,
        nodes=4,
        drafting=np.zeros(TURNS),
        found=tau,
    )
    assert (found.go, found.sure) == (go, sure)


def test_the_best_gains_most_and_drafts_least():
    kept = dict(k=4, nodes=4, drafting=np.zeros(TURNS))
    slow, fast = (
        predict(curve(w1=10, w5=15), str(tau), found=tau, **kept) for tau in (1.6, 2.0)
    )
    longer = dataclasses.replace(fast, nodes=8)
    lossy = predict(curve(w1=10, w5=15), "x", found=1.2, **kept)
    assert best([slow, longer, fast, lossy]) is fast
    assert best([lossy]) is None


def test_between_widths_lies_a_line_and_beyond_them_an_error():
    here = curve(w1=10, w2=12, w4=20)
    assert here.c_round(3) == pytest.approx(1.6)
    assert here.c_round(2) == pytest.approx(1.2)
    for rows in (0, 5):
        with pytest.raises(ValueError, match=f"{rows} rows: 1 to 4 were timed"):
            here.ratios(rows)


def test_ratios_are_taken_turn_by_turn():
    """A machine that is twice as slow in some turns has the same curve."""
    slow = [10.0, 20.0, 10.0, 20.0, 20.0]
    here = curve(w1=slow, w4=[1.5 * s for s in slow])
    assert here.ratios(4) == pytest.approx([1.5] * TURNS)


def test_rollback_is_what_rejected_rows_add():
    assert curve(**FLAT).rollback_seconds == pytest.approx(2e-4)


def test_a_file_gives_back_what_was_kept(tmp_path):
    found = calibrated(curve(**FLAT))
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"calibration": found.as_dict(), "predictions": []}))
    assert read_calibrated(file) == found
    assert from_dict(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda raw: raw.pop("curves"), "damaged .KeyError: 'curves'"),
        (lambda raw: raw.update(curves=[]), "damaged .ValueError: no curves"),
        (lambda raw: raw["curves"][0]["rounds"].pop("1"), "no plain steps"),
        (lambda raw: raw["curves"][0]["rounds"]["2"].pop(), "2: 4 turns, plain steps"),
        (lambda raw: raw["curves"][0]["rounds"].update({"1": []}), "0 turns|plain ste"),
        (lambda raw: raw["curves"][0].update(more=1), "damaged .TypeError"),
        (lambda raw: raw["curves"][0]["rounds"].update({"5": [0.0] * 5}), "no time"),
        (lambda raw: raw["curves"][0]["rounds"].update({"5": [-1.0] * 5}), "times are"),
        (lambda raw: raw.update(format="specjax calibration 2"), "it is of 'specjax"),
        (lambda raw: raw.update(format=None), "it holds no calibration"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, spoil, told):
    raw = json.loads(json.dumps(calibrated(curve(**FLAT)).as_dict()))
    spoil(raw)
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"calibration": raw}))
    with pytest.raises(ValueError, match=told):
        read_calibrated(file)


@pytest.mark.parametrize("text", ["[1]", '{"calibration": [1]}', "{", "3"])
def test_what_is_no_calibration_is_refused(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"no calibration|not JSON"):
        read_calibrated(file)


def test_a_curve_is_found_by_its_batch_and_the_nearest_context():
    curves = [
        dataclasses.replace(curve(batch, **FLAT), context=context)
        for batch, context in ((1, 64), (1, 512), (4, 64))
    ]
    found = dataclasses.replace(calibrated(curves[0]), curves=curves)
    assert found.curve_for(1, 400) is curves[1]
    assert found.curve_for(4, 400) is curves[2]
    with pytest.raises(ValueError, match="batches of 1, 4 were timed, and not of 2"):
        found.curve_for(2, 64)


def test_few_turns_are_odd_and_each_curve_is_looked_at():
    few = curve(w1=11, w2=11)
    few = dataclasses.replace(
        few, rounds={w: times[:3] for w, times in few.rounds.items()}
    )
    jumps = curve(4, w1=11, w2=16, w4=17)
    found = dataclasses.replace(calibrated(few), curves=[few, jumps])
    told = {each.kind: each.text for each in oddities(found)}
    assert set(told) == {"few turns", "jump"}
    assert told["few turns"].startswith("batch 1, context 64: 3 turns only")
    assert told["jump"].startswith("batch 4, context 64: the cost jumps")


def test_what_is_called_best_can_be_run_and_says_if_it_may_lose():
    kept = dict(k=4, nodes=4, drafting=np.zeros(TURNS))
    here = curve(w1=10, w5=[14.0, 15.0, 15.1, 15.2, 16.0])
    unsure = predict(here, "ngram", found=1.53, **kept)
    free = predict(here, "free drafts, a tree", found=4.0, **kept)
    assert unsure.go and not unsure.sure
    told = best_sentence([free, unsure])
    assert told.startswith("Best: ngram") and told.endswith("(not sure: it may lose).")
    assert best_sentence([free]).startswith("Best: free drafts")


def kinds(*given, **more):
    return [each.kind for each in oddities(calibrated(*given, **more))]


def test_nothing_odd():
    assert kinds(curve(w1=11, w2=11, w4=12, w8=13)) == []


@pytest.mark.parametrize(
    ("rounds", "kind"),
    [
        ({"w1": 11, "w2": 16, "w4": 17}, "jump"),
        ({"w1": 14, "w2": 13.8, "w4": 11}, "dip"),
        ({"w1": 30, "w2": 30, "w4": 30}, "not memory"),
        ({"w1": [10, 14, 11, 13, 10.5], "w4": [10, 14, 11, 13, 10.5]}, "noise"),
    ],
)
def test_each_oddity_is_seen_alone(rounds, kind):
    assert kinds(curve(**rounds)) == [kind]


def test_a_jump_that_only_some_turns_show_is_none():
    assert "jump" not in kinds(curve(w1=11, w2=[11.0, 11.2, 15.0, 15.0, 15.0]))


@pytest.mark.parametrize(("load", "told"), [(0.2, []), (3.0, ["busy"]), (None, [])])
def test_a_busy_machine_is_told(load, told):
    assert kinds(curve(w1=11, w2=11), about={"load_per_core": load}) == told


def test_a_type_without_a_fast_path():
    rates = {"float32": 5e10, "bfloat16": 5.5e10}
    found = oddities(calibrated(curve(w1=11, w2=11), "bfloat16", **rates))
    assert [each.kind for each in found] == ["no fast type"]
    assert "this device has no fast bfloat16" in found[0].text
    assert kinds(curve(w1=11, w2=11), "bfloat16") == []


def test_the_drawing_is_a_drawing():
    text = curve_svg(calibrated(curve(w1=10, w2=12, w16=30)))
    assert text.startswith("<svg") and "W = 16: 3.000" in text and "cpu: X" in text


def test_an_empty_text_is_left_out_of_a_sample():
    nothing = Completion((1,), (), None, FinishReason.LENGTH, (), None)
    some = Completion((1,), (2, 3), None, FinishReason.LENGTH, (Round(1, 1, 2),), None)
    assert Sample.of([nothing, some]) == Sample(((1,),), (2,))
