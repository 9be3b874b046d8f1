"""What accepting costs, beside the pass that it follows, at SmolLM2's vocabulary.

    python experiments/acceptance_cost.py
    python experiments/acceptance_cost.py --quick

The worst case: a chain of which every draft is accepted, so that every row's law is
worked out. Times are CPU time of one thread, the least of several runs; pin the process
to one core. *per token* divides a rule's time by that of drawing one token in plain
decoding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import tyro

from specjax.acceptance import RULES
from specjax.checkpoints import load
from specjax.decoding.draws import RoundDraws
from specjax.decoding.laws import Laws
from specjax.decoding.types import Proposal, Sampling
from specjax.decoding.windows import draft_window
from specjax.models.build import WeightType

RESULTS = Path(__file__).resolve().parent / "results" / "acceptance_cost"
SAMPLED = ("coupled", "rejection", "block", "traversal")


@dataclasses.dataclass(frozen=True)
class Options:
    """Time acceptance rules and the passes they follow."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 8)
    widths: tuple[int, ...] = (8, 16, 64)
    repeats: int = 7
    quick: bool = False
    """One batch, one width, few repeats."""
    out: Path = RESULTS


def least(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of CPU time."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(run())
        times.append(time.process_time() - start)
    return min(times) * 1e3


def inputs(batch: int, width: int, vocab: int, *, drawn: bool) -> tuple:
    """A chain that is accepted to its end, and the logits that say so."""
    draw = np.random.default_rng(0)
    nodes = width - 1
    tokens = draw.integers(0, vocab, (batch, nodes)).astype(np.int32)
    logits = draw.normal(size=(batch, width, vocab)).astype(np.float32)
    rows = np.arange(batch)[:, None]
    logits[rows, np.arange(nodes), tokens] += 40
    law = jax.nn.log_softmax(jnp.asarray(logits), axis=-1) if drawn else None
    parents = np.tile(np.arange(nodes, dtype=np.int32) - 1, (batch, 1))
    count = jnp.full((batch,), nodes, jnp.int32)
    proposal = Proposal(jnp.asarray(tokens), jnp.asarray(parents), count, law)
    at = jnp.full((batch,), 100, jnp.int32)
    window = draft_window(at, at, at, proposal, vocab)
    return proposal, window, jnp.asarray(logits)


def accept_time(name: str, batch: int, width: int, vocab: int, repeats: int) -> float:
    """One call of the rule."""
    rule, sampled = RULES[name].build(), name != "greedy"
    drawn = name in ("rejection", "block", "traversal")
    proposal, window, logits = inputs(batch, width, vocab, drawn=drawn)
    temperature = jnp.ones((batch,), jnp.float32) if sampled else None
    seeds = jnp.arange(batch, dtype=jnp.uint32)

    @jax.jit
    def accept(proposal, window, logits):
        laws = Laws(logits, window, Sampling(temperature=temperature), None)
        draws = RoundDraws(seeds, window.positions[:, 0])
        return rule.accept(proposal, window, laws, draws, max_depth=width - 1)

    num = accept(proposal, window, logits).num_tokens
    assert num.tolist() == [width] * batch, f"{name} accepts {num}"
    return least(lambda: accept(proposal, window, logits), repeats)


def pass_time(decoder: Any, batch: int, width: int, repeats: int) -> float:
    """One pass of the target, over 128 committed tokens."""
    _, window, _ = inputs(batch, width, decoder.vocab_size, drawn=False)
    state = decoder.init(batch, 256)
    state = state.replace(lengths=jnp.full((batch,), 99, jnp.int32))
    verify = jax.jit(lambda model, state, window: model.verify(state, window))
    return least(lambda: verify(decoder, state, window), repeats)


def run(options: Options) -> dict[str, Any]:
    """All rules, batches and widths."""
    decoder = load(options.model, WeightType(options.dtype)).decoder
    vocab, rows = decoder.vocab_size, []
    for batch in options.batches:
        plain = accept_time("coupled", batch, 1, vocab, options.repeats)
        for width in options.widths:
            passed = pass_time(decoder, batch, width, options.repeats)
            for name in ("greedy", *SAMPLED):
                spent = accept_time(name, batch, width, vocab, options.repeats)
                rows.append(
                    {
                        "batch": batch,
                        "width": width,
                        "rule": name,
                        "accept_ms": spent,
                        "pass_ms": passed,
                        "plain_draw_ms": plain,
                    }
                )
                print(_line(rows[-1]), flush=True)
    return reporting.about(options) | {"rows": rows}


HEAD = """\
| batch | W | rule | accept ms | pass ms | share of the pass | per token |
| ---: | ---: | --- | ---: | ---: | ---: | ---: |"""


def _line(row: dict[str, Any]) -> str:
    share = row["accept_ms"] / row["pass_ms"]
    each = row["accept_ms"] / row["width"] / row["plain_draw_ms"]
    return (
        f"| {row['batch']} | {row['width']} | {row['rule']} | {row['accept_ms']:.2f} | "
        f"{row['pass_ms']:.1f} | {share:.1%} | {each:.2f}× |"
    )


def main(options: Options) -> None:
    """Measure, print, write."""
    if options.quick:
        options = dataclasses.replace(options, batches=(1,), widths=(8,), repeats=3)
    print(HEAD)
    result = run(options)
    about = (
        f"{options.model}, {options.dtype}, every draft of a chain accepted; CPU time, "
        f"least of {options.repeats}; {reporting.told(result)}"
    )
    lines = [f"# What accepting costs\n\n{about}\n", HEAD, *map(_line, result["rows"])]
    reporting.write(options.out, "cost", result, "\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
