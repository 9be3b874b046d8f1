"""Section D: from the start of ``specjax generate`` to its first characters."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

MAIN = "import sys; from specjax.cli import main; sys.exit(main())"
PROMPT = "The capital of France is"
DTYPES = ("float32", "bfloat16")


def measure(
    model: str, warm: int, step: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """One start with an empty compilation cache, then ``warm`` starts with it filled.

    Only the compilation cache is cold: the weights were read before.
    """
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as cache:
            for number in range(1 + warm):
                name = "warm" if number else "cold"
                step(f"{name} start in {dtype}")
                first, whole = _start(model, dtype, cache)
                yield {
                    "dtype": dtype,
                    "cache": name,
                    "first_token": first,
                    "whole": whole,
                }


def _start(model: str, dtype: str, cache: str) -> tuple[float, float]:
    """Seconds to the first byte of text, and to the end."""
    command = [sys.executable, "-c", MAIN, "generate", "--model", model]
    command += ["--dtype", dtype, "--prompt", PROMPT, "--max-tokens", "16"]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    text = process.stdout.read(1)
    first = time.perf_counter() - start
    process.communicate()
    whole = time.perf_counter() - start
    if process.returncode or not text:
        raise RuntimeError(f"`{' '.join(command[3:])}` failed; run it to see why")
    return first, whole
