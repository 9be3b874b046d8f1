"""The speed-up law, one idea a file, in SI units.

``verification`` says what a pass costs, ``acceptance_length`` how many tokens a round
commits, ``speedup`` what follows. What speculation costs elsewhere: ``streaming``,
``memory``, ``experts``, ``communication``, ``rollback``. ``tiles`` and ``devices`` hold
figures of kernels and of accelerators, ``sizes`` what is to know of model and device.
"""

from specjax.analysis.law.acceptance_length import (
    alpha_of_tau,
    chain_tau,
    chain_tau_limit,
    tau_by_depth,
    tree_tau,
    tree_tau_by_rank,
)
from specjax.analysis.law.devices import DEVICES, MODELS, Published
from specjax.analysis.law.sizes import Device, Model
from specjax.analysis.law.speedup import (
    Limit,
    best_k,
    break_even_alpha,
    break_even_batch,
    limits,
    round_cost,
    speedup,
)
from specjax.analysis.law.verification import (
    compute_seconds,
    free_rows,
    intensity,
    memory_seconds,
    pass_seconds,
    verify_cost,
)

__all__ = [
    "DEVICES",
    "MODELS",
    "Device",
    "Limit",
    "Model",
    "Published",
    "alpha_of_tau",
    "best_k",
    "break_even_alpha",
    "break_even_batch",
    "chain_tau",
    "chain_tau_limit",
    "compute_seconds",
    "free_rows",
    "intensity",
    "limits",
    "memory_seconds",
    "pass_seconds",
    "round_cost",
    "speedup",
    "tau_by_depth",
    "tree_tau",
    "tree_tau_by_rank",
    "verify_cost",
]
