"""Expert parallelism: what goes over the network for each token of a step.

Every token is sent to its experts (dispatch) and their outputs come back (combine), in
every layer that has experts. A window of k + 1 rows sends k + 1 times as much. Source:
the lecture's section on expert parallelism.
"""

from __future__ import annotations

from specjax.analysis.law.sizes import Number, at_least, positive


def dispatch_bytes(top_k: int, hidden: int, item_bytes: Number = 1.0) -> Number:
    """Bytes a token and layer on the way to its experts; float8 by default."""
    return at_least("top_k", top_k, 1) * hidden * item_bytes


def combine_bytes(top_k: int, hidden: int, item_bytes: Number = 2.0) -> Number:
    """Bytes a token and layer on the way back; bfloat16 by default."""
    return at_least("top_k", top_k, 1) * hidden * item_bytes


def all_to_all_bytes(
    top_k: int, hidden: int, *, rows: int = 1, layers: int = 1
) -> Number:
    """Bytes a request and step, of ``rows`` window rows in ``layers`` layers."""
    at_least("rows", rows, 1)
    token = dispatch_bytes(top_k, hidden) + combine_bytes(top_k, hidden)
    return rows * layers * token


def narrower(memory_bandwidth: Number, link_bandwidth: Number) -> Number:
    """How many times slower a link is than the memory."""
    return memory_bandwidth / positive("link_bandwidth", link_bandwidth)
