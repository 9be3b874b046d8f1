"""``specjax simulate``: rounds played with coins, beside the law."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from rich.text import Text
from tyro import conf

from specjax.analysis.costs.calibrated import Calibrated, Curve, read_calibrated
from specjax.analysis.elsewhere import Elsewhere, elsewhere
from specjax.analysis.law import MODELS, Model
from specjax.analysis.rounds_svg import rounds_svg
from specjax.analysis.simulation import Game, Played, play
from specjax.cli import options as o
from specjax.cli.console import stdout
from specjax.cli.errors import UsageError
from specjax.decoding.trees import Tree, best_first, chain, full

ACCEPTED, BONUS, ABORTED = ("■", "green"), ("★", "yellow"), ("✗", "red")

SHOWN = 400
"""Rounds that are drawn in the terminal; all are played."""

LEGEND = "■ accepted draft  ★ the target's own token  ✗ rejected draft"

ELSEWHERE = """\
The same τ and draft cost by the roofline: a pass takes as long as reading (weights, and
keys and values) or as multiplying, whichever is longer, at shares (--mbu, --mfu) of
what the makers publish. chips: so many hold the weights and the keys and values. gains
up to: beyond that batch the multiplying costs more than the drafts bring."""

Numbers = Annotated[tuple[int, ...], conf.arg(metavar="N ...", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class Simulate:
    """Play rounds of speculative decoding with coins, and compare with the law.

    A draft is accepted with probability alpha if all above it were. Rounds are shown as
    bars; then tau (tokens a round) and the speed-up, as they came and by the law, and
    what the same drafts would give on accelerators.

    Example: `specjax simulate --alpha 0.85 --k 4 --c-draft 0.1 --rounds 50`

    A tree, whose second candidates are right with 0.2:
    `specjax simulate --alpha 0.6 0.2 --branching 2 1`
    """

    alpha: Annotated[tuple[float, ...], conf.arg(metavar="A ...")] = (0.8,)
    """Probability that a draft is right; of a tree, by rank among its siblings."""
    k: int = 4
    """Drafts of a chain."""
    branching: Numbers = ()
    """A tree in place of the chain: children of a node at each depth."""
    nodes: o.OptionalCount = None
    """The tree of so many nodes that is best at these alphas, in place of the chain."""
    c_draft: float = 0.1
    """Drafting a round, in plain steps."""
    c_token: float = 0.0
    """Further cost of drafting for each level of drafts, in plain steps."""
    c_verify: float = 1.0
    """Verifying a round, in plain steps: 1 where it is free."""
    rounds: int = 50
    """Rounds to play."""
    seed: int = 0
    """Of the coins."""
    target: Annotated[str, conf.arg(metavar="|".join(MODELS))] = "llama-3.1-8b"
    """The model that the accelerators are asked about."""
    batch: int = 1
    """Requests at a time, there."""
    context: int = 2048
    """Tokens of context, there."""
    mfu: float = 0.5
    """Share of the published operations that a pass attains, there."""
    mbu: float = 1.0
    """Share of the published bandwidth that a pass attains, there."""
    calibration: o.OptionalFile = None
    """What `specjax calibrate --json FILE` wrote: adds this machine to the table."""
    svg: o.OptionalFile = None
    """Draw the rounds into this file."""
    json: bool = False
    """Print one JSON object instead."""
    report: o.Debug = field(default_factory=o.Debug)

    def run(self, arguments: Sequence[str]) -> int:
        """Play, compare, show."""
        self._check()
        game = self._game()
        played = play(game, self.rounds, self.seed)
        rows = self._elsewhere(game)
        if self.svg is not None:
            Path(self.svg).write_text(rounds_svg(played, self._title()), "utf-8")
        if self.json:
            print(json.dumps(as_json(played, rows)))
            return 0
        console = stdout()
        for line in bars(played, console.width):
            console.print(line, soft_wrap=True)
        if len(played.paths) > SHOWN:
            console.print(f"… and {len(played.paths) - SHOWN} more")
        console.print(f"\n{LEGEND}\n")
        console.print(law_table(played))
        console.print(verdict(played), soft_wrap=True)
        console.print()
        console.print(elsewhere_table(rows))
        console.print(f"\n{ELSEWHERE}", soft_wrap=True)
        return 0

    def _check(self) -> None:
        o.one_of("--target", self.target, MODELS)
        for option, value in (
            ("--k", self.k),
            ("--rounds", self.rounds),
            ("--batch", self.batch),
        ):
            o.at_least(option, value, 1)
        o.at_least("--context", self.context, 0)
        for option, share in (("--mfu", self.mfu), ("--mbu", self.mbu)):
            if not 0 < share <= 1:
                raise UsageError(f"{option} {share}: a share lies in 0 .. 1, above 0")
        o.at_least("--seed", self.seed, 0)
        o.writable("--svg", self.svg)
        for option, cost in (("--c-draft", self.c_draft), ("--c-token", self.c_token)):
            if not 0 <= cost < math.inf:
                raise UsageError(f"{option} {cost:g}: a cost is 0 or more, and finite")
        if not 0 < self.c_verify < math.inf:
            told = f"--c-verify {self.c_verify:g}: it must be above 0, and finite"
            raise UsageError(told)
        if self.branching and self.nodes is not None:
            raise UsageError("--branching and --nodes both say which tree: give one")
        for branches in self.branching:
            o.at_least("--branching", branches, 1)
        if self.nodes is not None:
            o.at_least("--nodes", self.nodes, 1)
        self._check_alpha()

    def _check_alpha(self) -> None:
        if not self.alpha:
            raise UsageError("--alpha is empty: give at least one probability")
        for alpha in self.alpha:
            if not 0 <= alpha <= 1:
                raise UsageError(f"--alpha {alpha:g}: a probability lies in 0 .. 1")
        ranks = max(self.branching, default=1)
        if len(self.alpha) < ranks:
            raise UsageError(
                f"--branching {' '.join(map(str, self.branching))} has {ranks} "
                f"siblings, and --alpha {len(self.alpha)} ranks: give {ranks}"
            )

    def _tree(self) -> Tree:
        if self.nodes is not None:
            depths = [list(self.alpha)] * self.nodes
            return best_first(depths, self.nodes)
        if self.branching:
            return full(self.branching)
        if len(self.alpha) > 1:
            raise UsageError(
                f"--alpha has {len(self.alpha)} ranks, and a chain uses one: give "
                "--branching or --nodes for a tree"
            )
        return chain(self.k)

    def _game(self) -> Game:
        try:
            tree = self._tree()
            drafting = self.c_draft + self.c_token * tree.max_depth
            return Game(tree, self.alpha, drafting, self.c_verify)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"--alpha, --c-draft, --c-verify: {error}") from error

    def _title(self) -> str:
        alphas = ", ".join(f"{alpha:g}" for alpha in self.alpha)
        return f"α {alphas}, drafting {self.c_draft:g} plain steps, seed {self.seed}"

    def _elsewhere(self, game: Game) -> list[Elsewhere]:
        rows = elsewhere(
            Model(*MODELS[self.target]),
            tau=game.tau,
            rows=game.tree.num_nodes + 1,
            c_draft=game.c_draft,
            batch=self.batch,
            context=self.context,
            memory_share=self.mbu,
            compute_share=self.mfu,
        )
        if self.calibration is None:
            return rows
        try:
            here = read_calibrated(self.calibration)
            curve = here.curve_for(self.batch, self.context)
        except OSError as error:
            told = f"--calibration {self.calibration}: {error.strerror}"
            raise UsageError(told) from error
        except ValueError as error:
            raise UsageError(f"--calibration {self.calibration}: {error}") from error
        return [*rows, this_machine(here, curve, game)]


def this_machine(here: Calibrated, curve: Curve, game: Game) -> Elsewhere:
    """A line by what was measured."""
    rows, widest = game.tree.num_nodes + 1, curve.widths[-1]
    if rows > widest:
        raise UsageError(
            f"--calibration: windows were measured to {widest} rows, and this "
            f"game has {rows}: calibrate with --widths up to {rows}, or draft less"
        )
    cost = curve.c_round(rows)
    what = f"{here.model}, {here.dtype}, B = {curve.batch}, context {curve.context}"
    return Elsewhere(
        device=f"{here.device} ({what})",
        chips=1,
        plain_rate=1 / curve.plain_seconds,
        c_verify=cost,
        speedup=game.tau / (game.c_draft + cost),
        break_even_batch=None,
    )


def bars(played: Played, width: int) -> list[Text]:
    """One bar a round, several on a line."""
    nodes = played.game.tree.num_nodes
    number = len(str(len(played.paths)))
    each = number + 1 + nodes + 1 + 2
    columns = max(1, min(8, width // each))
    lines = []
    shown = played.paths[:SHOWN]
    for first in range(0, len(shown), columns):
        line = Text()
        for place, path in enumerate(shown[first : first + columns]):
            line.append(f"{first + place + 1:>{number}} ", style="dim")
            line.append(ACCEPTED[0] * len(path), style=ACCEPTED[1])
            line.append(*BONUS)
            line.append(ABORTED[0] * (nodes - len(path)), style=ABORTED[1])
            line.append("  ")
        line.rstrip()
        lines.append(line)
    return lines


def law_table(played: Played) -> Table:
    """As they came, and by the law."""
    game = played.game
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("played", "law"):
        table.add_column(name, justify="right")
    error = played.tau_error
    spread = f" ± {error:.2f}" if math.isfinite(error) else ""
    table.add_row("τ, tokens a round", f"{played.tau:.2f}{spread}", f"{game.tau:.2f}")
    table.add_row(
        "cost of a round, plain steps", f"{game.cost:.2f}", f"{game.cost:.2f}"
    )
    table.add_row("speed-up", f"{played.speedup:.2f}×", f"{game.speedup:.2f}×")
    return table


def verdict(played: Played) -> str:
    """Whether theory was beaten, and by luck or not."""
    error = played.tau_error
    gap = played.tau - played.game.tau
    if gap == 0 or not math.isfinite(error) or error == 0:
        return ""
    said = "above" if gap > 0 else "below"
    return (
        f"{abs(gap) / error:.1f} standard errors {said} the law: "
        f"{'luck' if abs(gap) < 3 * error else 'more than luck explains'}."
    )


def elsewhere_table(rows: Sequence[Elsewhere]) -> Table:
    """A line a device."""
    table = Table(box=None, pad_edge=False)
    table.add_column("device")
    for name in (
        "chips",
        "c_verify",
        "speed-up",
        "plain tokens/s",
        "with drafts",
        "gains up to",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.device,
            str(row.chips),
            f"{row.c_verify:.2f}",
            f"{row.speedup:.2f}×",
            _rate(row.plain_rate),
            _rate(row.rate),
            _requests(row.break_even_batch),
        )
    return table


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"


def _requests(batch: float | None) -> str:
    if batch is None:
        return ""
    return "any B" if math.isinf(batch) else f"B = {math.floor(batch)}"


def as_json(played: Played, rows: Sequence[Elsewhere]) -> dict[str, Any]:
    """All of it in plain values; a batch without end is ``null``."""

    def line(row: Elsewhere) -> dict[str, Any]:
        values = dataclasses.asdict(row) | {"rate": row.rate}
        batch = row.break_even_batch
        endless = batch is not None and math.isinf(batch)
        if endless:
            values["break_even_batch"] = None
        return values | {"gains_at_any_batch": endless}

    game = played.game
    return {
        "parents": list(game.tree.parents),
        "paths": [list(path) for path in played.paths],
        "tau": played.tau,
        "law_tau": game.tau,
        "cost": game.cost,
        "speedup": played.speedup,
        "law_speedup": game.speedup,
        "devices": [line(row) for row in rows],
    }
