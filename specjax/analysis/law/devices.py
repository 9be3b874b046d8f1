"""Published figures of accelerators: dense bfloat16 rate, memory, bandwidth."""

from __future__ import annotations

import dataclasses

from specjax.analysis.law.sizes import Device, Number


@dataclasses.dataclass(frozen=True)
class Published:
    """A device as its maker describes it, per chip."""

    bandwidth: Number
    """Bytes a second."""
    flops: Number
    """Of bfloat16, dense: where a data sheet prints the figure for 2:4 sparsity, half
    of it."""
    memory: Number
    """Bytes."""
    source: str

    def device(
        self, *, memory_share: Number = 1.0, compute_share: Number = 1.0
    ) -> Device:
        """The device at the shares of both that a step attains."""
        return Device(self.bandwidth, self.flops, memory_share, compute_share)


DEVICES: dict[str, Published] = {
    "H100": Published(
        3.35e12, 989e12, 80e9, "NVIDIA H100 data sheet, SXM5 (1 979 TFLOP/s sparse)"
    ),
    "H200": Published(
        4.8e12, 989e12, 141e9, "NVIDIA H200 data sheet, SXM (1 979 TFLOP/s sparse)"
    ),
    "B200": Published(
        8e12, 2250e12, 180e9, "NVIDIA HGX B200 data sheet, a GPU (4 500 TFLOP/s sparse)"
    ),
    "TPU v5e": Published(
        819e9,
        197e12,
        16e9,
        "Google Cloud, TPU v5e (docs.cloud.google.com/tpu/docs/v5e)",
    ),
    "TPU v6e": Published(
        1638e9,
        918e12,
        32e9,
        "Google Cloud, TPU v6e (docs.cloud.google.com/tpu/docs/v6e)",
    ),
}
"""By name."""

MODELS = {
    "llama-3.1-8b": (8.03e9, 32 * 2 * 8 * 128 * 2),
    "llama-3.1-70b": (70e9, 80 * 2 * 8 * 128 * 2),
}
"""Parameters, and bytes of keys and values a token in bfloat16."""
