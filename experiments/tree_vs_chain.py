"""A chain or a tree for the same number of draft nodes, on real text, by its kind.

    python experiments/tree_vs_chain.py
    python experiments/tree_vs_chain.py --quick

The target is SmolLM2, greedy. Drafters of any quality are made from it: the same model
with noise on its weights, for no smaller model of its vocabulary is at hand. Along the
path that a round accepts, a drafter reads the target's own text, so the rank that it
gives to each next token of that text decides every round of every tree: one pass over
each text does for all shapes. `--check` runs real rounds and compares.

A tree is chosen best-first from the shares of ranks on the *other* texts. Also printed:
the lecture's toy, 1.11 against 1.40 accepted drafts at four nodes.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import tyro
from rich.console import Console
from rich.progress import track

from specjax.acceptance import Greedy
from specjax.checkpoints import Checkpoint, load, prompt_ids
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.requests import Request
from specjax.decoding.trees import Tree, best_first, chain, expected_length, full
from specjax.decoding.windows import chunk_window
from specjax.drafters import NullDrafter
from specjax.drafters.draft_tree import DraftTree
from specjax.models.build import WeightType
from specjax.prompts import KINDS, bundled_prompts

RESULTS = Path(__file__).resolve().parent / "results" / "tree_vs_chain"
LONGEST = 384
"""Texts are padded to so many tokens."""
RANKS = 8
"""Candidates of a node that a tree may use."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare chains and trees of equal numbers of nodes."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    per_kind: int = 8
    """Prompts of each kind."""
    tokens: int = 64
    """Tokens of each answer."""
    nodes: tuple[int, ...] = (4, 8, 16)
    """Draft nodes a round."""
    noise: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    """Of the drafter's weights, relative to their own spread."""
    check: bool = True
    """Decode one prompt with real rounds, and compare their number."""
    quick: bool = False
    """Two prompts of each kind, one noise: a smoke run."""
    out: Path = RESULTS


def noisy(model: Any, size: float) -> Any:
    """The model with noise on every matrix, in proportion to its spread."""
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def disturb(x: jax.Array, key: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        spread = size * jnp.std(x.astype(jnp.float32))
        noise = spread * jax.random.normal(key, x.shape, jnp.float32)
        return (x.astype(jnp.float32) + noise).astype(x.dtype)

    disturbed = [disturb(x, key) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, disturbed)


@jax.jit
def _ranks(
    model: Any, state: Any, tokens: jax.Array, following: jax.Array
) -> jax.Array:
    """``[W]``: how many tokens the model finds more probable than the one that
    follows.
    """
    width = tokens.shape[1]
    zero = jnp.zeros((1,), jnp.int32)
    window = chunk_window(tokens, zero, zero + width, width)
    logits = model.verify(state, window).logits[0]
    mine = jnp.take_along_axis(logits, following[:, None], axis=1)
    lower = jnp.arange(logits.shape[1], dtype=jnp.int32) < following[:, None]
    ahead = (logits > mine) | ((logits == mine) & lower)
    return ahead.sum(axis=1, dtype=jnp.int32)


def ranks(model: Any, prompt: list[int], output: list[int]) -> np.ndarray:
    """The rank of each output token under the model, the text before it given."""
    text = np.array([*prompt, *output], np.int32)
    size = LONGEST if len(text) <= LONGEST else len(text)  # one shape
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(text)] = text
    following = jnp.asarray(np.roll(padded[0], -1))
    found = _ranks(model, model.init(1, size), jnp.asarray(padded), following)
    return np.asarray(found)[len(prompt) - 1 : len(text) - 1]


def rounds(tree: Tree, found: np.ndarray) -> int:
    """Rounds that decode the text: each walks down while the rank is in the tree."""
    place, count = 0, 0
    while place < len(found):
        node = -1
        while place < len(found) - 1:
            child = [c for c in tree.children(node) if tree.ranks[c] == found[place]]
            if not child:
                break
            node, place = child[0], place + 1
        place, count = place + 1, count + 1
    return count


def shares(texts: list[np.ndarray], depth: int) -> list[list[float]]:
    """How often each rank is the right one, the same at every depth."""
    together = np.concatenate(texts)
    each = [float((together == rank).mean()) for rank in range(RANKS)]
    return [each] * depth


def compare(options: Options, found: dict[str, list[np.ndarray]]) -> list[dict]:
    """Tokens a round of chain and tree, by kind and number of nodes."""
    rows = []
    for kind, texts in found.items():
        for nodes in options.nodes:
            chained, treed, predicted = 0, 0, []
            for i, text in enumerate(texts):
                others = [t for j, t in enumerate(texts) if j != i]
                marginals = shares(others, nodes)
                tree = best_first(marginals, nodes)
                predicted.append(expected_length(tree, marginals))
                chained += rounds(chain(nodes), text)
                treed += rounds(tree, text)
            tokens = sum(map(len, texts))
            rows.append(
                {
                    "kind": kind,
                    "nodes": nodes,
                    "first": float(np.mean(np.concatenate(texts) == 0)),
                    "second": float(np.mean(np.concatenate(texts) == 1)),
                    "chain": tokens / chained,
                    "tree": tokens / treed,
                    "predicted": float(np.mean(predicted)),
                }
            )
    return rows


def check(target: Checkpoint, model: Any, request: Request, tree: Tree) -> str:
    """Real rounds of a tree, and what the ranks say."""
    options = EngineOptions(capacity_at_least=256)
    engine = Engine(target.decoder, DraftTree(model, tree), Greedy(), options)
    (done,) = generate(engine, [request])
    found = ranks(model, list(request.prompt_ids), list(done.ids))
    return f"{len(done.rounds)} real rounds, {rounds(tree, found)} by ranks"


def toy() -> str:
    """The lecture prints 1.11 and 1.40; these shares give them."""
    first, second = 0.55, 0.35
    four = expected_length(chain(4), [[first]] * 4) - 1
    two = expected_length(full((2, 1)), [[first, second], [first]]) - 1
    return (
        f"Accepted drafts of four nodes when the first candidate is right with {first} "
        f"and the second with {second}: chain {four:.2f}, two branches of two {two:.2f}"
        " "
        "(the lecture prints 1.11 and 1.40 and gives no shares: these are ours)."
    )


def outputs(options: Options, target: Checkpoint) -> list[tuple[str, Request, list]]:
    """The prompts, and what the target says to them."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    engine = Engine(
        target.decoder,
        NullDrafter(),
        Greedy(),
        EngineOptions(capacity_at_least=512, rounds_per_call=options.tokens),
    )
    made = []
    prompts = bundled_prompts(KINDS, options.per_kind)
    for prompt in track(prompts, "decoding", console=Console(stderr=True)):
        ids = prompt_ids(prompt, tokenizer)
        request = Request(prompt_ids=ids, max_tokens=options.tokens)
        (done,) = generate(engine, [request])
        made.append((prompt.kind, request, list(done.ids)))
    return made


def run(options: Options) -> dict[str, Any]:
    """All drafters, kinds and numbers of nodes."""
    target = load(options.model, WeightType(options.dtype))
    texts = outputs(options, target)
    drafters, checked = [], None
    for size in track(options.noise, "reading texts", console=Console(stderr=True)):
        model = noisy(target.decoder, size)
        found: dict[str, list[np.ndarray]] = {}
        for kind, request, ids in texts:
            listed = found.setdefault(kind, [])
            listed.append(ranks(model, list(request.prompt_ids), ids))
        drafters.append({"noise": size, "rows": compare(options, found)})
        if options.check and checked is None and size >= 0.05:
            checked = check(target, model, texts[0][1], full((2, 2)))
    return reporting.about(options) | {
        "drafters": drafters,
        "check": checked,
        "toy": toy(),
    }


def table(result: dict[str, Any]) -> str:
    """Tokens a round, as Markdown."""
    sizes = result["options"]["nodes"]
    heads = " | ".join(f"{n}: chain | {n}: tree | gain" for n in sizes)
    lines = []
    for drafter in result["drafters"]:
        lines += [f"Noise {drafter['noise']:g}:", ""]
        lines += [f"| kind | first | second | {heads} |"]
        lines += ["| --- |" + " ---: |" * (2 + 3 * len(sizes))]
        for kind in dict.fromkeys(row["kind"] for row in drafter["rows"]):
            rows = [row for row in drafter["rows"] if row["kind"] == kind]
            cells = [kind, f"{rows[0]['first']:.2f}", f"{rows[0]['second']:.2f}"]
            for row in rows:
                gain = row["tree"] / row["chain"] - 1
                cells += [f"{row['chain']:.2f}", f"{row['tree']:.2f}", f"{gain:+.0%}"]
            lines += ["| " + " | ".join(cells) + " |"]
        lines += [""]
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Gain of trees by how often the first candidate is right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.6))
    for nodes in result["options"]["nodes"]:
        rows = [
            row
            for drafter in result["drafters"]
            for row in drafter["rows"]
            if row["nodes"] == nodes
        ]
        x = [row["first"] for row in rows]
        y = [row["tree"] / row["chain"] for row in rows]
        axes.scatter(x, y, s=18, label=f"{nodes} nodes")
    axes.axhline(1, color="k", lw=0.8)
    axes.set_xlabel("share of tokens that are the drafter's first candidate")
    axes.set_ylabel("tokens a round: tree over chain")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(options: Options) -> None:
    """Measure, print, write."""
    if options.quick:
        options = dataclasses.replace(options, per_kind=2, noise=(0.1,))
    result = run(options)
    o = result["options"]
    told = (
        f"# Chains and trees of equal size\n\n{o['model']}, {o['dtype']}, greedy, "
        f"{o['per_kind']} prompts a kind, {o['tokens']} tokens each; "
        f"{reporting.told(result)} *first*, *second*: shares of tokens that are "
        f"the drafter's first and second candidate.\n\n{table(result)}\n"
        f"{result['toy']}\n\n"
        f"Check on one prompt: {result['check']}.\n"
    )
    print(told)
    reporting.write(options.out, "trees", result, told, partial(plot, result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
