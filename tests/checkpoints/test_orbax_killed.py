"""Runs whose process is killed, and that go on in another one, on other devices."""

import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.checkpoints.orbax import new_run, resume_run
from specjax.decoding.generate import Completion, Generation, Snapshot, Times
from specjax.decoding.types import FinishReason

SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import jax
from specjax.acceptance import Coupled
from specjax.checkpoints.orbax import describe_run, new_run, resume_run, steps
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Generation
from specjax.decoding.requests import Request
from specjax.drafters import DraftModel
from specjax.testing.markov import markov

engine = Engine(
    markov(0, 12), DraftModel(markov(1, 12), 3), Coupled(),
    EngineOptions(rounds_per_call=2, prefill_width=4),
)
rows = [
    Request(prompt_ids=(1, 2, row + 1), max_tokens=24 + row, temperature=0.9, seed=row)
    for row in range(8)
]
manifest = describe_run(engine, rows)

def resume(folder):
    assert jax.device_count() == 1
    with resume_run(Path(folder), manifest) as run:
        generation = Generation(engine, rows, resume=run.restore(engine.start(rows)))
        for _ in run.saving(generation, 4):
            pass
    print([list(row.ids) for row in generation.completions])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def start(folder, moment, count):
    # begin a run, and be killed at the so-many-th of such moments
    left = count

    def met(now):
        nonlocal left
        left -= now == moment
        if not left:
            die()

    write_sums = steps.write_sums

    def sealing(folder, skip):
        met("written")
        write_sums(folder, skip)
        met("sealed")

    steps.write_sums = sealing
    with new_run(Path(folder), manifest) as run:
        for _ in run.saving(Generation(engine, rows), 4):
            if moment == "milliseconds" and left == count:
                threading.Timer(count / 1000, die).start()
                left -= 1
            met("round")
    if moment != "milliseconds":
        raise SystemExit(f"{moment} {count} never came")
"""


def in_subprocess(calls: str) -> subprocess.CompletedProcess:
    """Run calls of the script above, on one device."""
    quiet = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    environment = {n: v for n, v in os.environ.items() if n not in quiet}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + calls],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def script() -> dict:
    """What the script defines, in this process: engine, rows, manifest."""
    names: dict = {}
    exec(SCRIPT, names)
    return names


def go_on(folder, script, start) -> Generation:
    """To the end, from a state whose place is the start's."""
    with resume_run(folder, script["manifest"]) as run:
        snapshot = run.restore(start)
        generation = Generation(script["engine"], script["rows"], resume=snapshot)
        for _ in run.saving(generation, 4):
            pass
    return generation


@pytest.fixture(scope="module")
def expected(script) -> list[Completion]:
    generation = Generation(script["engine"], script["rows"])
    for _ in generation:
        pass
    return generation.completions


def spread(state, devices):
    """A state with its rows spread over the devices."""
    mesh = Mesh(np.array(devices), ("batch",))
    to = NamedSharding(mesh, PartitionSpec("batch"))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, to), state)


def test_a_killed_run_is_taken_up_in_another_process_on_other_devices(
    tmp_path, cpu_devices, script, expected
):
    engine, rows = script["engine"], script["rows"]
    empty = tuple(
        Completion(tuple(row.prompt_ids), (), None, FinishReason.NONE, (), None)
        for row in rows
    )

    # begun here on eight devices, and taken up there on one
    with new_run(tmp_path / "eight", script["manifest"]) as run:
        state = engine.prefill(spread(engine.start(rows), cpu_devices))
        begun = Snapshot(state, empty, Times(0.0, 0.0), rounds=0)
        saving = run.saving(generation := Generation(engine, rows, resume=begun), 4)
        for _ in range(3):
            next(saving)
        assert len(generation.snapshot.state.tokens.devices()) == 8
    # the other way round, and killed in between, while the third step is written
    done = in_subprocess(
        f"resume({str(tmp_path / 'eight')!r})\n"
        f"start({str(tmp_path / 'one')!r}, 'written', 3)"
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.strip() == str([list(row.ids) for row in expected])
    assert done.stderr == ""

    left = sorted(p.name for p in (tmp_path / "one" / "steps").iterdir())
    assert left == ["12.orbax-checkpoint-tmp", "4", "8"]
    start = spread(engine.start(rows), cpu_devices)
    resumed = go_on(tmp_path / "one", script, start)
    assert resumed.completions == expected
    assert len(resumed.final_state.tokens.devices()) == 8
    assert not list((tmp_path / "one" / "steps").glob("*tmp*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "count"),
    [
        *(("round", n) for n in (1, 2, 3, 4, 5, 6, 7)),
        *(("written", n) for n in (1, 2, 4)),
        *(("sealed", n) for n in (1, 2, 3, 4)),
        *(("milliseconds", n) for n in (1, 20, 60, 110, 170, 240)),
    ],
)
def test_killed_at_any_moment(moment, count, tmp_path, script, expected):
    done = in_subprocess(f"start({str(tmp_path)!r}, {moment!r}, {count})")
    assert done.returncode == -signal.SIGKILL or moment == "milliseconds", done.stderr
    start = script["engine"].start(script["rows"])
    assert go_on(tmp_path, script, start).completions == expected
