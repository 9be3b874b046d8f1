"""Rounds played with coins agree with the law, and are drawn as they came."""

import math
import xml.etree.ElementTree as ET

import pytest

from specjax.analysis.elsewhere import elsewhere
from specjax.analysis.law import DEVICES, MODELS, Model, chain_tau
from specjax.analysis.rounds_svg import ABORTED, ACCEPTED, BONUS, rounds_svg
from specjax.analysis.simulation import Game, Played, play
from specjax.decoding.trees import chain, full

SMALL = Model(*MODELS["llama-3.1-8b"])


@pytest.mark.parametrize(
    "game",
    [
        Game(chain(4), (0.85,), 0.1),
        Game(chain(8), (0.3,), 0.5, 1.4),
        Game(full((2, 2, 1)), (0.55, 0.35), 0.2),
        Game(full((3,)), (0.5, 0.3, 0.2), 0.0),
    ],
)
def test_many_rounds_come_near_the_law(game):
    played = play(game, 5_000, seed=1)
    assert abs(played.tau - game.tau) < 4 * played.tau_error + 1e-12
    assert played.speedup == pytest.approx(played.tau / game.cost)


def test_a_wrong_law_is_told_apart():
    """The bound above is not so wide that anything passes."""
    played = play(Game(chain(4), (0.85,), 0.1), 5_000, seed=1)
    assert abs(played.tau - chain_tau(0.80, 4)) > 4 * played.tau_error


def test_a_seed_is_a_game():
    game = Game(full((2, 1)), (0.6, 0.2), 0.1)
    assert play(game, 50, 3) == play(game, 50, 3)
    assert play(game, 50, 3).paths != play(game, 50, 4).paths
    # a longer game begins with the shorter one
    assert play(game, 80, 3).paths[:50] == play(game, 50, 3).paths


def test_paths_are_paths():
    tree = full((3, 2))
    for path in play(Game(tree, (0.4, 0.3, 0.2), 0.1), 500, 0).paths:
        parents = [-1, *path[:-1]] if path else []
        assert [tree.parents[node] for node in path] == parents


@pytest.mark.parametrize(("alpha", "length"), [(0.0, 1), (1.0, 5)])
def test_certain_coins(alpha, length):
    assert set(play(Game(chain(4), (alpha,), 0.1), 9, 0).committed) == {length}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Game(full((2,)), (0.7, 0.7), 0.1), r"add up to 1.4"),
        (lambda: Game(full((2,)), (0.7,), 0.1), r"no marginal for rank 1 at depth 1"),
        (lambda: Game(chain(2), (1.5,), 0.1), r"above 1"),
        (lambda: Game(chain(2), (0.5,), -0.1), r"c_draft = -0.1"),
        (lambda: Game(chain(2), (0.5,), 0.0, 0.0), r"the cost of a round"),
        (lambda: play(Game(chain(2), (0.5,), 0.1), 0, 0), r"rounds = 0"),
    ],
)
def test_games_that_make_no_sense(make, told):
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("rounds", [1, 7, 50])
def test_the_drawing_has_every_cell(rounds):
    played = play(Game(full((2, 1)), (0.6, 0.2), 0.1), rounds, 0)
    text = rounds_svg(played, "α < 1 & so on")
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    cells = [
        rect.get("fill")
        for g in root.iter(f"{space}g")
        for rect in g.iter(f"{space}rect")
    ]
    accepted = sum(map(len, played.paths))
    assert cells.count(ACCEPTED) == accepted
    assert cells.count(BONUS) == rounds
    assert cells.count(ABORTED) == rounds * 4 - accepted
    width, height = (float(root.get(side, 0)) for side in ("width", "height"))
    for rect in root.iter(f"{space}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x + float(rect.get("width", 0)) <= width
        assert y + float(rect.get("height", 0)) <= height
    assert any(node.text == "α < 1 & so on" for node in root.iter(f"{space}text"))


def test_elsewhere_drafts_are_free_until_a_batch():
    alone = {row.device: row for row in elsewhere(SMALL, tau=3.0, rows=5, c_draft=0.1)}
    assert set(alone) == set(DEVICES)
    for row in alone.values():
        assert row.c_verify == 1 and row.speedup == pytest.approx(3.0 / 1.1)
    # 16.06 GB of weights do not fit the 16 GB of a v5e: two chips read twice as fast
    assert alone["TPU v5e"].chips == 2 and alone["H100"].chips == 1
    rates = {name: row.plain_rate for name, row in alone.items()}
    assert rates["TPU v5e"] == pytest.approx(2 * 819e9 / 16.06e9)
    assert rates["H200"] / rates["H100"] == pytest.approx(4.8 / 3.35)
    crowd = elsewhere(SMALL, tau=3.0, rows=5, c_draft=0.1, batch=512)
    assert all(row.c_verify > 3 and row.speedup < 1 for row in crowd)
    for row in alone.values():
        assert row.break_even_batch is not None and 1 < row.break_even_batch < 512


def test_one_round_has_no_standard_error():
    game = Game(chain(2), (0.5,), 0.1)
    assert math.isinf(Played(game, ((),)).tau_error)
