"""How well a drafter drafts: a short run, or a replay of one.

Text by text, for texts differ more than rounds do: what is uncertain is which text
comes next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specjax.acceptance import Greedy
from specjax.analysis.costs.scripted import Scripted, needs_target
from specjax.analysis.law import alpha_of_tau
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import Completion, generate
from specjax.decoding.interfaces import Drafter, Target
from specjax.decoding.requests import Request
from specjax.decoding.stats import tau
from specjax.drafters.null import NullDrafter


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rounds of one drafter, by text."""

    drafted: tuple[tuple[int, ...], ...]
    """Nodes of each round's proposal, for each text."""
    tokens: tuple[int, ...]
    """That were committed, for each text."""

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Sample:
        """From outputs; those without a token are left out."""
        kept = [each for each in completions if each.rounds]
        return cls(
            drafted=tuple(tuple(r.drafted for r in each.rounds) for each in kept),
            tokens=tuple(sum(r.committed for r in each.rounds) for each in kept),
        )

    @property
    def rounds(self) -> int:
        """Of all texts."""
        return sum(map(len, self.drafted))

    @property
    def tau(self) -> float:
        """Tokens a round over all texts."""
        return tau(sum(self.tokens), self.rounds)

    def alpha(self, k: int) -> float:
        """The alpha at which chains of ``k`` drafts would do as well as these rounds,
        of which some may have drafted less, or nothing."""
        return alpha_of_tau(min(max(self.tau, 1.0), k + 1.0), k)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts, and what plain greedy decoding says to them."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def whole(self) -> list[list[int]]:
        """Prompt and output of each."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return [[*prompt, *output] for prompt, output in pairs]


def requests_of(prompts: Sequence[Sequence[int]], lengths: int) -> list[Request]:
    """Greedy, of so many tokens each."""
    return [Request(prompt_ids=ids, max_tokens=lengths) for ids in prompts]


def write_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    eos_ids: tuple[int, ...] = (),
) -> Texts:
    """Plain decoding of all prompts in one batch."""
    engine = Engine(target, NullDrafter(), Greedy(), EngineOptions(eos_ids=eos_ids))
    done = generate(engine, requests_of(prompts, tokens))
    return Texts(tuple(map(tuple, prompts)), tuple(each.ids for each in done))


def sample(
    target: Target, drafter: Drafter, texts: Texts, eos_ids: tuple[int, ...] = ()
) -> Sample:
    """How the drafter fares on these texts, by greedy decoding.

    A drafter that looks at tokens alone is put to the written text, without the target.
    """
    if needs_target(drafter):
        engine = Engine(target, drafter, Greedy(), EngineOptions(eos_ids=eos_ids))
        most = max(map(len, texts.outputs))
        return Sample.of(generate(engine, requests_of(texts.prompts, most)))
    script = Scripted.of(texts.whole, target.vocab_size)
    engine = Engine(script, drafter, Greedy())
    requests = [
        Request(prompt_ids=prompt, max_tokens=len(output))
        for prompt, output in zip(texts.prompts, texts.outputs, strict=True)
    ]
    done = generate(engine, requests)
    for completion, output in zip(done, texts.outputs, strict=True):
        assert completion.ids == output, "a replay has left its script"
    return Sample.of(done)
