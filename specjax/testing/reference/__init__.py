"""An independent reference that re-scores whole outputs.

Plain numpy in float64: no cache, no windows, no jax, and no code in common with the
rest of the project. What the decoder emits is checked against it token by token, so a
mistake has to be made twice, in two forms, to go unseen.
"""

from specjax.testing.reference.law import Law, Settings, adjusted, law
from specjax.testing.reference.model import logits
from specjax.testing.reference.noise import gumbel
from specjax.testing.reference.score import Difference, Rescore, rescore
from specjax.testing.reference.serial import continue_greedy, continue_sampled

__all__ = [
    "Difference",
    "Law",
    "Rescore",
    "Settings",
    "adjusted",
    "continue_greedy",
    "continue_sampled",
    "gumbel",
    "law",
    "logits",
    "rescore",
]
