"""What docs/kernels.md says that follows from shapes, plans and data sheets."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

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


def takes(
    cache: str, dim: int = 128, page: int | None = None, latent: bool = False
) -> tuple[bool, bool]:
    """Whether the kernels for TPU and for Hopper do; of codes with scales."""
    narrow = cache in ("int8", "float8_e4m3fn")
    shape = (2, 1 if latent else 2, 512 if page is None else page, dim)
    q = jax.ShapeDtypeStruct((2, 3, 4, dim), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct(shape, cache)
    table = None if page is None else jax.ShapeDtypeStruct((2, 4), jnp.int32)
    window = jnp.dtype("bfloat16" if narrow else cache)
    options = plan.Options(scale=1.0, shared=latent, scaled=narrow)
    call, more = (q, keys, keys, table), {"narrowed": False, "window": window}
    told = (
        plan.refusal(*call, shared=latent, scaled=narrow, **more),
        gpu_plan.refusal(*call, options, **more),
    )
    return told[0] is None, told[1] is None


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_kernels_take_the_caches_that_the_page_says(codes):
    assert PAGE.count("\n| int8 or E4M3") == 2 and "\n| latents, int8" in PAGE
    assert takes("float32") == (True, False)
    assert takes("bfloat16") == takes("bfloat16", 80) == (True, True)
    for size, gpu in ((8, True), (16, True), (32, True), (48, False), (128, True)):
        assert takes("bfloat16", 128, size) == (True, gpu)
        assert takes("bfloat16", 64, size) == (size == 128, gpu)
        assert takes(codes, 128, size) == (size == 128, gpu and size > 16)
    assert takes("bfloat16", 576, latent=True) == (True, gpu_plan.MOST_LATENT == 576)
    assert takes(codes) == (True, True)
    assert takes(codes, 64) == (False, True)
    assert takes(codes, 576, latent=True) == (False, False)


def test_the_example_runs_and_says_what_was_chosen(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "the page", "exec"), {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert "'cpu': 'reference', 'tpu': 'kernel', 'cuda': 'kernel'" in last
