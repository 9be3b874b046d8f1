"""The serial decoder: one token after the other, from the definition.

Every token costs a pass over the whole sequence. Nothing is kept between tokens, so
there is nothing that could be kept wrongly.
"""

from __future__ import annotations

import numpy as np

from specjax.testing.reference.law import Law, Settings, law
from specjax.testing.reference.model import Config, Ids, Tensors, logits
from specjax.testing.reference.noise import gumbel


def continue_greedy(
    tensors: Tensors, config: Config, prompt_ids: Ids, n: int
) -> list[int]:
    """The ``n`` tokens of greedy decoding."""
    return continue_sampled(tensors, config, prompt_ids, n, Settings(), seed=None)


def continue_sampled(
    tensors: Tensors,
    config: Config,
    prompt_ids: Ids,
    n: int,
    settings: Settings,
    seed: int | None,
) -> list[int]:
    """The ``n`` tokens of plain sampling. No stop token ends them early."""
    prompt = [int(token) for token in prompt_ids]
    output: list[int] = []
    for _ in range(n):
        sequence = prompt + output
        row = logits(tensors, config, sequence, last=1)[0]
        p = law(row, settings, prompt, output)
        t = len(sequence)  # where the new token will stand
        s = values(p, seed, t)
        output.append(int(np.argmax(np.where(p.kept(), s, -np.inf))))
    return output


def values(p: Law, seed: int | None, t: int) -> np.ndarray:
    """``[V]``: what the token at position ``t`` is the argmax of, among those kept.

    The adjusted logits when greedy; when sampling the log-law plus Gumbel noise, whose
    argmax is a draw from the law.
    """
    if p.settings.temperature == 0:
        return p.scores
    if seed is None:
        raise ValueError("sampled tokens are a function of a seed: give one")
    return p.scores + gumbel(seed, t, len(p.scores))
