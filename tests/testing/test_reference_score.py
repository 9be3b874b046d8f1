"""What re-scoring flags, and what its margins mean."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.testing.reference import (
    Settings,
    continue_sampled,
    gumbel,
    law,
    rescore,
    score,
)

ORACLE = Path(__file__).resolve().parent.parent / "data" / "oracles" / "llama"
SAMPLED = Settings(
    temperature=1.0,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition=1.1,
    presence=0.2,
    frequency=0.1,
    bias={7: 1.5, 9: -np.inf},
)


@pytest.fixture(scope="module")
def llama():
    config = json.loads((ORACLE / "config.json").read_text("utf-8"))
    with np.load(ORACLE / "oracle.npz") as arrays:
        return load_file(ORACLE / "model.safetensors"), config, dict(arrays)


@pytest.fixture(scope="module")
def samples(llama):
    """A model, a prompt and what it samples with ``SAMPLED`` and seed 5."""
    tensors, config, expected = llama
    prompt = expected["input_ids"][0][:9].tolist()
    output = continue_sampled(tensors, config, prompt, 24, SAMPLED, seed=5)
    return tensors, config, prompt, output


def test_sampled_tokens_pass(samples):
    tensors, config, prompt, output = samples
    verdict = rescore(tensors, config, prompt, output, SAMPLED, seed=5)
    assert len(set(output)) > 8 and 9 not in output
    assert verdict.ok.all() and verdict.chosen.tolist() == output
    assert verdict.first_difference is None and verdict.agrees(0.0)
    assert (verdict.margin > 0).all()


@pytest.mark.parametrize("index", [0, 11, 23])
def test_a_wrong_token_is_flagged_where_it_stands(samples, index):
    tensors, config, prompt, output = samples
    wrong = output.copy()
    wrong[index] = 9  # excluded by its bias
    verdict = rescore(tensors, config, prompt, wrong, SAMPLED, seed=5)
    assert verdict.first_difference == (index, np.inf)
    assert verdict.chosen[index] == output[index]
    assert not verdict.agrees(1e3)
    wrong[index] = (output[index] + 1) % 9
    verdict = rescore(tensors, config, prompt, wrong, SAMPLED, seed=5)
    assert verdict.first_difference is not None
    assert verdict.first_difference.index == index
    assert not verdict.agrees(1e-4)
    assert verdict.agrees(max(d.margin for d in verdict.differences) + 1e-6)


def test_a_wrong_greedy_token_has_the_gap_as_its_margin(llama):
    tensors, config, expected = llama
    prompt, ids = expected["input_ids"][0], expected["greedy_ids"][0].copy()
    row = expected["greedy_logits"][0][4]
    ids[4] = np.argsort(row)[-3]
    verdict = rescore(tensors, config, prompt, ids)
    assert verdict.first_difference is not None
    assert verdict.first_difference.index == 4
    gap = np.sort(row)[-1] - np.sort(row)[-3]
    assert verdict.margin[4] == pytest.approx(gap, abs=1e-3)


@pytest.mark.parametrize("change", ["seed", "position", "temperature", "penalty"])
def test_other_circumstances_are_flagged(samples, change):
    """Negative controls: the score depends on everything that it should."""
    tensors, config, prompt, output = samples
    settings, seed = SAMPLED, 5
    if change == "seed":
        seed = 6
    elif change == "position":
        prompt = [7, *prompt]
    elif change == "temperature":
        settings = Settings(temperature=3.0)
    else:
        settings = Settings(temperature=1.0, frequency=3.0)
    verdict = rescore(tensors, config, prompt, output, settings, seed=seed)
    assert not verdict.ok.all()
    assert not verdict.agrees(1e-2)


def test_sampling_needs_a_seed_and_a_prompt(llama):
    tensors, config, _ = llama
    with pytest.raises(ValueError, match="seed"):
        rescore(tensors, config, [1], [2], Settings(temperature=1.0))
    with pytest.raises(ValueError, match="prompt"):
        rescore(tensors, config, [], [2])
    with pytest.raises(ValueError, match="token ids"):
        rescore(tensors, config, [1], [2, -1])
    assert rescore(tensors, config, [1], []).agrees(0.0)


def outcome(row, settings, noise) -> int:
    p = law(row, settings, [], [])
    return int(np.argmax(np.where(p.kept(), p.scores + noise, -np.inf)))


def test_margin_is_what_it_takes_to_change_the_outcome():
    """Nothing within half the margin, at random; something a little beyond it."""
    draw = np.random.default_rng(2)
    seen = {True: 0, False: 0}
    for case in range(40):
        row = draw.normal(0, 2, 8)
        settings = Settings(temperature=1.0, **_cut(draw))
        noise = gumbel(case, 0, 8)
        p = law(row, settings, [], [])
        chosen = outcome(row, settings, noise)
        for emitted in range(8):
            margin = score.margin_of(p, p.scores + noise, chosen, emitted)
            # each score moves by half of what the gap between two of them moves
            moved = row + 0.49 * margin * draw.choice([-1, 1], (25, 8))
            outcomes = [outcome(other, settings, noise) for other in moved]
            if emitted == chosen:
                assert set(outcomes) == {chosen}
            else:
                assert emitted not in outcomes
            seen[emitted == chosen] += 1
    assert seen == {True: 40, False: 280}


def _cut(draw: np.random.Generator) -> dict:
    kinds: list[dict] = [
        {"top_k": int(draw.integers(1, 8))},
        {"top_p": float(draw.uniform(0.2, 0.95))},
        {"min_p": float(draw.uniform(0.05, 0.6))},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
        {},
    ]
    return kinds[int(draw.integers(len(kinds)))]


def test_a_token_just_beyond_an_edge_is_a_near_tie():
    """Its noise would win, and a millionth more mass would let it in."""
    probabilities = np.array([0.6, 0.3, 0.1])
    settings = Settings(temperature=1.0, top_p=0.9 - 1e-6)
    p = law(np.log(probabilities), settings, [], [])
    assert p.kept().tolist() == [True, True, False]
    s = p.scores + np.array([0.0, 0.0, 9.0])
    assert score.margin_of(p, s, 0, 2) == pytest.approx(1e-6 / 0.9, rel=1e-3)
    # the edge does not excuse the token whose noise would not have won
    assert score.margin_of(p, s, 0, 1) == pytest.approx(np.log(2))
