"""How much each acceptance rule accepts of the same drafts, as target and draft part.

    python experiments/acceptance_rules.py
    python experiments/acceptance_rules.py --quick

Target and draft are tables (the next token's law depends on the last token), so every
run goes through the real compiled round at thousands of rows a second. The draft's laws
are the target's with noise on their logits; the noise sets the distance. Every rule
gets chains of `--k` drafts or trees of `--branching`, from the same draft table. Writes
a table, a plot and all numbers to `--out`.
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

from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.decoding.trees import full
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.draft_tree import DraftTree, Siblings
from specjax.drafters.drawing import Pick
from specjax.testing.markov import Markov

RESULTS = Path(__file__).resolve().parent / "results" / "acceptance_rules"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare acceptance rules on tables."""

    k: int = 4
    """Drafts of a chain."""
    branching: tuple[int, ...] = (3, 2, 1)
    """Children of a node at each depth of a tree."""
    noise: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
    """Standard deviations of the noise on the draft's logits."""
    vocab: int = 32
    rows: int = 2048
    """Texts decoded at a time, each with its own seed."""
    rounds: int = 24
    """Rounds of each. Were it tokens, the last round would be cut short."""
    concentration: float = 0.3
    """Of the Dirichlet that the target's laws are drawn from."""
    seed: int = 0
    quick: bool = False
    """Few rows, and three distances: a smoke run."""
    out: Path = RESULTS


@dataclasses.dataclass(frozen=True)
class Arm:
    """A rule and how its drafts are picked."""

    shape: str
    name: str
    rule: str
    pick: Any


ARMS = (
    Arm("chain", "block", "block", Pick.DRAWN),
    Arm("chain", "rejection", "rejection", Pick.DRAWN),
    Arm("chain", "coupled, shared noise", "coupled", Pick.COUPLED),
    Arm("chain", "coupled, most probable draft", "coupled", Pick.BEST),
    Arm("chain", "coupled, own noise", "coupled", Pick.DRAWN),
    Arm(
        "tree",
        "traversal, without replacement",
        "traversal-without-replacement",
        Siblings.WITHOUT_REPLACEMENT,
    ),
    Arm(
        "tree",
        "top down, without replacement",
        "without-replacement",
        Siblings.WITHOUT_REPLACEMENT,
    ),
    Arm("tree", "traversal, i.i.d.", "traversal", Siblings.INDEPENDENT),
    Arm("tree", "top down, i.i.d.", "multi-round", Siblings.INDEPENDENT),
    Arm("tree", "most probable children", "deterministic-children", Siblings.BEST),
)


def tables(options: Options, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """``[V, V]`` each: the target's laws by last token, and the draft's."""
    draw = np.random.default_rng(options.seed)
    size = options.vocab
    p = draw.dirichlet(np.full(size, options.concentration), size) + 1e-9
    logits = np.log(p) + noise * draw.normal(size=p.shape)
    return _normalised(np.log(p)), _normalised(logits)


def _normalised(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def measure(options: Options, arm: Arm, p: np.ndarray, q: np.ndarray) -> float:
    """Tokens a round over all rows and rounds."""
    target, draft = (Markov(jnp.asarray(np.log(t), jnp.float32)) for t in (p, q))
    if arm.shape == "chain":
        drafter: Any = DraftModel(draft, options.k, pick=arm.pick)
    else:
        drafter = DraftTree(draft, full(options.branching), arm.pick)
    settings = EngineOptions(
        prefill_width=1,
        rounds_per_call=options.rounds,
        widths=(drafter.max_nodes + 1,),
    )
    engine = Engine(target, drafter, RULES[arm.rule].build(), settings)
    requests = [
        Request(
            prompt_ids=(row % options.vocab,),
            max_tokens=options.rounds * (drafter.max_depth + 1),
            temperature=1.0,
            seed=row,
        )
        for row in range(options.rows)
    ]
    state, _ = engine.rounds(engine.prefill(engine.start(requests)))
    rounds = int(state.stats.rounds.sum())
    assert rounds >= options.rows * (options.rounds - 1)
    return int(state.stats.committed.sum()) / rounds


def stationary(p: np.ndarray) -> np.ndarray:
    """The share of each token in a long text of the target's."""
    law = np.full(len(p), 1 / len(p))
    for _ in range(200):
        law = law @ p
    return law


def token_by_token(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Tokens a round if each draft is kept with the largest probability that any test
    of it alone allows, ``sum min(p, q)``: what rejection reaches (Leviathan et al.).

    A text's anchors are not its tokens: they are what follows refusals and full
    accepts, so their law is that of the chain from one anchor to the next.
    """
    kept, refused = np.minimum(p, q), np.maximum(p - q, 0)
    expected, next_anchor = np.ones(len(p)), p
    for _ in range(k):
        expected = 1 + kept @ expected
        next_anchor = kept @ next_anchor + refused
    return float(stationary(next_anchor) @ expected)


def tree_bound(p: np.ndarray, q: np.ndarray, branching: tuple[int, ...]) -> float:
    """No rule for i.i.d. siblings does better: a token is kept only if it was
    drafted.
    """
    expected = np.ones(len(p))
    for children in reversed(branching):
        drafted = 1 - (1 - q) ** children
        expected = 1 + np.minimum(p, drafted) @ expected
    return float(stationary(p) @ expected)


def run(options: Options) -> dict[str, Any]:
    """All arms at all distances."""
    points = []
    jobs = [(noise, arm) for noise in options.noise for arm in ARMS]
    for noise, arm in track(jobs, "measuring", console=Console(stderr=True)):
        p, q = tables(options, noise)
        distance = float(stationary(p) @ (np.abs(p - q).sum(axis=1) / 2))
        points.append(
            {
                "noise": noise,
                "distance": distance,
                "shape": arm.shape,
                "arm": arm.name,
                "rule": arm.rule,
                "tau": measure(options, arm, p, q),
                "token_by_token": token_by_token(p, q, options.k),
                "tree_bound": tree_bound(p, q, options.branching),
            }
        )
    return reporting.about(options) | {"points": points}


def table(result: dict[str, Any]) -> str:
    """Tokens a round by arm and distance, as Markdown."""
    lines = []
    for shape, bound in (("chain", "token_by_token"), ("tree", "tree_bound")):
        points = [x for x in result["points"] if x["shape"] == shape]
        distances = sorted({x["distance"] for x in points})
        lines += [f"| {shape} | " + " | ".join(f"{d:.2f}" for d in distances) + " |"]
        lines += ["| --- |" + " ---: |" * len(distances)]
        for arm in dict.fromkeys(x["arm"] for x in points):
            found = {x["distance"]: x["tau"] for x in points if x["arm"] == arm}
            lines += [f"| {arm} | " + _row(found, distances)]
        told = {x["distance"]: x[bound] for x in points}
        name = "*sum min(p, q), closed form*" if shape == "chain" else "*bound, i.i.d.*"
        lines += [f"| {name} | " + _row(told, distances), ""]
    return "\n".join(lines)


def _row(values: dict[float, float], distances: list[float]) -> str:
    return " | ".join(f"{values[d]:.3f}" for d in distances) + " |"


def plot(result: dict[str, Any], path: Path) -> None:
    """Two panels: chains and trees."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for panel, shape in zip(panels, ("chain", "tree"), strict=True):
        points = [x for x in result["points"] if x["shape"] == shape]
        for arm in dict.fromkeys(x["arm"] for x in points):
            mine = sorted((x["distance"], x["tau"]) for x in points if x["arm"] == arm)
            panel.plot(*zip(*mine, strict=True), marker="o", ms=3, label=arm)
        bound = "token_by_token" if shape == "chain" else "tree_bound"
        line = sorted({(x["distance"], x[bound]) for x in points})
        label = "sum min(p, q)" if shape == "chain" else "bound, i.i.d. siblings"
        panel.plot(*zip(*line, strict=True), "k--", lw=1, label=label)
        panel.set_xlabel("total variation distance of draft from target")
        panel.set_title(f"{shape}s")
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens a round")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(options: Options) -> None:
    """Measure, print, write."""
    if options.quick:
        options = dataclasses.replace(
            options, rows=256, rounds=8, noise=(0.0, 1.0, 3.0)
        )
    result = run(options)
    told = table(result)
    print(told)
    report = _heading(result) + told
    reporting.write(options.out, "rules", result, report, partial(plot, result))


def _heading(result: dict[str, Any]) -> str:
    o = result["options"]
    about = (
        f"Tokens a round (last token included), by total variation distance. Chains of "
        f"{o['k']} drafts, trees of branching {tuple(o['branching'])}; vocabulary "
        f"{o['vocab']}, {o['rows']} texts of {o['rounds']} rounds, temperature 1. "
        f"{reporting.told(result)}"
    )
    return f"# What each rule accepts\n\n{about}\n\n"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(tyro.cli(Options, description=__doc__))
