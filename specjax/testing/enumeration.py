"""The law that a rule emits, worked out and not sampled.

Over a tiny vocabulary every draft, every accept test and every residual draw is gone
through: the rule's own code runs once, on a batch that holds all outcomes, with draws
that answer as each outcome says and multiply up its probability. In float64 the sum
over the outcomes is the emitted law to 1e-15, which no number of samples would show.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.interfaces import AcceptanceRule, ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Sampling
from specjax.decoding.windows import draft_window

Conditional = Callable[[tuple[int, ...]], np.ndarray]
"""``prefix -> [V]``: the law of the next token behind the tokens since the anchor."""


def random_conditional(
    seed: int, vocab_size: int, *, concentration: float = 1.0, zeros: int = 0
) -> Conditional:
    """A law of its own, from a Dirichlet, for every prefix; ``zeros`` tokens cut off.

    With ``zeros = vocab_size - 1`` every law has one token: temperature 0.
    """

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        draw = np.random.default_rng([seed, len(prefix), *prefix])
        p = draw.dirichlet(np.full(vocab_size, concentration))
        p[draw.permutation(vocab_size)[:zeros]] = 0
        return p / p.sum()

    return law


NODES, DEPTH = 4, 3
"""Every tree is padded to so many nodes, and every path to this depth, so that all
enumerations run through few shapes: operations are compiled for each."""


@dataclasses.dataclass(frozen=True)
class Emitted:
    """What a rule emits in one round, over all outcomes."""

    law: np.ndarray
    """``[V] * L``: of the first L = depth + 1 tokens, the target finishing the rest."""
    tokens: float
    """Expected tokens of the round, the last one included."""
    total: float
    """Sum of the outcomes' probabilities: 1."""


def target_law(p: Conditional, vocab_size: int, length: int) -> np.ndarray:
    """``[V] * length``: the law of plain decoding's next tokens."""
    law = np.ones(())
    for depth in range(length):
        prefixes = itertools.product(range(vocab_size), repeat=depth)
        table = np.stack([p(prefix) for prefix in prefixes])
        law = law[..., None] * table.reshape(*[vocab_size] * (depth + 1))
    return law


def emitted_law(
    rule: AcceptanceRule,
    p: Conditional,
    q: Conditional,
    *,
    parents: Sequence[int],
    law: ProposalLaw,
    vocab_size: int,
    stated_q: Conditional | None = None,
    num_nodes: Callable[[tuple[int, ...]], int] | None = None,
    draws: type[EveryDraw] | None = None,
) -> Emitted:
    """Everything a rule can emit for drafts of the given tree.

    Deterministic drafts are the most probable tokens of ``q``, siblings by rank; others
    are drawn from it as ``law`` says. ``stated_q`` is what the proposal claims to be
    drawn from, if that is not true; ``num_nodes`` says, from the drafted tokens, how
    many nodes are verified. Runs without compilation and in float64.
    """
    trees = _trees(q, parents, law, vocab_size)
    stated = None if law is ProposalLaw.DETERMINISTIC else stated_q or q
    drafted = np.array([tree for tree, _ in trees], np.int32).reshape(len(trees), -1)
    outcomes = (draws or EveryDraw).of(vocab_size, len(parents), len(trees))
    each = outcomes.real // len(trees)
    count = [len(parents) if num_nodes is None else num_nodes(t) for t, _ in trees]
    with jax.enable_x64(True), jax.disable_jit():
        proposal = Proposal(
            tokens=_rows(drafted, each, outcomes.batch, NODES),
            parents=_rows(
                np.tile(np.array(parents, np.int32), (len(trees), 1)),
                each,
                outcomes.batch,
                NODES,
            ),
            num_nodes=_rows(np.array(count, np.int32), each, outcomes.batch),
            log_q=None
            if stated is None
            else jnp.log(_table(stated, drafted, parents, each, outcomes.batch)),
        )
        zeros = jnp.zeros(outcomes.batch, jnp.int32)
        window = draft_window(zeros, zeros + 1, zeros + 9, proposal, vocab_size)
        table = _table(p, drafted, parents, each, outcomes.batch)
        accepted = rule.accept(
            proposal,
            window,
            TableLaws(table, window, Sampling(), None),
            outcomes,
            max_depth=DEPTH,
        )
    drawn = np.repeat([weight for _, weight in trees], each)
    weights = outcomes.weights[: outcomes.real] * drawn
    return _sum_up(accepted, weights, p, vocab_size, parents)


class TableLaws(Laws):
    """Laws that are given, in the place of those of a model's logits."""

    def probs_at(self, rows: jax.Array) -> jax.Array:
        """``[B, V]``: of ``logits``, which hold the laws themselves."""
        return jnp.take_along_axis(self.logits, rows[:, None, None], axis=1)[:, 0]

    def scores_at(self, rows: jax.Array) -> jax.Array:
        """Their logarithms."""
        return jnp.log(self.probs_at(rows))

    def adjusted_at(self, rows: jax.Array) -> jax.Array:
        """The same: nothing is warped here."""
        return self.scores_at(rows)

    def best_at(self, rows: jax.Array) -> jax.Array:
        """The most probable token."""
        return jnp.argmax(self.probs_at(rows), axis=-1).astype(jnp.int32)


class EveryDraw:
    """Draws that answer what each batch row's outcome says, and weigh the outcome.

    An outcome is an answer for every node that may be tested, a token for every depth
    and one for the residual draw. What a row is not asked leaves its weight as it is,
    so unasked answers must not be counted twice: their share of 1 is divided out.
    """

    def __init__(
        self, bits: np.ndarray, by_depth: np.ndarray, last: np.ndarray
    ) -> None:
        self.bits, self.by_depth, self.last = bits, by_depth, last
        self.batch = len(last)
        self.asked_bits = np.zeros(bits.shape, bool)
        self.asked_depths = np.zeros(by_depth.shape, bool)
        self.asked_last = False
        self.product = np.ones(self.batch)

    uses_depths = False

    @classmethod
    def of(cls, vocab_size: int, nodes: int, trees: int) -> EveryDraw:
        """All outcomes for each of so many trees; rows beyond them are padding."""
        by_node, by_depth, last = [range(2)] * nodes, [range(1)] * (DEPTH + 1), 1
        if cls.uses_depths:
            by_node, by_depth = [range(1)] * nodes, [range(vocab_size)] * (DEPTH + 1)
        else:
            last = vocab_size
        # the anchor is never tested, nor is a node that pads the tree
        bits = [range(1), *by_node, *[range(1)] * (NODES - nodes)]
        outcomes = np.array(list(itertools.product(*bits, *by_depth, range(last))))
        table = np.tile(outcomes, (trees, 1))
        real = len(table)
        table = np.pad(table, [(0, _bucket(real) - real), (0, 0)])
        made = cls(table[:, : NODES + 1], table[:, NODES + 1 : -1], table[:, -1])
        made.choices = tuple(
            np.array([len(c) for c in columns]) for columns in (bits, by_depth)
        )
        made.last_choices, made.real = last, real
        return made

    choices: tuple[np.ndarray, ...] = ()
    last_choices = 1
    real = 0

    @property
    def weights(self) -> np.ndarray:
        """``[B]``: the outcomes' probabilities, given the drafts."""
        spare = np.where(self.asked_bits, 1, self.choices[0]).prod(axis=1)
        spare = spare * np.where(self.asked_depths, 1, self.choices[1]).prod(axis=1)
        return self.product / spare / (1 if self.asked_last else self.last_choices)

    def coupled(self, scores: jax.Array, depths: jax.Array, where: jax.Array):
        """The outcome's token at this depth."""
        rows, depth = np.arange(self.batch), np.asarray(depths)
        token = self.by_depth[rows, depth]
        mass = np.exp(np.asarray(scores))[rows, token]
        asked = np.asarray(where)
        assert not self.asked_depths[rows, depth][asked].any(), "one draw a depth"
        self.product = np.where(asked, self.product * mass, self.product)
        self.asked_depths[rows[asked], depth[asked]] = True
        return jnp.asarray(token, jnp.int32)

    def accepts(self, p: jax.Array, q: jax.Array, node: jax.Array, where: jax.Array):
        """The outcome's answer for this node."""
        rows, asked = np.arange(self.batch), np.asarray(where)
        at = np.where(asked, np.asarray(node), 0)
        mass, drawn = np.asarray(p), np.asarray(q)
        ratio = mass / np.where(drawn > 0, drawn, 1)
        chance = np.where(drawn > 0, np.minimum(1, ratio), mass > 0)
        yes = self.bits[rows, at] == 1
        assert not self.asked_bits[rows, at][asked].any(), "one draw a node"
        factor = np.where(yes, chance, 1 - chance)
        self.product = np.where(asked, self.product * factor, self.product)
        self.asked_bits[rows[asked], at[asked]] = True
        return jnp.asarray(yes)

    def token(self, weights: jax.Array):
        """The outcome's residual token."""
        assert not self.asked_last, "one residual draw a round"
        self.asked_last = True
        laws = np.asarray(weights)
        laws = laws / laws.sum(axis=1, keepdims=True)
        self.product = self.product * laws[np.arange(self.batch), self.last]
        return jnp.asarray(self.last, jnp.int32)


class EveryToken(EveryDraw):
    """For sample-then-compare rules: a token for every depth, and nothing else."""

    uses_depths = True


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _prefix(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple:
    """The tokens from the anchor's child down to ``node``."""
    if node < 0:
        return ()
    return (*_prefix(tokens, parents, parents[node]), int(tokens[node]))


def _trees(q: Conditional, parents: Sequence[int], law: ProposalLaw, vocab_size: int):
    """Every assignment of tokens to the nodes that can be drafted, and its chance."""
    partial: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for node, parent in enumerate(parents):
        older = [n for n in range(node) if parents[n] == parent]
        grown = []
        for tokens, weight in partial:
            chances = q(_prefix(tokens, parents, parent))
            if law is ProposalLaw.DETERMINISTIC:
                token = int(np.argsort(-chances, kind="stable")[len(older)])
                grown.append(((*tokens, token), weight))
                continue
            if law is ProposalLaw.WITHOUT_REPLACEMENT:
                chances = chances.copy()
                chances[[tokens[n] for n in older]] = 0
                if chances.sum() == 0:  # nothing is left to draw: a dead node
                    chances = np.eye(vocab_size)[0]
                chances = chances / chances.sum()
            grown += [
                ((*tokens, t), weight * chances[t])
                for t in range(vocab_size)
                if chances[t] > 0
            ]
        partial = grown
    return partial


def _bucket(size: int) -> int:
    """The next of few batch sizes."""
    return next(bucket for bucket in (8192, 32768, 131072) if bucket >= size)


def _rows(
    values: np.ndarray, each: int, batch: int, width: int = 0, padding_value: float = 0
) -> jax.Array:
    """One entry for every outcome, padded."""
    values = np.repeat(values, each, axis=0)
    padding = [(0, batch - len(values))]
    if values.ndim > 1:
        padding += [(0, width - values.shape[1])] + [(0, 0)] * (values.ndim - 2)
    return jnp.asarray(np.pad(values, padding, constant_values=padding_value))


def _table(
    law: Conditional, trees: np.ndarray, parents: Sequence[int], each: int, batch: int
) -> jax.Array:
    """``[B, W, V]``: the laws behind every row."""
    rows = [
        [law(_prefix(tree, parents, node)) for node in range(-1, len(parents))]
        for tree in trees.tolist()
    ]
    uniform = 1 / np.array(rows).shape[-1]
    return _rows(np.array(rows), each, batch, NODES + 1, uniform)


def _sum_up(
    accepted: Acceptance,
    weights: np.ndarray,
    p: Conditional,
    vocab_size: int,
    parents: Sequence[int],
) -> Emitted:
    """Add the outcomes up, the target finishing what is shorter than the longest."""
    length = max(_depths(parents), default=0) + 1
    tokens = np.asarray(accepted.tokens)[: len(weights)]
    num = np.asarray(accepted.num_tokens)[: len(weights)]
    totals: dict[tuple[int, ...], float] = {}
    for row in range(len(weights)):
        emitted = tuple(tokens[row, : num[row]].tolist())
        totals[emitted] = totals.get(emitted, 0.0) + weights[row]
    law = np.zeros([vocab_size] * length)
    for emitted, weight in totals.items():
        rest = target_law(
            lambda t, e=emitted: p((*e, *t)), vocab_size, length - len(emitted)
        )
        law[emitted] += weight * rest
    return Emitted(law, float((weights * num).sum()), float(weights.sum()))
