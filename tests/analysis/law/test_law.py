"""What holds of the law whatever the numbers, and what it refuses."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.analysis.law import (
    DEVICES,
    Device,
    Model,
    alpha_of_tau,
    best_k,
    break_even_alpha,
    break_even_batch,
    chain_tau,
    compute_seconds,
    free_rows,
    limits,
    memory_seconds,
    pass_seconds,
    round_cost,
    speedup,
    tau_by_depth,
    tree_tau,
    tree_tau_by_rank,
    verify_cost,
)
from specjax.analysis.law.experts import offloaded_share
from specjax.analysis.law.streaming import gaps
from specjax.analysis.law.tiles import tiles_used
from specjax.decoding.trees import Tree, chain, full

ALPHA = st.floats(0.01, 0.99)
KS = st.integers(1, 16)
SMALL = Model(8.03e9, 131072)
FAST = DEVICES["H200"].device()


@given(ALPHA, KS)
def test_a_chain_is_a_tree_and_a_run_of_equal_depths(alpha, k):
    tau = chain_tau(alpha, k)
    assert tau == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert tau_by_depth([alpha] * k) == pytest.approx(tau)
    assert tree_tau(chain(k), [alpha] * k) == pytest.approx(tau)
    assert tree_tau_by_rank(chain(k), [alpha]) == pytest.approx(tau)
    assert alpha_of_tau(tau, k) == pytest.approx(alpha, abs=1e-9)


@given(st.data())
def test_the_tree_law_is_the_mean_over_every_outcome(data):
    """Enumerated: at each node one child is right, or none; the walk is counted."""
    tree = data.draw(st.sampled_from([chain(2), full((2, 1)), full((2, 2)), TREE]))
    nodes = [data.draw(st.floats(0, 0.45)) for _ in range(tree.num_nodes)]
    inner = [v for v in range(-1, tree.num_nodes) if tree.children(v)]
    total = 0.0
    for choice in itertools.product(*[(*tree.children(v), None) for v in inner]):
        right = dict(zip(inner, choice, strict=True))
        chance = math.prod(
            nodes[child]
            if child is not None
            else 1 - sum(nodes[c] for c in tree.children(v))
            for v, child in right.items()
        )
        length, at = 1, -1
        while (at := right.get(at)) is not None:
            length += 1
        total += chance * length
    assert tree_tau(tree, nodes) == pytest.approx(total)


TREE = Tree((-1, -1, 0, 0, 2))


def test_siblings_cannot_be_right_together():
    assert tree_tau(full((2,)), [0.6, 0.4]) == 2
    with pytest.raises(ValueError, match=r"children of node -1 are accepted with 1\.1"):
        tree_tau(full((2,)), [0.6, 0.5])
    with pytest.raises(ValueError, match=r"add up to 1.2, above 1"):
        tree_tau_by_rank(full((2,)), [0.6, 0.6])


@given(KS, st.floats(1.01, 17))
def test_break_even_is_where_nothing_is_gained(k, cost):
    alpha = break_even_alpha(k, cost)
    if cost > k + 1:
        assert alpha is None
        assert speedup(chain_tau(1.0, k), c_verify=cost) < 1
        return
    assert alpha is not None
    assert speedup(chain_tau(alpha, k), c_verify=cost) == pytest.approx(1)
    if alpha < 0.99:
        assert speedup(chain_tau(alpha + 0.01, k), c_verify=cost) > 1


@given(ALPHA, st.floats(0.0, 0.5))
def test_the_best_k_is_no_worse_than_any(alpha, slope):
    def cost(k):
        return 1 + slope * k

    best = best_k(alpha, cost, range(1, 17))
    gains = [chain_tau(alpha, k) / cost(k) for k in range(17)]
    assert gains[best] == max(gains)
    if slope > alpha:  # not even the first draft pays
        assert best == 0


def test_an_interior_optimum():
    """With free verification and drafts at a tenth of a step: 7 at alpha = 0.85."""
    gains = {k: chain_tau(0.85, k) / (1 + 0.1 * k) for k in range(1, 30)}
    assert best_k(0.85, lambda k: 1 + 0.1 * k, range(1, 30)) == 7
    assert gains[7] > gains[6] and gains[7] > gains[8]


@given(st.integers(1, 64), st.integers(0, 8192))
def test_memory_or_arithmetic_binds(batch, context):
    free = free_rows(SMALL, FAST, batch=batch, context=context)
    memory = memory_seconds(SMALL, FAST, batch=batch, context=context)
    for rows in (1, 4, 64):
        seconds = pass_seconds(SMALL, FAST, rows=rows, batch=batch, context=context)
        assert (seconds == memory) == (rows <= free)
        assert seconds >= compute_seconds(SMALL, FAST, rows=rows * batch)
        cost = verify_cost(SMALL, FAST, rows=rows, batch=batch, context=context)
        assert 1 <= cost <= rows * (1 + 1e-12)


@settings(max_examples=25)
@given(ALPHA, st.integers(1, 8), st.floats(0, 0.3))
def test_beyond_the_break_even_batch_it_loses(alpha, k, c_draft):
    tau = chain_tau(alpha, k)
    batch = break_even_batch(SMALL, FAST, tau=tau, rows=k + 1, c_draft=c_draft)

    def gain(b):
        cost = round_cost(SMALL, FAST, rows=k + 1, c_draft=c_draft, batch=b)
        return tau / cost

    if batch == 0:
        assert gain(1) < 1
    elif math.isfinite(batch):
        assert gain(batch) == pytest.approx(1, abs=1e-6)
        assert gain(batch * 1.01) < 1


def test_long_contexts_push_the_break_even_batch_up():
    at = [break_even_batch(SMALL, FAST, tau=2.8, rows=5, context=c) for c in (0, 8192)]
    assert at[0] < at[1]


def test_what_holds_back_most_comes_first():
    found = limits(tau=1.2, k=4, c_draft=0.05, c_verify=1.1)
    assert next(each.name for each in found) == "acceptance"
    found = limits(tau=4.5, k=4, c_draft=0.05, c_verify=2.5)
    assert found[0].name == "verification"
    found = limits(tau=4.5, k=4, c_draft=2.0, c_verify=1.1)
    assert found[0].name == "draft"
    assert all(each.speedup_without >= speedup(4.5, 2.0, 1.1) for each in found)


@given(ALPHA, KS, st.floats(0.5, 3))
def test_gaps_are_a_law(alpha, k, cost):
    found = gaps(1.0, alpha, k, cost)
    assert sum(found.committed) == pytest.approx(1)
    lengths = np.arange(1, k + 2)
    assert np.dot(found.committed, lengths) == pytest.approx(chain_tau(alpha, k))
    assert found.mean == pytest.approx(found.long_share * found.round_seconds)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: chain_tau(1.2, 3), r"alpha = 1.2: it must lie in 0 .. 1"),
        (lambda: chain_tau(0.5, -1), r"k = -1: it must be at least 0"),
        (lambda: tau_by_depth([0.5, 2]), r"depth 2 = 2"),
        (
            lambda: alpha_of_tau(5.0, 3),
            r"tau = 5.0: chains of 3 commit between 1 and 4",
        ),
        (lambda: tree_tau(chain(2), [0.5]), r"1 probabilities for 2 nodes"),
        (lambda: break_even_alpha(0, 1.0), r"k = 0: it must be at least 1"),
        (lambda: speedup(2.0, 0.0, 0.0), r"the cost of a round = 0.0"),
        (lambda: Model(0, 1), r"parameters = 0: it must be above 0"),
        (lambda: Model(1, -1), r"kv_bytes = -1: it must be at least 0"),
        (lambda: Model(1, float("nan")), r"kv_bytes = nan: it must be at least 0"),
        (lambda: free_rows(SMALL, FAST, context=-1), r"context = -1: it must be"),
        (
            lambda: round_cost(SMALL, FAST, rows=2, c_draft=-3),
            r"c_draft = -3: it must be at least 0",
        ),
        (
            lambda: break_even_batch(SMALL, FAST, rows=2, tau=float("nan")),
            r"tau = nan: it must be at least 0",
        ),
        (
            lambda: break_even_batch(SMALL, FAST, rows=2, tau=2, most=0),
            r"most = 0: it must be at least 1",
        ),
        (lambda: offloaded_share(1.5, 8, 8, 2), r"no further expert is read"),
        (lambda: offloaded_share(1.5, 2, 8, 1), r"no further expert is read"),
        (lambda: tiles_used(4, 3, 0), r"tile = 0: it must be at least 1"),
        (lambda: Device(1, 1, memory_share=0), r"memory_share = 0"),
        (lambda: pass_seconds(SMALL, FAST, rows=0), r"rows = 0: it must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, told):
    with pytest.raises(ValueError, match=told):
        call()


@pytest.mark.parametrize("value", [float("nan"), -0.1])
def test_nan_is_refused_too(value):
    with pytest.raises(ValueError, match="it must lie in"):
        chain_tau(value, 3)


def test_published_figures_have_their_source():
    assert set(DEVICES) == {"H100", "H200", "B200", "TPU v5e", "TPU v6e"}
    for device in DEVICES.values():
        assert device.source
        assert 100 < device.device().ridge < 600
