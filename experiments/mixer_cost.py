"""What one layer of each kind of mixer costs: a token, a window, a commit, a chunk.

    python experiments/mixer_cost.py
    python experiments/mixer_cost.py --quick

Layers of the sizes of released models (tests/data/configs), with random weights,
projections and convolution included, over `--history` committed tokens where the layer
keeps tokens. *T(8)/T(1)* says what a window of eight costs beside a plain step, and
*commit* what taking all eight in costs beside the window. Times are wall times, the
least of several; run it alone on the machine. `--prefill` instead puts a prompt through
the engine on a hybrid of four blocks (three of GDN, one of attention, no feed-forwards)
and gives tokens a second by chunk width.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import tyro

from specjax.acceptance import Greedy
from specjax.checkpoints.load import decoder_config
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Generation
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance, Window
from specjax.drafters import NullDrafter
from specjax.models.build import Builder, WeightType
from specjax.models.config import BlockConfig, DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.families.parts import assemble
from specjax.models.mixers.base import Aids
from specjax.models.norms import RMSNorm
from specjax.models.stack import Block, Sublayer, rope_of, rotary_tables
from specjax.testing.toy_mixers import any_mixer
from specjax.testing.toys import RandomReader

HERE = Path(__file__).resolve().parent
CONFIGS, RESULTS = HERE.parent / "tests/data/configs", HERE / "results/mixer_cost"

LAYERS = {
    "GDN": ("qwen3-next-80b-a3b", 0),
    "KDA": ("kimi-linear-48b-a3b", 0),
    "Mamba2": ("nemotron-nano-9b-v2", 0),
    "short convolution": ("lfm2.5-1.2b", 0),
    "attention": ("qwen3-4b", 0),
    "gated attention": ("qwen3-next-80b-a3b", 3),
    "latent attention": ("deepseek-v3", 0),
}
"""A released model, and a block of it with this mixer."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Time one layer of each mixer."""

    layers: tuple[str, ...] = tuple(LAYERS)
    dtype: str = "float32"
    chunks: tuple[int, ...] = (64, 128, 256)
    history: int = 512
    prefill: bool = False
    """Time the engine's prefill of `--prompt` tokens instead."""
    prompt: int = 2048
    repeats: int = 7
    quick: bool = False
    """GDN and attention, one chunk, few repeats."""
    out: Path = RESULTS


def released(name: str) -> DecoderConfig:
    """A released model's configuration."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    return decoder_config(raw, CONFIGS / f"{name}.json")[1]


def least(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def chain_window(width: int, start: int) -> Window:
    """A chain behind ``start`` tokens."""
    rows = jnp.arange(width, dtype=jnp.int32)[None]
    return Window(
        tokens=rows,
        positions=start + rows,
        ancestors=jnp.tril(jnp.ones((1, width, width), bool)),
        valid=jnp.ones((1, width), bool),
    )


@jax.jit
def mix(mixer: Any, x: jax.Array, window: Window, state: Any, lengths: jax.Array):
    """The layer over a window."""
    tables = rotary_tables([mixer], window.positions, x.dtype)
    return mixer.mix(x, window, state, lengths, Aids(rotary=tables.get(rope_of(mixer))))


@partial(jax.jit, donate_argnames="state")
def take(mixer: Any, state: Any, pending: Any, acceptance: Acceptance, lengths):
    """The layer's commit, in place."""
    return mixer.commit(state, pending, acceptance, lengths)


def layer_times(name: str, options: Options) -> dict[str, Any]:
    """One kind of layer."""
    model, at = LAYERS[name]
    config = released(model)
    mixer_config = config.blocks[at].mixer
    assert mixer_config is not None
    make = Builder(RandomReader(0), WeightType(options.dtype))
    mixer: Any = any_mixer("layer", config.hidden_size, mixer_config, make)
    draw = np.random.default_rng(0)
    capacity, history = options.history + max(*options.chunks, 8), options.history
    lengths = jnp.full((1,), history, jnp.int32)
    state = mixer.init_state(1, capacity)

    def timed(width: int) -> float:
        size = (1, width, config.hidden_size)
        x = jnp.asarray(draw.normal(size=size), jnp.float32)
        window = chain_window(width, history)
        return least(lambda: mix(mixer, x, window, state, lengths), options.repeats)

    row = {"layer": name, "model": model, "hidden": config.hidden_size}
    row |= {f"W{width}_ms": timed(width) for width in (1, 8)}
    row["commit_ms"] = _commit_time(
        mixer, config.hidden_size, capacity, history, options
    )
    row |= {f"chunk{width}_ms": timed(width) for width in options.chunks}
    return row


def _commit_time(
    mixer: Any, hidden: int, capacity: int, history: int, options: Options
) -> float:
    """All eight rows of a window."""
    x = jnp.ones((1, 8, hidden), jnp.float32)
    lengths = jnp.full((1,), history, jnp.int32)
    rows = jnp.arange(8, dtype=jnp.int32)[None]
    taken = Acceptance(rows, rows, jnp.full((1,), 8, jnp.int32))
    held = [mixer.init_state(1, capacity)]
    _, pending = mix(mixer, x, chain_window(8, history), held[0], lengths)

    def once() -> Any:
        held[0] = take(mixer, held[0], pending, taken, lengths)
        return held[0]

    return least(once, options.repeats)


def hybrid(dtype: str) -> Decoder:
    """Four blocks of Qwen3-Next, mixers alone, with a small vocabulary."""
    base = released("qwen3-next-80b-a3b")
    config = dataclasses.replace(
        base,
        vocab_size=1024,
        blocks=tuple(
            BlockConfig(mixer=b.mixer, feedforward=None) for b in base.blocks[:4]
        ),
    )
    make, blocks = Builder(RandomReader(0), WeightType(dtype)), []
    for i, block in enumerate(config.blocks):
        assert block.mixer is not None
        body = any_mixer(f"layers.{i}", config.hidden_size, block.mixer, make)
        norm = RMSNorm(weight=jnp.ones((config.hidden_size,)), eps=config.norm_eps)
        blocks.append(Block(Sublayer(norm, body), None))
    return assemble(config, tuple(blocks), make)


def prefill_times(options: Options) -> list[dict[str, Any]]:
    """The engine's own prefill, by chunk width; the first run compiles."""
    decoder, rows = hybrid(options.dtype), []
    prompt = [i % 1000 for i in range(options.prompt)]
    for width in options.chunks:
        settings = EngineOptions(prefill_width=width)
        engine = Engine(decoder, NullDrafter(), Greedy(), settings)
        seconds = []
        for _ in range(min(options.repeats, 3) + 1):
            generation = Generation(engine, [Request(prompt_ids=prompt, max_tokens=1)])
            for _ in generation:
                pass
            seconds.append(generation.times.prefill)
        spent = min(seconds[1:])
        rows.append(
            {
                "chunk": width,
                "seconds": spent,
                "tokens_per_second": options.prompt / spent,
            }
        )
        print(_prefill_line(rows[-1]), flush=True)
    return rows


HEAD = """\
| layer | of | W=1 ms | W=8 ms | T(8)/T(1) | commit of 8 ms | of the window |{chunks}
| --- | --- | ---: | ---: | ---: | ---: | ---: |{lines}"""
PREFILL_HEAD = """\
| chunk | seconds | tokens/s |
| ---: | ---: | ---: |"""


def _head(options: Options) -> str:
    names = "".join(f" {width} rows ms |" for width in options.chunks)
    return HEAD.format(chunks=names, lines=" ---: |" * len(options.chunks))


def _line(row: dict[str, Any]) -> str:
    one, eight, commit_ = row["W1_ms"], row["W8_ms"], row["commit_ms"]
    chunks = "".join(f" {row[k]:.1f} |" for k in row if k.startswith("chunk"))
    return (
        f"| {row['layer']} | {row['model']} | {one:.2f} | {eight:.2f} | "
        f"{eight / one:.2f}× | {commit_:.2f} | {commit_ / eight:.0%} |{chunks}"
    )


def _prefill_line(row: dict[str, Any]) -> str:
    return f"| {row['chunk']} | {row['seconds']:.2f} | {row['tokens_per_second']:.0f} |"


def main(options: Options) -> None:
    """Measure, print, write."""
    if options.quick:
        options = dataclasses.replace(
            options, layers=("GDN", "attention"), chunks=(64,), repeats=3, prompt=256
        )
    if options.prefill:
        head, line, name = PREFILL_HEAD, _prefill_line, f"prefill-{options.dtype}"
        print(head)
        rows = prefill_times(options)
    else:
        head, line, name = _head(options), _line, f"layers-{options.dtype}"
        print(head)
        rows = []
        for layer in options.layers:
            rows.append(layer_times(layer, options))
            print(_line(rows[-1]), flush=True)
    result = reporting.about(options) | {"rows": rows}
    told = f"{options.dtype}, least of {options.repeats}; {reporting.told(result)}"
    lines = [f"# What a layer costs\n\n{told}\n", head, *map(line, rows)]
    reporting.write(options.out, name, result, "\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
