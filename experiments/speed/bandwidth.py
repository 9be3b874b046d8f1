"""How fast the cores read memory: the floor under a pass over the weights.

One process a core, each pinned to its core, reads its own share of an array as large as
the weights, over and over for a moment that begins in all of them at once. Reading is
``numpy.max`` over float32, a loop of vector loads that does little else. The rates of
the cores are added up; the best of several moments counts, since nothing but
disturbance makes reading slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

MOMENT = 0.6
LEAD = 2.5
"""Seconds for the processes to start and fill their arrays."""


def measure(size: int, cores: list[int], moments: int = 3) -> dict[str, Any]:
    """Bytes a second, for ``size`` bytes in all."""
    start = time.time() + LEAD
    share = size // len(cores)
    commands = [
        [sys.executable, __file__, str(core), str(share), str(start), str(moments)]
        for core in cores
    ]
    children = [subprocess.Popen(c, stdout=subprocess.PIPE) for c in commands]
    rates = [json.loads(child.communicate()[0]) for child in children]
    together = [sum(parts) for parts in zip(*rates, strict=True)]
    return {"bytes": size, "rate": max(together), "rates": together}


def read_for_a_while(core: int, size: int, start: float, moments: int) -> list[float]:
    """One process's part."""
    os.sched_setaffinity(0, {core})
    import numpy as np

    array = np.ones(size // 4, np.float32)
    rates = []
    for moment in range(moments):
        begin = start + moment * 2 * MOMENT
        time.sleep(max(0.0, begin - time.time()))
        first, read = time.perf_counter(), 0
        while time.time() < begin + MOMENT or read == 0:
            array.max()
            read += array.nbytes
        rates.append(read / (time.perf_counter() - first))
    return rates


if __name__ == "__main__":
    core, size, start, moments = sys.argv[1:]
    found = read_for_a_while(int(core), int(size), float(start), int(moments))
    print(json.dumps(found))
