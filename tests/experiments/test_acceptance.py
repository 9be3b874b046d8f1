"""The arithmetic of the acceptance experiments, on what can be worked out by hand."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from specjax.acceptance import rejection
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.trees import Tree, chain, full
from specjax.testing.enumeration import emitted_law

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
sys.path.append(str(FOLDER))  # where a script finds what it shares with others


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


rules, trees = script("acceptance_rules"), script("tree_vs_chain")


@pytest.mark.parametrize(
    ("tree", "ranks", "rounds"),
    [
        # a chain of two: three tokens a round while the first candidate is right
        (chain(2), [0, 0, 0, 0, 0, 0], 2),
        (chain(2), [0, 1, 0, 0, 0, 1], 3),
        (chain(2), [5, 5, 5], 3),
        # the second candidate is in the tree at depth one only
        (full((2, 1)), [1, 0, 9, 1, 1, 9], 3),
        (full((2, 1)), [1, 0, 9, 1, 0, 9], 2),
        # a rank that the tree leaves out
        (Tree((-1, -1), ranks=(0, 2)), [1, 2, 9, 2, 9], 3),
        # the last token of a text needs a round of its own
        (chain(3), [0], 1),
    ],
)
def test_rounds_follow_from_ranks(tree, ranks, rounds):
    assert trees.rounds(tree, np.array(ranks)) == rounds


def test_the_lectures_toy():
    assert "chain 1.11" in trees.toy() and "two branches of two 1.40" in trees.toy()


def test_the_closed_form_is_what_rejection_accepts_when_laws_never_change():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    found = emitted_law(
        rejection(),
        lambda _: p,
        lambda _: q,
        parents=(-1, 0, 1),
        law=ProposalLaw.INDEPENDENT,
        vocab_size=3,
    )
    told = rules.token_by_token(np.tile(p, (3, 1)), np.tile(q, (3, 1)), 3)
    assert told == pytest.approx(found.tokens, abs=1e-9)


def test_a_perfect_draft_is_accepted_whole():
    p = np.random.default_rng(0).dirichlet(np.ones(4), 4)
    assert rules.token_by_token(p, p, 3) == pytest.approx(4)
