"""Where bits differ between ways of decoding one text, and what it costs that none do.

    python experiments/byte_identity.py --model smollm2-135m
    python experiments/byte_identity.py --model tests/data/oracles/qwen3_5 --tokens 64

A text is decoded by the target through windows of several widths, each committed whole,
so that every way has the same prefix; the first, one row at a time, is plain decoding.

- *dead row*: does a padding row behind a plain step change its logits?
- *widths*: at how many positions are the logits the same bits as plain decoding's, how
  far are they off, and where is the first position whose argmax differs, with which
  margin (the gap between plain decoding's two largest logits there)?
- *speculation*: the first token of greedy n-gram decoding that is not plain decoding's.

All of it by default and in invariant mode (`specjax.models.invariant`), and the time of
a pass of each width in both, the modes taking turns.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import tyro
from rich.progress import track

from specjax.acceptance import Greedy
from specjax.checkpoints import Checkpoint, load, prompt_ids
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance
from specjax.decoding.windows import chunk_window
from specjax.drafters import NGram, NullDrafter
from specjax.models.build import WeightType
from specjax.models.decoder import Decoder, pad_rows
from specjax.models.invariant import TILE, NotInvariant, invariant, window_bits
from specjax.prompts import bundled_prompts

RESULTS = Path(__file__).resolve().parent / "results" / "byte_identity"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare the bits of logits between window widths, by default and invariant."""

    model: str = "smollm2-135m"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    widths: tuple[int, ...] = (1, 2, 3, 4, 5, 8, 9, 16, 64)
    tokens: int = 128
    """Length of the text, and of the speculative run."""
    tile: int = TILE
    """Rows of a product in invariant mode."""
    drafts: int = 8
    repeats: int = 7
    """Of timings."""
    quick: bool = False
    """Three widths, 48 tokens, one dtype."""
    out: Path = RESULTS


def compare(
    decoder: Decoder, ids: np.ndarray, widths: tuple[int, ...], label: str
) -> list[dict[str, Any]]:
    """Every width beside windows of one row."""
    plain = np.stack(window_bits(decoder, ids, 1, batch=1)[: len(ids)])
    rows = []
    for width in track(widths, description=label):
        logits = np.stack(window_bits(decoder, ids, width, batch=1)[: len(ids)])
        same = (logits == plain).all(axis=1)
        differs = np.flatnonzero(logits.argmax(1) != plain.argmax(1))
        first = int(differs[0]) if len(differs) else None
        rows.append(
            {
                "width": width,
                "identical_positions": int(same.sum()),
                "positions": len(ids),
                "largest_difference": float(np.abs(logits - plain).max()),
                "first_other_argmax": first,
                "margin": None if first is None else margin(plain[first]),
            }
        )
    return rows


def margin(logits: np.ndarray) -> float:
    """Between the two largest."""
    second, top = np.partition(logits, -2)[-2:]
    return float(top - second)


def dead_row(decoder: Decoder, ids: np.ndarray) -> dict[str, Any]:
    """Plain steps with a padding row behind each, against those without."""
    plain = np.stack(window_bits(decoder, ids, 1, batch=1)[: len(ids)])
    state = decoder.init(1, -(-len(ids) // 128) * 128)
    tokens = jnp.asarray(ids[None], jnp.int32)

    @jax.jit
    def step(decoder, state, tokens, start):
        stop = jnp.full((1,), tokens.shape[1], jnp.int32)
        narrow = chunk_window(tokens, start[None], stop, 1)
        verdict = decoder.verify(state, pad_rows(narrow, 2))
        path = jnp.zeros((1, 1), jnp.int32)
        taken = Acceptance(path, narrow.tokens, jnp.ones((1,), jnp.int32))
        return decoder.commit(state, verdict.pending, taken), verdict.logits[0, 0]

    rows = []
    for start in range(len(ids)):
        state, logits = step(decoder, state, tokens, jnp.int32(start))
        rows.append(np.asarray(logits))
    got = np.stack(rows)
    return {
        "identical_positions": int((got == plain).all(axis=1).sum()),
        "positions": len(ids),
        "largest_difference": float(np.abs(got - plain).max()),
    }


def speculation(
    decoder: Decoder, prompt: list[int], options: Options
) -> dict[str, Any]:
    """Greedy n-gram decoding against plain decoding."""
    request = Request(prompt_ids=prompt, max_tokens=options.tokens)
    settings = EngineOptions(capacity_at_least=len(prompt) + options.tokens)
    outputs = [
        generate(Engine(decoder, drafter, Greedy(), settings), [request])[0]
        for drafter in (NullDrafter(), NGram(k=options.drafts))
    ]
    plain, drafted = outputs
    pairs = zip(plain.ids, drafted.ids, strict=False)
    other = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return {"tokens": len(plain.ids), "first_other": other, "tau": drafted.tau}


def timings(
    modes: dict[str, Decoder], widths: tuple[int, ...], options: Options
) -> list[dict[str, Any]]:
    """Milliseconds of CPU time a pass, medians of turns."""
    verify = jax.jit(lambda decoder, state, window: decoder.verify(state, window))
    rows = []
    for width in widths:
        spent: dict[str, list[float]] = {name: [] for name in modes}
        for turn in range(options.repeats + 1):
            for name, decoder in modes.items():
                state = decoder.init(1, 256)
                tokens = jnp.zeros((1, 256), jnp.int32)
                start, stop = jnp.zeros((1,), jnp.int32), jnp.full((1,), 256, jnp.int32)
                window = chunk_window(tokens, start, stop, width)
                begun = time.process_time()
                jax.block_until_ready(verify(decoder, state, window).logits)
                if turn:  # the first compiles
                    spent[name].append(time.process_time() - begun)
        medians = {name: float(np.median(times)) * 1e3 for name, times in spent.items()}
        rows.append({"width": width} | medians)
    return rows


def text_ids(checkpoint: Checkpoint, tokens: int) -> list[int]:
    """Real text where there is a tokenizer, else ids at random."""
    if checkpoint.tokenizer is None:
        draw = np.random.default_rng(0)
        return draw.integers(0, checkpoint.config.vocab_size, tokens).tolist()
    ids: list[int] = []
    for prompt in bundled_prompts():
        ids += prompt_ids(prompt, checkpoint.tokenizer)
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def run_dtype(options: Options, dtype: str) -> dict[str, Any]:
    """Everything for one weight type."""
    checkpoint = load(options.model, WeightType(dtype))
    ids = text_ids(checkpoint, options.tokens)
    modes = {"default": checkpoint.decoder}
    refused = None
    try:
        modes["invariant"] = invariant(checkpoint.decoder, options.tile)
    except NotInvariant as error:
        refused = str(error)
    result: dict[str, Any] = {"dtype": dtype, "refused": refused, "modes": {}}
    for name, decoder in modes.items():
        result["modes"][name] = {
            "widths": compare(
                decoder, np.array(ids), options.widths, f"{dtype} {name}"
            ),
            "dead_row": dead_row(decoder, np.array(ids)),
            "speculation": speculation(decoder, ids[: options.tokens // 2], options),
        }
    result["milliseconds"] = timings(modes, options.widths, options)
    return result


def table(result: dict[str, Any]) -> str:
    """One weight type, both modes."""
    lines = [f"\n## {result['dtype']}\n"]
    if result["refused"]:
        lines.append(f"No invariant mode: {result['refused']}.\n")
    lines += [
        "| mode | W | same bits | largest difference | first other argmax | margin "
        "| pass ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    times = {row["width"]: row for row in result["milliseconds"]}
    for mode, found in result["modes"].items():
        for row in found["widths"]:
            first, gap = row["first_other_argmax"], row["margin"]
            lines.append(
                f"| {mode} | {row['width']} | "
                f"{row['identical_positions']}/{row['positions']} | "
                f"{row['largest_difference']:.1e} | "
                f"{'-' if first is None else first} | "
                f"{'-' if gap is None else f'{gap:.1e}'} | "
                f"{times[row['width']][mode]:.1f} |"
            )
    for mode, found in result["modes"].items():
        dead, drafts = found["dead_row"], found["speculation"]
        other = drafts["first_other"]
        told = "none" if other is None else f"the first at {other}"
        lines.append(
            f"\n{mode}: a dead second row leaves {dead['identical_positions']} of "
            f"{dead['positions']} positions as they are (largest difference "
            f"{dead['largest_difference']:.1e}); of {drafts['tokens']} greedy tokens "
            f"with n-gram drafts (tau {drafts['tau']:.2f}) those that are not plain "
            f"decoding's: {told}."
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    """Measure, print, write."""
    if options.quick:
        options = dataclasses.replace(
            options, widths=(1, 4, 9), tokens=48, dtypes=("bfloat16",), repeats=3
        )
    results = [run_dtype(options, dtype) for dtype in options.dtypes]
    whole = reporting.about(options) | {"results": results}
    told = "\n".join(map(table, results))
    print(told)
    about = (
        f"{options.model}, {options.tokens} tokens of text, tile {options.tile}; pass: "
        f"CPU time, median of {options.repeats}; {reporting.told(whole)}"
    )
    report = f"# Bits, by the width of the window\n\n{about}\n{told}\n"
    reporting.write(options.out, Path(options.model).name, whole, report)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
