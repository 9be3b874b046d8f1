"""The three protocols of a round: target, drafter, acceptance rule.

Each is a handful of pure functions on an object that is itself a pytree (parameters
are leaves, configuration is static), so ``round_step(target, drafter, rule, state)``
is one jitted function of pytrees.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from specjax.decoding.draws import Draws
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window

Tap = int
"""Which hidden state: ``i`` is the residual stream after ``i`` blocks (0: embeddings),
and ``FINAL`` is the output of the last norm."""

FINAL: Tap = -1
"""The tap behind the last norm; the residual stream before it is tap ``num_blocks``."""


class ProposalLaw(enum.Enum):
    """How the tokens of a proposal came about; a rule states which of these it takes.

    A rule that is exact for one law is biased for another, so a pair that does not
    fit is refused when it is built.
    """

    DETERMINISTIC = "deterministic"
    INDEPENDENT = "independent"
    IID_CHILDREN = "i.i.d. children"
    WITHOUT_REPLACEMENT = "without replacement"


@runtime_checkable
class Target(Protocol):
    """A model that reads windows (``verify``) and takes in accepted paths (``commit``).

    ``verify`` never changes the state; ``commit`` reads only ``path`` and
    ``num_tokens`` of the acceptance.

    A target whose rows share memory may also have ``admit(prompt_lengths)``, which
    raises if there is too little for a start, and ``room(state, most, active)``, which
    promises each row, before a round, how many tokens it may commit (``[B]``, at most
    ``most[b]``). A row that is promised none ends for want of capacity. ``widest``, if
    it is there and not ``None``, is the most rows that a window with drafts may have.
    """

    @property
    def vocab_size(self) -> int:
        """``V``."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """An empty state for ``batch`` rows of at most ``capacity`` tokens."""
        ...

    def verify(
        self,
        state: Any,
        window: Window,
        *,
        taps: Sequence[Tap] = (),
        logits: Literal["all", "none"] = "all",
    ) -> Verdict:
        """One pass over the window, on top of the committed state."""
        ...

    def commit(self, state: Any, pending: Any, acceptance: Acceptance) -> Any:
        """The state after the accepted path."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts. ``observe`` is called for every committed window, prefill and
    zero-draft rounds included; its ``pending`` is ``None`` where nothing was proposed.

    Proposals of more nodes than their longest path has are trees; where there are as
    many, and they may be trees all the same, ``makes_trees = True`` says so.
    """

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The target's hidden states that ``observe`` needs."""
        ...

    @property
    def max_nodes(self) -> int:
        """``N``: the most nodes of a proposal."""
        ...

    @property
    def max_depth(self) -> int:
        """``K``: the longest path of a proposal."""
        ...

    @property
    def law(self) -> ProposalLaw:
        """How the proposed tokens came about."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """An empty state."""
        ...

    def propose(self, state: Any, context: Context) -> tuple[Proposal, Any]:
        """Draft nodes below the anchor, and what ``observe`` will want back."""
        ...

    def observe(
        self,
        state: Any,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> Any:
        """The state after a window was committed. ``verdict.logits`` is ``None``."""
        ...


@runtime_checkable
class AcceptanceRule(Protocol):
    """A test that keeps a prefix or tree path of the drafts, and adds a token.

    Three things about a rule go without saying, unless an attribute says otherwise: it
    follows a temperature (``samples = False``: it is greedy), with a seed it emits the
    very tokens of plain decoding (``same_tokens = False``: tokens of the same law), and
    it takes trees (``chains_only = True``).
    """

    @property
    def takes(self) -> frozenset[ProposalLaw]:
        """The proposal laws for which the rule is exact."""
        ...

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """The accepted path, before ends and budgets cut it."""
        ...
