"""Programs for devices that are not here: how they are examined, and that all lower."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compat
from pallas_kernels.aot import __main__ as command
from pallas_kernels.aot import cuda, registers, tpu
from pallas_kernels.aot.case import Case, all_cases, array
from pallas_kernels.aot.program import KERNEL_CALLS, copies, examine

CACHE = (3, 8, 256, 64)
CALL = '  %c = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"'
SAMPLED = ("llama-3-8b-w8", "gpt-oss-20b-local-w8", "deepseek-v3-w1", "-loop")


@pytest.mark.parametrize(
    "line",
    [
        "%copy.3 = bf16[3,8,256,64]{3,2,1,0:T(8,128)(2,1)} copy(%k_cache.1)",
        "%t = bf16[3,8,64,256]{3,2,1,0} transpose(%k_cache.1), dimensions={0,1,3,2}",
        "%s = (bf16[3,8,256,64]{3,2,1,0:S(1)}, bf16[3,8,256,64]{2,3,1,0}, u32[]{:S(2)})"
        " copy-start(%k_cache.1)",
        "%s = (bf16[3,8,256,64]{3,2,1,0:}, bf16[3,8,256,64]{3,2,1,0:S(1)}, u32[])"
        " copy-start(%dynamic_update_slice.1)",
        "%f.1 = bf16[3,8,256,64]{3,2,1,0} fusion(%k_cache.1), kind=kLoop",
        "%copy.9 = bf16[3,8,256,64]{3,2,1,0} copy(%dynamic-update-slice.1)",
    ],
)
def test_a_copy_of_a_cache_is_found_whatever_makes_it(line):
    assert copies(f"  ROOT {line}\n", (CACHE,))


def test_a_state_may_be_taken_back_from_where_it_was_brought():
    line = (
        "  %s = (bf16[3,8,256,64]{3,2,1,0:}, bf16[3,8,256,64]{3,2,1,0:S(1)}, u32[])"
        " copy-start(%delta_window.1)"
    )
    assert copies(line, (CACHE,))
    assert copies(line, (CACHE,), rewritten=True) == []
    turned = line.replace("{3,2,1,0:S(1)}", "{2,3,1,0:S(1)}")
    assert copies(turned, (CACHE,), rewritten=True)


@pytest.mark.parametrize(
    "line",
    [
        "%copy.3 = bf16[3,8,1,64]{3,2,1,0} copy(%rows)",
        "%s = (bf16[3,8,256,64]{2,3,1,0:S(3)}, bf16[3,8,256,64]{2,3,1,0:}, u32[])"
        " copy-start(%k_cache.1)",
        "%p = bf16[3,8,256,64]{3,2,1,0} parameter(0)",
        "%b = bf16[3,8,64,256]{2,3,1,0} bitcast(%p)",
        "%loop_dynamic_update_slice_fusion.2 = bf16[3,8,256,64]{3,2,1,0} fusion(%p)",
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


@pytest.mark.parametrize(
    ("device", "compiler", "extra"),
    [("v4", tpu, "aot-tpu"), ("h100", cuda, "aot-cuda")],
)
def test_without_the_compiler_it_says_what_to_install(
    device, compiler, extra, monkeypatch, capsys
):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    assert command.main(["--device", device]) == 0
    told = capsys.readouterr().out
    assert "skipped: " in told and f"pip install -e .[{extra}]" in told


def test_each_kind_of_gpu_has_a_process_of_its_own(monkeypatch):
    """And TPUs are compiled for in this one."""
    seen = []

    def run(line: list[str], **_: Any) -> Any:
        seen.append(line[line.index("--device") + 1])
        return types.SimpleNamespace(returncode=2)

    monkeypatch.setattr(tpu, "missing", lambda: "not here")
    monkeypatch.setattr(cuda, "TARGETS", {"h100": None, "other": None})
    monkeypatch.setattr(command.subprocess, "run", run)
    assert command.main([]) == 4
    assert seen == ["h100", "other"]


def test_what_is_asked_for_and_is_not_there_is_an_error(monkeypatch, capsys):
    for line in (["--only", "nosuch"], ["--device", "h100", "--only", "ring-w8-b1x"]):
        with pytest.raises(SystemExit) as ended:
            command.main(line)
        assert ended.value.code == 2
        assert f"has '{line[-1]}' in its name" in capsys.readouterr().err
    # a part of a name that only programs for TPUs have asks for no GPU
    monkeypatch.setattr(tpu, "missing", lambda: "not here")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: pytest.fail("ran"))
    only = "window_attention/llama-3-8b-w8-b1"
    assert all_cases("tpu", only) and not all_cases("cuda", only)
    assert command.main(["--only", only]) == 0


def test_names_can_be_listed(capsys):
    assert command.main(["--list", "--device", "h100", "--only", "skinny"]) == 0
    listed = capsys.readouterr().out.split()
    wanted = {name(case) for case in all_cases("cuda", "skinny")}
    assert set(listed) == wanted and len(listed) == len(wanted)


PTXAS = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
    8 bytes stack frame, {stored} bytes spill stores, {loaded} bytes spill loads
ptxas info    : Used 213 registers, used 2 barriers, 1 bytes smem
"""


def test_what_ptxas_says_is_read():
    assert cuda.registers_of(PTXAS.format(stored=0, loaded=0)) == (213, 0)
    assert cuda.registers_of(PTXAS.format(stored=20, loaded=16)) == (213, 36)
    assert cuda.shared_of("Resources(smem_scratch_bytes=135168, tmem=0)") == 135168
    with pytest.raises(ValueError, match="spill stores"):
        cuda.registers_of("ptxas fatal")


def test_spills_and_too_much_shared_memory_are_faults():
    assert cuda.Resources(255, 0, 227 << 10).faults() == ()
    assert cuda.Resources(255, 0, None).faults() == ()
    assert "36 bytes" in cuda.Resources(255, 36, 1024).faults()[0]
    assert "shared memory" in cuda.Resources(64, 0, 228 << 10).faults()[0]


def test_a_product_that_reads_what_no_fence_has_let_through_is_found():
    store, fence = "st.shared.b32 [%r1], %r2;", "fence.proxy.async.shared::cta;"
    product = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1};"
    stores = (store, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};")
    assert cuda.unfenced_products(f"{product}\n{store}\n{fence}\n{product}") == []
    for one in stores:
        (told,) = cuda.unfenced_products(f"{fence}\n{one}\n{product}\n{fence}")
        assert "line 3" in told


def test_a_kernel_that_was_compiled_before_keeps_its_figures(tmp_path, monkeypatch):
    """ptxas runs once for each; a program may have several."""
    monkeypatch.setattr(cuda, "_dump_folder", lambda: tmp_path)
    monkeypatch.setattr(cuda, "_compiled", {})
    first, second = (f'kernel_hash = "{name}", module = "x"' for name in "ab")
    assert cuda.resources("no kernel") is None
    (tmp_path / "k_0.ptxas").write_text(PTXAS.format(stored=0, loaded=0))
    (tmp_path / "k_0.resources.txt").write_text("smem_scratch_bytes=5")
    assert cuda.resources(first) == cuda.Resources(213, 0, 5)
    (tmp_path / "k_0.ptxas").unlink()
    assert cuda.resources(first) == cuda.Resources(213, 0, 5)
    with pytest.raises(ValueError, match="0 kernels, and 1 are new"):
        cuda.resources(first + second)


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


def test_what_is_kept_is_every_kernel_and_no_other():
    kept = registers.KEPT.figures()
    names = {name(case) for case in all_cases("cuda")}
    # older JAX has fewer cases
    assert names <= set(kept)
    assert names == set(kept) or registers.KEPT.made_by() != jax.__version__
    most = max(shared for _, shared in kept.values())
    assert 0 < most <= cuda.SHARED_BYTES


DEVICES = {"tpu": ("tpu", "TPU v5 lite"), "cuda": ("gpu", "NVIDIA H100")}


def lowers(case: Case, platform: str) -> None:
    with compat.lowering_for(*DEVICES[platform]):  # pyright: ignore
        traced = jax.jit(case.function).trace(*case.arguments)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert sum(text.count(f"@{call}") for call in KERNEL_CALLS[platform]) >= case.calls


def name(case: Case) -> str:
    return f"{case.operation}/{case.name}"


def cells(only: tuple[str, ...] = ("",)) -> list[Any]:
    return [
        pytest.param(case, platform, id=f"{platform}-{name(case)}")
        for platform in DEVICES
        for case in all_cases(platform)
        if name(case).endswith(only)
    ]


@pytest.mark.parametrize("platform", DEVICES)
def test_there_are_cases(platform):
    names = [name(case) for case in all_cases(platform)]
    assert len(names) > 10
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("case", "platform"), cells(SAMPLED))
def test_kernels_lower_for_a_device_without_its_compiler(case, platform):
    lowers(case, platform)


@pytest.mark.full
@pytest.mark.parametrize(("case", "platform"), cells())
def test_every_kernel_lowers_for_a_device_without_its_compiler(case, platform):
    lowers(case, platform)


@pytest.fixture
def _nothing_kept():
    """A program that was kept is not compiled, and then ptxas says nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.full
@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("case", all_cases("cuda"), ids=name)
def test_every_kernel_compiles_for_hopper(case):
    """As ``make aot`` does, where the compiler is installed."""
    absent = cuda.missing()
    if absent is not None:
        pytest.skip(absent)
    program = cuda.compile_case(case, cuda.device("h100"))
    assert examine(case, program, "cuda").faults == ()
    taken = cuda.resources(program.as_text())
    assert taken is not None and taken.faults() == ()
    assert cuda.unfenced() == []
    assert registers.grown(name(case), taken) == []
