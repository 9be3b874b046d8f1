"""The table of docs/kernels.md that follows from shapes and data sheets."""

import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels.window_attention import gpu_plan, plan
from pallas_kernels.window_attention.specs import MODELS
from specjax.analysis.law.devices import DEVICES
from specjax.analysis.law.tiles import tile_drafts

PAGE = (Path(__file__).resolve().parents[2] / "docs/kernels.md").read_text("utf-8")
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def widest(fits: Callable[[int], bool]) -> int:
    width = 1
    while fits(width):
        width += 1
    return width - 1


def test_the_widest_windows_are_those_of_the_plans_and_the_data_sheets():
    section = PAGE.split("## How wide a window is nearly free")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z][\w.-]*) \| (\d.*) \|$", section, re.MULTILINE)
    assert len(rows) == 5
    for name, cells in rows:
        spec = MODELS[name]
        group = spec.q_heads // spec.kv_heads

        def shapes(width: int, spec=spec) -> plan.Shapes:
            heads = spec.q_heads, spec.kv_heads
            return plan.Shapes(1, width, *heads, spec.dim, spec.dim, 8192)

        by_gpu = widest(lambda w, s=shapes: gpu_plan.make_plan(s(w)).row_tiles == 1)
        by_tpu = widest(
            lambda w, s=shapes: plan.make_plan(s(w), BFLOAT16).row_tiles == 1
        )
        ridges = [
            int(DEVICES[device].flops / DEVICES[device].bandwidth)
            // (group * (2 if spec.latent else 1))
            for device in ("H100", "TPU v5e", "TPU v6e")
        ]
        wanted = [group, by_gpu, by_tpu, *ridges]
        assert [cell.strip() for cell in cells.split("|")] == list(map(str, wanted))
        assert by_tpu == int(tile_drafts(group, 256)) + 1
        assert by_gpu == int(tile_drafts(group, 64)) + (group <= 64)
