"""Recurrent states: what it costs to keep the way back, by strategy.

A recurrent layer's state has no entry for each token, so rejecting drafts is no
truncation. Three strategies (``specjax.models.recurrence``, docs/models.md), in bytes a
layer and request. Sources: the lecture's last section; ReplaySSM for the ring.

``state`` is the bytes of a state, ``inputs`` the bytes of what one token feeds into it
(keys, values, gates). Reads and writes are counted alike.
"""

from __future__ import annotations

from specjax.analysis.law.sizes import Number, at_least, positive


def matrix_state_bytes(
    heads: int, key_dim: int, value_dim: int, item_bytes: Number = 2.0
) -> Number:
    """Bytes of a layer's state: a matrix a head."""
    return heads * key_dim * value_dim * item_bytes


def serial_traffic(state: Number) -> Number:
    """A plain step that updates the state in place: read it, write it."""
    return 2 * positive("state", state)


def snapshot_held(state: Number, rows: int) -> Number:
    """Bytes kept through a round: a state for every row of the window."""
    return at_least("rows", rows, 1) * state


def replay_held(inputs: Number, rows: int) -> Number:
    """Bytes kept through a round: the rows' inputs, from which any state follows."""
    return at_least("rows", rows, 1) * inputs


def snapshot_traffic(state: Number, rows: int) -> Number:
    """A round: read the state, write one a row, read and write the accepted one."""
    return 3 * state + snapshot_held(state, rows)


def replay_traffic(state: Number, inputs: Number, rows: int) -> Number:
    """A round: read the state to verify; then read it, fold in the rows, write it."""
    return 3 * state + 2 * replay_held(inputs, rows)


def ring_traffic(
    state: Number, inputs: Number, rows: int, *, ring: int, tau: Number = 1.0
) -> Number:
    """A round, on average: read the checkpoint and half a ring of inputs, write those
    that are committed; every ``ring`` tokens read all and write the checkpoint."""
    at_least("ring", ring, 1)
    fold = (2 * state + ring * inputs) * tau / ring
    return state + (ring / 2 + rows + tau) * inputs + fold
