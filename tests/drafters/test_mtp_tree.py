"""MTP layers in the engine: chains and EAGLE-2's trees, for every kind of target."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.acceptance import Coupled, Greedy
from specjax.checkpoints import load
from specjax.checkpoints.mtp import load_mtp
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.drafters import DRAFTERS, DrafterOptions, HeadChain, HeadDynamicTree
from specjax.drafters.drawing import Pick
from specjax.drafters.mtp import MTPModules
from specjax.testing.conformance import check_drafter
from specjax.testing.toy_mtp import toy_mtp
from specjax.testing.toys import toy_hybrid, toy_llama

ORACLES = Path(__file__).resolve().parents[1] / "data/oracles"
GLM = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
OTHERS = ("nemotron_h_moe", "deepseek_v3", "qwen3_next")


@functools.cache
def target_of(name: str):
    return load(ORACLES / name, tokenizer=False)


def options_of(part) -> DrafterOptions:
    return DrafterOptions(k=3, part=part, top_k=2, nodes=5)


def decode(decoder, drafter, prompts, tokens, rule=None, **settings):
    options = EngineOptions(
        prefill_width=13, widths=(drafter.max_nodes + 1,), rounds_per_call=32
    )
    asked = [
        Request(prompt_ids=ids, max_tokens=tokens, seed=i, **settings)
        for i, ids in enumerate(prompts)
    ]
    with jax.default_matmul_precision("highest"):
        return generate(Engine(decoder, drafter, rule or Greedy(), options), asked)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=() if quick else pytest.mark.full)
        for name in (*GLM, *OTHERS)
        for method in ("mtp", "mtp-tree")
        for quick in [(name, method) == ("glm4_moe", "mtp-tree")]
    ],
)
def test_the_tokens_are_the_references(name, method):
    target = target_of(name)
    with np.load(ORACLES / name / "oracle.npz") as oracle:
        prompts, wanted = oracle["input_ids"].tolist(), oracle["greedy_ids"].tolist()
    drafter = DRAFTERS[method].build(options_of(load_mtp(target)))
    got = decode(target.decoder, drafter, prompts, len(wanted[0]))
    assert [list(c.ids) for c in got] == wanted
    nodes = 5 if method == "mtp-tree" else 3
    assert all(c.rounds[0].drafted == nodes for c in got)


@pytest.mark.full
def test_a_tree_of_one_branch_is_the_chain_and_a_wide_one_holds_it():
    toy = toy_llama(num_hidden_layers=1)
    (head,) = toy_mtp(toy)
    prompts = ((5, 17, 40, 3, 22, 9, 1), (8,), (30, 2))
    chain = decode(toy.decoder, HeadChain(head, 3, pick=Pick.BEST), prompts, 20)
    narrow = decode(toy.decoder, HeadDynamicTree(head, 1, 3, 3), prompts, 20)
    assert [c.ids for c in narrow] == [c.ids for c in chain]
    assert [c.rounds for c in narrow] == [c.rounds for c in chain]
    wide = decode(toy.decoder, HeadDynamicTree(head, 4, 3, 84), prompts, 20)
    assert [c.ids for c in wide] == [c.ids for c in chain]
    # every candidate is verified: where the chain's first draft is right, a node is
    assert sum(c.accepted for c in wide) > sum(c.accepted for c in chain)


def test_several_modules_grow_no_tree():
    heads = toy_mtp(toy_llama(num_hidden_layers=1), 2)
    with pytest.raises(ValueError, match="one MTP module, and the target has 2"):
        DRAFTERS["mtp-tree"].build(options_of(MTPModules(heads)))
    tree = DRAFTERS["mtp-tree"].build(options_of(heads[0]))
    assert isinstance(tree, HeadDynamicTree)
    assert (tree.top_k, tree.max_depth, tree.max_nodes) == (2, 3, 5)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("toy", [toy_llama, toy_hybrid])
def test_the_contracts_hold_for_trees(toy):
    made = toy()
    drafter = HeadDynamicTree(toy_mtp(made)[0], 2, 3, 5)
    check_drafter(drafter, made, Coupled()).assert_ok()


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "method"),
    [("glm4_moe", "mtp"), ("glm_moe_dsa", "mtp"), ("nemotron_h_moe", "mtp-tree")],
)
def test_the_contracts_hold_for_published_families(name, method):
    """Latent attention, an indexer's choice, a mixture, a recurrent state."""
    target = target_of(name)
    drafter = DRAFTERS[method].build(options_of(load_mtp(target)))
    check_drafter(drafter, target.decoder, Coupled()).assert_ok()
