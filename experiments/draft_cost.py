"""What a round of drafts costs beside a pass of the target: predicted and measured.

    python experiments/draft_cost.py
    python experiments/draft_cost.py --quick
    python experiments/draft_cost.py --on-paper qwen3-4b

Decoding reads all weights that it uses, and at batch 1 that is what it takes: so the
*prediction* divides the bytes that a round's drafting reads by those of a plain pass.
*Measured* is the time of `propose` and `observe` over that of a plain pass and its
choice, medians of turns in one process, on SmolLM2 with a prompt of `--history` tokens.
Heads have random weights of the sizes that such heads are published in (one layer of
the target's kind for EAGLE and MTP, five for DFlash and DSpark, three matrices of D x D
for Medusa): what they draft is worthless, and costs the same. `--on-paper` gives the
prediction alone, for a released model whose weights are not at hand.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import tyro
from safetensors import safe_open

from specjax.acceptance import Greedy
from specjax.analysis.calibration import calibrate
from specjax.checkpoints import load
from specjax.checkpoints.load import decoder_config
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.drafters import DRAFTERS, DrafterOptions
from specjax.drafters.layouts import LAYOUTS, Host
from specjax.models.build import Builder, WeightType
from specjax.models.config import DecoderConfig
from specjax.models.ends import Ends
from specjax.models.linear import Linear
from specjax.models.norms import RMSNorm

HERE = Path(__file__).resolve().parent
DATA, RESULTS = HERE.parent / "tests/data", HERE / "results/draft_cost"
ORACLES = DATA / "drafter_oracles"


@dataclasses.dataclass(frozen=True)
class Head:
    """A published kind of head, and what a round reads of it."""

    oracle: str
    """Its layout: the directory whose config.json is written anew in real sizes."""
    layers: int
    body: Callable[[int], int]
    """Times that its own layers are read, for k drafts."""
    ends: Callable[[int], int]
    """Times that the output head is read."""


HEADS = {
    # observe runs the layer once; drafting k tokens reads k heads and k - 1 layers
    "eagle1": Head("eagle1", 1, lambda k: k, lambda k: k),
    "eagle3": Head("eagle3", 1, lambda k: k, lambda k: k),
    "eagle2": Head("eagle1", 1, lambda k: k, lambda k: k),
    "p-eagle": Head("peagle", 4, lambda k: 2, lambda k: 1),
    "medusa": Head("medusa", 1, lambda k: 1, lambda k: 1),
    # observe reads the layers' key and value matrices once more, a tenth or so
    "dflash": Head("dflash", 5, lambda k: 1, lambda k: 1),
    "dspark": Head("dspark", 5, lambda k: 1, lambda k: 1),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Time drafters beside the target."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    k: tuple[int, ...] = (4, 8)
    history: int = 2000
    repeats: int = 9
    on_paper: str | None = None
    """A configuration of tests/data/configs: the prediction alone."""
    quick: bool = False
    """One k, a short history, few repeats."""
    out: Path = RESULTS


class Sizes:
    """A ``TensorReader`` of small random numbers, in any shape that is asked for."""

    def __init__(self, oracle: Path, heads: int) -> None:
        self._heads = heads
        with safe_open(oracle / "model.safetensors", framework="np") as file:
            self._names = {_pattern(name) for name in file.keys()}  # noqa: SIM118

    def has(self, name: str) -> bool:
        """What the layout's own example has, of as many numbered heads."""
        first = next((int(p) for p in name.split(".") if p.isdigit()), 0)
        return _pattern(name) in self._names and first < self._heads

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One row of noise, repeated: quick to make and of the right size."""
        draw = np.random.default_rng(len(name))
        row = draw.normal(size=shape[-1:]).astype(np.float32) * 0.02
        return np.broadcast_to(row + ("norm" in name), shape)

    def integers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A draft vocabulary that is the target's first ids."""
        if name.endswith("t2d"):
            return np.arange(shape[0]) < self.kept
        self.kept = shape[0]
        return np.zeros(shape, np.int64)

    kept = 32000


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def resized(raw: Mapping[str, Any], host: Host, head: Head, k: int) -> dict[str, Any]:
    """A tiny example's configuration in the sizes of the target."""
    target, blocks = host.raw, host.num_blocks
    heads = target["num_attention_heads"]
    dim = target.get("head_dim") or host.hidden_size // heads
    taps = [round(1 + i * (blocks - 4) / 4) for i in range(5)]
    low = [2, blocks // 2, blocks - 3]
    sizes = {
        "hidden_size": host.hidden_size,
        "target_hidden_size": host.hidden_size,
        "intermediate_size": target["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": dim,
        "vocab_size": host.vocab_size,
        "draft_vocab_size": min(32000, host.vocab_size),
        "num_hidden_layers": head.layers,
        "layer_types": ["full_attention"] * head.layers,
        "max_window_layers": head.layers,
        "num_target_layers": blocks,
        "target_layer_ids": taps,
        "eagle_aux_hidden_state_layer_ids": low,
        "aux_hidden_state_layer_ids": low,
        "block_size": k + 1 if head.oracle == "dflash" else k,
        "mask_token_id": host.vocab_size - 1,
        "markov_rank": 256,
        "medusa_num_heads": k,
        "max_position_embeddings": 8192,
    }

    def written(part: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: written(value)
            if isinstance(value, Mapping)
            else sizes.get(name, value)
            for name, value in part.items()
        }

    return written(raw)


def part_of(name: str, host: Host, dtype: str, k: int) -> Any:
    """The head's network, of random numbers."""
    head = HEADS[name]
    folder = ORACLES / head.oracle
    raw = json.loads((folder / "config.json").read_text())
    reader = Sizes(folder, k if name == "medusa" else head.layers)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = frozenset(file.keys())
    (layout, *_) = [each for each in LAYOUTS if each.fits(raw, names)]
    make = Builder(reader, WeightType(dtype))
    return layout.build(resized(raw, host, head, k), make, host)


class Bytes(NamedTuple):
    """What there is to read of a head."""

    body: int
    """Its layers."""
    ends: int
    """Its output head or, where it has none of its own, the target's."""
    by_slot: int
    """A matrix that is read for every slot of a block: DSpark's second one."""


def bytes_of(part: Any, host: Host) -> Bytes:
    """Embeddings are read a row at a time and do not count."""
    shared = {id(leaf) for leaf in jax.tree.leaves((host.ends, host.norm))}
    body, ends, by_slot = 0, 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(part):
        where = jax.tree_util.keystr(path)
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        if id(leaf) in shared or not floats or "embedding" in where or "w1" in where:
            continue
        if "w2" in where:
            by_slot += leaf.nbytes
        elif leaf.ndim == 2 and leaf.shape[0] > 8 * host.hidden_size:
            ends += leaf.nbytes
        else:
            body += leaf.nbytes
    return Bytes(body, ends or host.ends.head.weight.nbytes, by_slot)


def predicted(name: str, part: Any, host: Host, target_bytes: int, k: int) -> float:
    """Bytes of a round's drafting over those of a plain pass."""
    head, of = HEADS[name], bytes_of(part, host)
    read = head.body(k) * of.body + head.ends(k) * of.ends + k * of.by_slot
    return read / target_bytes


def decoder_bytes(config: DecoderConfig, raw: Mapping[str, Any], each: int) -> int:
    """Of a plain pass of a dense decoder, counted from its configuration."""
    hidden, heads = config.hidden_size, raw["num_attention_heads"]
    dim = raw.get("head_dim") or hidden // heads
    keys = raw["num_key_value_heads"]
    attention = hidden * dim * (2 * heads + 2 * keys)
    body = attention + 3 * hidden * raw["intermediate_size"]
    return each * (len(config.blocks) * body + config.vocab_size * hidden)


def paper_host(name: str, dtype: str) -> tuple[Host, int]:
    """A released model's ends without its numbers, and the bytes of its pass."""
    raw = json.loads((DATA / "configs" / f"{name}.json").read_text())
    config = decoder_config(raw, DATA / "configs" / f"{name}.json")[1]
    matrix = jnp.zeros((config.vocab_size, config.hidden_size), dtype)
    ends = Ends(matrix, Linear(weight=matrix, axes=("vocab", "embed")))
    norm = RMSNorm(weight=jnp.ones((config.hidden_size,)), eps=config.norm_eps)
    host = Host(config, ends, norm, raw)
    return host, decoder_bytes(config, raw, matrix.dtype.itemsize)


def measured_rows(options: Options) -> list[dict[str, Any]]:
    """Every drafter at every k, on a model that is here."""
    checkpoint = load(options.model, WeightType(options.dtype), tokenizer=False)
    decoder = checkpoint.decoder
    host = Host(checkpoint.config, decoder.ends, decoder.norm, checkpoint.raw_config)
    plain = sum(leaf.nbytes for leaf in jax.tree.leaves((decoder.blocks, decoder.head)))
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 200, options.history).tolist()
    request = Request(prompt_ids=prompt, max_tokens=8)
    rows = []
    for k in options.k:
        for name in ("ngram", "suffix", "suffix-tree", *HEADS):
            part, guess = None, None
            if name in HEADS:
                part = part_of(name, host, options.dtype, k)
                guess = predicted(name, part, host, plain, k)
            drafter = DRAFTERS[name].build(DrafterOptions(k=k, part=part))
            engine = Engine(decoder, drafter, Greedy(), EngineOptions())
            costs = calibrate(engine, request, options.repeats)
            rows.append(
                {
                    "drafter": name,
                    "k": k,
                    "nodes": drafter.max_nodes,
                    "predicted": guess,
                    "measured": costs.c_draft,
                    "c_verify": costs.c_verify,
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


def paper_rows(options: Options) -> list[dict[str, Any]]:
    """Every head at every k, on a model that is not here."""
    assert options.on_paper is not None
    host, plain = paper_host(options.on_paper, options.dtype)
    rows = []
    for k in options.k:
        for name in HEADS:
            part = part_of(name, host, options.dtype, k)
            rows.append(
                {
                    "drafter": name,
                    "k": k,
                    "nodes": None,
                    "predicted": predicted(name, part, host, plain, k),
                    "measured": None,
                    "c_verify": None,
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


HEAD = """\
| drafter | k | nodes | c_draft predicted | c_draft measured | c_verify measured |
| --- | ---: | ---: | ---: | ---: | ---: |"""


def _line(row: Mapping[str, Any]) -> str:
    def told(value: Any, form: str) -> str:
        return "" if value is None else format(value, form)

    return (
        f"| {row['drafter']} | {row['k']} | {told(row['nodes'], 'd')} | "
        f"{told(row['predicted'], '.1%')} | {told(row['measured'], '.1%')} | "
        f"{told(row['c_verify'], '.2f')} |"
    )


def main(options: Options) -> None:
    """Measure or count, print, write."""
    if options.quick:
        options = dataclasses.replace(options, k=(4,), history=200, repeats=3)
    print(HEAD)
    paper = options.on_paper is not None
    rows = paper_rows(options) if paper else measured_rows(options)
    model = options.on_paper or options.model
    result = reporting.about(options) | {"rows": rows}
    told = f"{model}, {options.dtype}; {reporting.told(result)}"
    lines = [f"# What drafting costs, in plain passes\n\n{told}\n", HEAD]
    lines += [_line(row) for row in rows]
    reporting.write(options.out, model, result, "\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
