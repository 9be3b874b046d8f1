"""What a pass over a window costs, and how many rows are free.

A pass reads all weights once and the keys and values of each request, whatever the
number of rows; it multiplies once a row. So its time is the larger of two: memory,
which does not grow with the rows, and arithmetic, which grows in proportion. Source:
the lecture's section on verification; the roofline is Williams, Waterman and Patterson
(2009).

The lecture counts ``k`` rows where a window has ``k + 1`` (the anchor is one), so the
functions here take ``rows``.
"""

from __future__ import annotations

from specjax.analysis.law.sizes import Device, Model, Number, at_least


def memory_seconds(
    model: Model, device: Device, *, batch: Number = 1, context: Number = 0
) -> float:
    """Seconds to read the weights, and ``context`` tokens' keys and values a request.

    T_mem = (2P + B L kv) / (beta MBU), for weights of two bytes.
    """
    at_least("context", context, 0)
    read = model.bytes + batch * context * model.kv_bytes
    return read / (device.bandwidth * device.memory_share)


def compute_seconds(model: Model, device: Device, *, rows: Number) -> float:
    """Seconds to multiply ``rows`` tokens, of all requests together.

    T_comp = rows 2P / (pi MFU); attention's own products are left out.
    """
    return rows * model.flops / (device.flops * device.compute_share)


def pass_seconds(
    model: Model,
    device: Device,
    *,
    rows: Number = 1,
    batch: Number = 1,
    context: Number = 0,
) -> float:
    """Seconds of a pass with ``rows`` window rows a request: the larger of the two."""
    at_least("rows", rows, 1)
    at_least("batch", batch, 1)
    return max(
        memory_seconds(model, device, batch=batch, context=context),
        compute_seconds(model, device, rows=rows * batch),
    )


def verify_cost(
    model: Model,
    device: Device,
    *,
    rows: Number,
    batch: Number = 1,
    context: Number = 0,
) -> float:
    """``c_verify``: a pass of ``rows`` rows over one of a single row."""
    wide = pass_seconds(model, device, rows=rows, batch=batch, context=context)
    return wide / pass_seconds(model, device, batch=batch, context=context)


def free_rows(
    model: Model, device: Device, *, batch: Number = 1, context: Number = 0
) -> float:
    """Rows a request whose arithmetic hides behind the reading: the lecture's ``k*``.

    k* = ridge (MFU / MBU) (2P + B L kv) / (2P B), and no fewer than 0.
    """
    at_least("batch", batch, 1)
    one_row = compute_seconds(model, device, rows=batch)
    return memory_seconds(model, device, batch=batch, context=context) / one_row


def rows_a_request(free: Number, batch: Number) -> float:
    """A budget of rows a step, shared by a batch: 150 rows at B = 32 are 4.7 each."""
    return free / at_least("batch", batch, 1)


def intensity(
    model: Model, *, rows: Number, batch: Number = 1, context: Number = 0
) -> float:
    """FLOP a byte of a pass: 2P B rows / (2P + B L kv), for weights of two bytes."""
    read = model.bytes + batch * context * model.kv_bytes
    return model.flops * batch * rows / read
