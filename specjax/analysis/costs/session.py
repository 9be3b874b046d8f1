"""A calibration from beginning to end: what is timed, in which order, on what."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from specjax.analysis.costs.calibrated import (
    Calibrated,
    Curve,
    Machine,
    draft_name,
)
from specjax.analysis.costs.drafting import draft_part
from specjax.analysis.costs.machine import (
    MATRIX_FLOPS,
    matrix_parts,
    read_bytes,
    read_parts,
)
from specjax.analysis.costs.rounds import (
    ROUNDS,
    Filled,
    accept_part,
    commit_part,
    round_part,
)
from specjax.analysis.costs.timing import MOST, Part, compile_all, in_turn
from specjax.analysis.records import device_name, parameter_bytes
from specjax.decoding.interfaces import Drafter, Target

MOST_READ = 2**29
"""Bytes read to measure the memory: no more than these, whatever the model's size."""

Step = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A drafter at one longest draft."""

    name: str
    k: int
    drafter: Drafter

    @property
    def key(self) -> str:
        """In ``Curve.drafts``."""
        return draft_name(self.name, self.k)


@dataclasses.dataclass(frozen=True)
class Session:
    """What is to be timed."""

    target: Target
    weights: Any
    """The part of the target that a plain step reads."""
    candidates: Sequence[Candidate]
    widths: Sequence[int]
    """Rows of the windows; 1 is among them."""
    settings: Sequence[tuple[int, int]]
    """Batch and context, one curve each."""
    text: Sequence[int]
    """Tokens to fill contexts with, over and over."""
    seconds: float
    """To spend on timing, compilation apart."""

    @property
    def steps(self) -> int:
        """Of progress: compiling and the turns, for each setting; and the device."""
        return len(self.settings) * (1 + MOST) + 1

    def run(
        self, step: Step, *, model: str, dtype: str, about: Mapping[str, Any]
    ) -> Calibrated:
        """Time everything."""
        each = self.seconds / len(self.settings)
        curves = [self._curve(*setting, each, step) for setting in self.settings]
        step("timing reads and matrix products")
        return Calibrated(
            model=model,
            dtype=dtype,
            device=device_name(),
            weight_bytes=parameter_bytes(self.weights),
            machine=measure_machine(parameter_bytes(self.weights), dtype),
            curves=curves,
            about=dict(about),
        )

    def _curve(self, batch: int, context: int, seconds: float, step: Step) -> Curve:
        repeats = -(-(context + ROUNDS + 1) // len(self.text))
        text = (list(self.text) * repeats)[: context + ROUNDS + 1]
        step(f"compiling, {batch} requests of {context} tokens")
        widths = sorted({1, *self.widths})
        filled = Filled.make(self.target, text[:context], batch, widths[-1])
        ends = (widths[0], widths[-1])
        parts: list[Part] = [round_part(filled, rows) for rows in widths]
        parts += [accept_part(filled, rows) for rows in dict.fromkeys(ends)]
        parts += [commit_part(filled, rows) for rows in dict.fromkeys(ends)]
        parts += [
            draft_part(each.key, self.target, each.drafter, text, batch)
            for each in self.candidates
        ]
        compile_all(parts)
        times = in_turn(parts, seconds, step)
        return Curve(
            batch=batch,
            context=context,
            rounds={rows: times[f"round {rows}"] for rows in widths},
            accept={rows: statistics.median(times[f"accept {rows}"]) for rows in ends},
            commit={rows: statistics.median(times[f"commit {rows}"]) for rows in ends},
            drafts={each.key: times[each.key] for each in self.candidates},
        )


def measure_machine(weight_bytes: int, dtype: str) -> Machine:
    """Rates of the device; the best of a few, for only disturbance makes them less."""
    size = min(weight_bytes, MOST_READ)
    types = tuple(dict.fromkeys(("float32", "bfloat16", _matrix_type(dtype))))
    reads, products = read_parts(size), matrix_parts(types)
    compile_all([*reads, *products])
    times = in_turn([*reads, *products], 3.0, lambda _: None, least=3, most=7)
    fastest = {name: min(values) for name, values in times.items()}
    return Machine(
        bandwidth=read_bytes(size) / min(fastest[part.name] for part in reads),
        matrix_flops={name: MATRIX_FLOPS / fastest[f"matrix {name}"] for name in types},
    )


def _matrix_type(dtype: str) -> str:
    """int8 weights meet int8 activations; float64 only where JAX has it."""
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        return "float32"
    return dtype
