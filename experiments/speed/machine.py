"""The machine: which cores are used, what they are, and who else used them."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)


def pin(threads: int) -> list[int]:
    """Keep this process and all it starts to the first cores it may use."""
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("cores cannot be chosen on this system: run it on Linux")
    if "jax" in sys.modules or "numpy" in sys.modules:
        raise RuntimeError("pin() comes too late: a library has counted the cores")
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(allowed):
        raise SystemExit(f"--threads {threads}: choose from 1 to {len(allowed)}")
    os.sched_setaffinity(0, allowed[:threads])
    return allowed[:threads]


def describe() -> dict[str, Any]:
    """What decides the speed, as far as the system tells."""
    info = _cpuinfo()
    present = set(info.get("flags", "").split())
    model = info.get("model name", platform.processor() or platform.machine())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in present],
        "last_level_cache": _last_level_cache(),
        "memory_gib": round(_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "virtual": "hypervisor" in present,
    }


def slug(machine: dict[str, Any]) -> str:
    """A file name's worth of a description."""
    words = re.sub(r"\((r|tm)\)|@.*", " ", str(machine["cpu"]), flags=re.IGNORECASE)
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return f"{name}-{machine['cores']}c"


class Usage:
    """Processor time of everybody and of us, from one moment to another."""

    def __init__(self) -> None:
        self._start = self._now()
        self.load_before = os.getloadavg()

    def report(self) -> dict[str, Any]:
        """Shares are of all cores' time; to be asked when all children have ended."""
        busy, stolen, ours, wall = (
            now - then for now, then in zip(self._now(), self._start, strict=True)
        )
        whole = wall * (os.cpu_count() or 1)
        return {
            "load_before": list(self.load_before),
            "load_after": list(os.getloadavg()),
            "seconds": wall,
            "ours": ours / whole,
            "others": max(0.0, busy - ours) / whole,
            "stolen": stolen / whole,
        }

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        usages = [resource.getrusage(kind) for kind in kinds]
        ours = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        busy, stolen = _processor_seconds()
        return busy, stolen, ours, time.monotonic()


def _processor_seconds() -> tuple[float, float]:
    """Seconds that the cores worked, and that the host kept them waiting."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = (int(x) / tick for x in fields)
    return user + nice + system + irq + softirq, steal


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _last_level_cache() -> str | None:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return sizes[-1].read_text().strip() if sizes else None


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
