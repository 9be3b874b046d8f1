"""The other decoders, each request one line to ``peers/worker.py``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parent.parent / "peers" / "worker.py"
ARMS = (
    "hf-float32",
    "hf-bfloat16",
    "ct2-float32",
    "ort-float32",
    "hf-float32-lookup",
    "hf-bfloat16-lookup",
)


class Peers:
    """A worker process. It inherits the cores of this one."""

    def __init__(self, python: Path, models: Path, threads: int, log: Path) -> None:
        command = [str(python), str(WORKER), str(models), "--threads", str(threads)]
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peers' worker ended: see {self._log.name}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{request.get('arm')}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the worker, so that its processor time is known."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._log.close()
