"""Programs for devices that are not here: how they are examined, and that all lower."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compat
from pallas_kernels.aot import __main__ as command
from pallas_kernels.aot import tpu
from pallas_kernels.aot.case import Case, all_cases, array
from pallas_kernels.aot.program import copies, examine

CACHE = (3, 8, 256, 64)
CALL = '  %c = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"'
CASES = all_cases("tpu")
SAMPLED = ("llama-3-8b-w8", "gpt-oss-20b-local-w8", "deepseek-v3-w1", "-loop")


@pytest.mark.parametrize(
    "line",
    [
        "%copy.3 = bf16[3,8,256,64]{3,2,1,0:T(8,128)(2,1)} copy(%k_cache.1)",
        "%t = bf16[3,8,64,256]{3,2,1,0} transpose(%k_cache.1), dimensions={0,1,3,2}",
        "%s = (bf16[3,8,256,64]{3,2,1,0:S(1)}, bf16[3,8,256,64]{2,3,1,0}, u32[]{:S(2)})"
        " copy-start(%k_cache.1)",
        "%f.1 = bf16[3,8,256,64]{3,2,1,0} fusion(%k_cache.1), kind=kLoop",
        "%copy.9 = bf16[3,8,256,64]{3,2,1,0} copy(%dynamic-update-slice.1)",
    ],
)
def test_a_copy_of_a_cache_is_found_whatever_makes_it(line):
    assert copies(f"  ROOT {line}\n", (CACHE,))


@pytest.mark.parametrize(
    "line",
    [
        "%copy.3 = bf16[3,8,1,64]{3,2,1,0} copy(%rows)",
        "%s = (bf16[3,8,256,64]{2,3,1,0:S(3)}, bf16[3,8,256,64]{2,3,1,0:}, u32[])"
        " copy-start(%k_cache.1)",
        "%p = bf16[3,8,256,64]{3,2,1,0} parameter(0)",
        "%b = bf16[3,8,64,256]{2,3,1,0} bitcast(%p)",
        "%dynamic-update-slice_fusion = bf16[3,8,256,64]{3,2,1,0} fusion(%p, %rows)",
    ],
)
def test_what_is_no_copy_is_let_through(line):
    assert copies(f"  ROOT {line}\n", (CACHE,)) == []


def compiled(text: str, aliased: int = 0) -> Any:
    memory = types.SimpleNamespace(alias_size_in_bytes=aliased, temp_size_in_bytes=0)
    return types.SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory)


def case(**more: Any) -> Case:
    return Case("op", "name", lambda x: x, (array(8, 128),), **more)


def test_a_program_without_its_kernel_fails():
    assert examine(case(), compiled(CALL), "tpu").faults == ()
    assert "0 kernels" in examine(case(), compiled("ROOT %x"), "tpu").faults[0]
    assert "not 2" in examine(case(calls=2), compiled(CALL), "tpu").faults[0]


def test_a_donated_array_that_is_not_updated_in_place_fails():
    donating = case(donated=(0,))
    assert examine(donating, compiled(CALL, 8 * 128 * 2), "tpu").faults == ()
    assert "0 of 2048 donated" in examine(donating, compiled(CALL), "tpu").faults[0]


def test_the_examiner_reads_real_programs():
    """On CPU: no kernel is called, and a transposed cache is a copy of it."""
    x = jax.ShapeDtypeStruct(CACHE, jnp.float32)

    def function(x: jax.Array) -> jax.Array:
        return jnp.sin(x).swapaxes(2, 3) + 1

    program = jax.jit(function).lower(x).compile()
    report = examine(case(kept=(CACHE,)), program, "tpu")
    assert report.calls == 0
    assert any("a copy of what is kept" in fault for fault in report.faults)


def test_without_the_compiler_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(tpu, "missing", lambda: "TPU: pip install -e .[aot-tpu]")
    assert command.main([]) == 0
    assert "skipped: TPU: pip install -e .[aot-tpu]" in capsys.readouterr().out


def test_a_case_that_fails_fails_the_command(monkeypatch, capsys):
    def compile_case(case: Case, target: object) -> Any:
        if "mla" in case.name:
            raise RuntimeError("ran out of memory in VMEM")
        return compiled("ROOT %x")

    both = (case(), Case("op", "mla", lambda x: x, (), unfit={"v4": "too small"}))
    monkeypatch.setattr(tpu, "missing", lambda: None)
    monkeypatch.setattr(tpu, "device", lambda generation: None)
    monkeypatch.setattr(tpu, "compile_case", compile_case)
    monkeypatch.setattr(command, "all_cases", lambda platform, only: both)
    assert command.main(["--device", "v4", "--device", "v5e"]) == 3
    out = capsys.readouterr().out
    assert "not for it: too small" in out
    assert "ran out of memory in VMEM" in out
    assert "3 failed" in out


def lowers(case: Case) -> None:
    with compat.lowering_for("tpu", "TPU v5 lite"):
        traced = jax.jit(case.function).trace(*case.arguments)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= case.calls


def name(case: Case) -> str:
    return f"{case.operation}/{case.name}"


def test_there_are_cases():
    assert len(CASES) > 10
    assert len({name(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "case", [c for c in CASES if name(c).endswith(SAMPLED)], ids=name
)
def test_kernels_lower_for_a_tpu_without_its_compiler(case):
    lowers(case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_kernel_lowers_for_a_tpu_without_its_compiler(case):
    lowers(case)
