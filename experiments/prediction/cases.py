"""Real drafters on real prompts: is the verdict the sign of what is measured?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from specjax.acceptance import Greedy
from specjax.analysis.costs.predict import predict
from specjax.analysis.costs.sample import sample, write_texts
from specjax.analysis.costs.session import Candidate, Session
from specjax.analysis.runs import Arm, break_in, interleaved
from specjax.checkpoints import Checkpoint, load, prompt_ids
from specjax.decoding.engine import Engine, EngineOptions, default_widths
from specjax.decoding.interfaces import Drafter
from specjax.decoding.requests import Request
from specjax.drafters import DRAFTERS, DrafterOptions
from specjax.drafters.null import NullDrafter
from specjax.models.build import WeightType
from specjax.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Case:
    """``MODEL,DTYPE,DRAFTER,K``; a drafter made from a model is ``NAME:MODEL``."""

    model: str
    dtype: str
    drafter: str
    k: int

    @classmethod
    def of(cls, text: str) -> Case:
        """From the command line."""
        parts = text.split(",")
        if len(parts) != 4 or not parts[3].isdigit():
            raise SystemExit(f"{text}: write MODEL,DTYPE,DRAFTER,K")
        if int(parts[3]) < 1:
            raise SystemExit(f"{text}: K is at least 1")
        if parts[2].partition(":")[0] not in DRAFTERS:
            raise SystemExit(f"{text}: no such drafter, see `specjax drafters`")
        if parts[1] not in [each.value for each in WeightType]:
            raise SystemExit(f"{text}: no such dtype")
        return cls(parts[0], parts[1], parts[2], int(parts[3]))

    @property
    def name(self) -> str:
        """In both files."""
        return f"{self.model},{self.dtype},{self.drafter},{self.k}"

    def load(self) -> tuple[Checkpoint, Drafter]:
        """The target and its drafter."""
        target = load(self.model, WeightType(self.dtype))
        name, _, source = self.drafter.partition(":")
        model = None
        if source:
            draft = load(source, WeightType(self.dtype), tokenizer=False).decoder
            model = draft
        return target, DRAFTERS[name].build(DrafterOptions(k=self.k, model=model))


def predicted(
    case: Case,
    prompts: list[Prompt],
    tokens: int,
    context: int,
    seconds: float,
    step: Callable[[str], None],
) -> dict[str, Any]:
    """As ``specjax calibrate`` does it."""
    target, drafter = case.load()
    ids = _ids(target, prompts)
    decoder = target.decoder
    step(f"{case.name}: a plain run for α")
    texts = write_texts(decoder, ids, tokens, target.eos_ids)
    found = sample(decoder, drafter, texts, target.eos_ids)
    session = Session(
        target=decoder,
        weights=(decoder.blocks, decoder.head),
        candidates=[Candidate(case.drafter, drafter.max_depth, drafter)],
        widths=default_widths(drafter.max_nodes),
        settings=[(1, context)],
        text=[token for each in ids for token in each],
        seconds=seconds,
    )
    timed = session.run(step, model=case.model, dtype=case.dtype, about={})
    (name,) = timed.curve.drafts
    expected = predict(
        timed.curve,
        case.drafter,
        k=drafter.max_depth,
        nodes=drafter.max_nodes,
        drafting=timed.curve.draft_ratios(name),
        found=found,
    )
    return dataclasses.asdict(expected) | {"name": case.name}


def measured(
    case: Case, prompts: list[Prompt], tokens: int, repeats: int, step: Any
) -> Iterator[dict[str, Any]]:
    """Plain decoding and the drafter in turn, prompt by prompt."""
    target, drafter = case.load()
    ids = _ids(target, prompts)
    room = max(map(len, ids)) + tokens
    options = EngineOptions(capacity_at_least=room, eos_ids=target.eos_ids)
    arms = [
        Arm("none", 0, Engine(target.decoder, NullDrafter(), Greedy(), options)),
        Arm(case.drafter, case.k, Engine(target.decoder, drafter, Greedy(), options)),
    ]
    requests = [Request(prompt_ids=each, max_tokens=tokens) for each in ids]
    step(f"{case.name}: compiling")
    longest = max(requests, key=lambda r: len(r.prompt_ids))
    break_in([arm.engine for arm in arms], longest)
    for trial in interleaved(arms, requests, repeats):
        step(f"{case.name}: prompt {trial.request + 1}, repeat {trial.repeat + 1}")
        plain, drafted = trial.runs
        yield {
            "name": case.name,
            "prompt": prompts[trial.request].id,
            "repeat": trial.repeat,
            "plain": {"tokens": plain.tokens, "seconds": plain.seconds},
            "drafted": {
                "tokens": drafted.tokens,
                "seconds": drafted.seconds,
                "rounds": len(drafted.completion.rounds),
            },
        }


def _ids(target: Checkpoint, prompts: list[Prompt]) -> list[list[int]]:
    assert target.tokenizer is not None
    return [prompt_ids(prompt, target.tokenizer) for prompt in prompts]
