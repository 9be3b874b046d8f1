"""A benchmark: arms warmed up, calibrated, run in turn, each run put on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from specjax.analysis.calibration import Costs, calibrate
from specjax.analysis.identity import Identity, compare, promises_tokens
from specjax.analysis.records import Record, Setting, record
from specjax.analysis.runs import Arm, Run, Trial, break_in, interleaved
from specjax.decoding.requests import Request
from specjax.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Session:
    """Arms and requests of one benchmark; the first arm is plain decoding."""

    setting: Setting
    arms: Sequence[Arm]
    requests: Sequence[Request]

    def run(
        self, step: Callable[[str], None], prompts: Sequence[Prompt], repeats: int
    ) -> Iterator[Record]:
        """Records as they come, arm by arm; ``step`` is told what begins.

        There is a step to compile, one an arm, and one for each prompt and repeat.
        """
        step(f"compiling {', '.join(arm.name for arm in self.arms)}")
        longest = max(self.requests, key=lambda r: len(r.prompt_ids))
        # a prompt of one token would have no prefill
        break_in([arm.engine for arm in self.arms], longest)
        costs = []
        for arm in self.arms:
            step(f"timing the parts of a round of {arm.name}")
            costs.append(calibrate(arm.engine, self.requests[0]))
        trials = interleaved(self.arms, self.requests, repeats)
        for repeat in range(repeats):
            for prompt in prompts:
                step(f"{prompt.id}{f', repeat {repeat + 1}' if repeats > 1 else ''}")
                yield from self._records(next(trials), prompt, costs)

    def _records(
        self, trial: Trial, prompt: Prompt, costs: Sequence[Costs]
    ) -> Iterator[Record]:
        plain, request = trial.runs[0], self.requests[trial.request]
        for arm, done, cost in zip(self.arms, trial.runs, costs, strict=True):
            identity = self._identity(arm, request, plain, done)
            yield record(
                self.setting,
                arm,
                done,
                plain,
                kind=prompt.kind,
                prompt_id=prompt.id,
                repeat=trial.repeat,
                costs=cost,
                identity=identity,
            )

    def _identity(
        self, arm: Arm, request: Request, plain: Run, done: Run
    ) -> Identity | None:
        """The verdict, or ``None`` where other tokens would be as good."""
        if not promises_tokens(arm.engine.rule, request.temperature):
            return None
        return compare(
            self.arms[0].engine, request, plain.completion.ids, done.completion.ids
        )
