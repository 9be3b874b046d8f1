"""Every number of the digest of posts that follows from a formula."""

import pytest

from specjax.analysis.law.experts import coverage, expert_reads
from specjax.analysis.law.rollback import (
    matrix_state_bytes,
    replay_traffic,
    ring_traffic,
    serial_traffic,
    snapshot_traffic,
)
from specjax.analysis.law.tiles import tile_drafts, tiles_used


@pytest.mark.parametrize(
    ("group", "drafts"), [(1, 127), (4, 31), (5, 24.6), (8, 15), (16, 7)]
)
def test_drafts_that_fill_a_tile(group, drafts):
    assert tile_drafts(group) == pytest.approx(drafts)
    if drafts == int(drafts):
        assert group * (1 + drafts) == 128
        assert tiles_used(group, int(drafts)) == 1
        assert tiles_used(group, int(drafts) + 1) == 2


def test_a_ring_halves_the_traffic_of_a_state():
    """ "Roughly half": a step reads the checkpoint and seldom writes it. With short
    rings the inputs and the folds show, so it is never quite half."""
    state = matrix_state_bytes(heads=1, key_dim=128, value_dim=128)
    inputs = 4 * 128 * 2
    ratios = {
        ring: ring_traffic(state, inputs, rows=1, ring=ring) / serial_traffic(state)
        for ring in (4, 8, 16, 32)
    }
    assert all(0.5 < ratio < 0.9 for ratio in ratios.values())
    assert min(ratios, key=lambda ring: ratios[ring]) in (8, 16)
    # and without anything but the state it is exactly a half, in the limit
    bare = ring_traffic(state, 0, rows=1, ring=10**9) / serial_traffic(state)
    assert bare == pytest.approx(0.5)


def test_strategies_in_order_of_traffic():
    state, inputs = 2**15, 2**10
    for rows in (4, 8, 16):
        ring = ring_traffic(state, inputs, rows, ring=16)
        replay = replay_traffic(state, inputs, rows)
        assert ring < replay < snapshot_traffic(state, rows)


def test_throughput_at_the_stated_target():
    """718 to 1 997 is 2.78 times, "more than 2.5"."""
    assert pytest.approx(2.78, abs=5e-3) == 1997 / 718


def test_four_times_at_concurrency_one():
    assert 1000 / 250 == 4


def test_experts_of_k3():
    """16 of 896: a window of eight rows reads 7.5 times the experts of one row."""
    assert coverage(16, 896, 1) == pytest.approx(16 / 896)
    assert expert_reads(16, 896, 8) == pytest.approx(7.52, abs=5e-3)
    assert coverage(16, 896, 10**4) == pytest.approx(1)
