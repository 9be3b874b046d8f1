"""Static figures of the TPU's kernels, and the file that they are held to."""

import importlib.metadata
import subprocess
import sys

import pytest

from pallas_kernels.aot import bundles, tpu
from pallas_kernels.aot.bundles import DEVICES, Figures
from pallas_kernels.aot.case import all_cases

SCHEDULE = """Schedule analysis:
\ttotal scheduled bundles:    120
\tnon empty scheduled bundles: 118
\t117.00 scheduled bundles: %k = f32[8] custom-call(%x), {target}
"""
USE = """== CAPACITY:
MXU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
  4, 3, 3, 1, 1, 2
== UTILIZATION:
0 0 0 0 0 1
0 0 0 1 1 0
0 0 1 0 1 0
"""


def write(folder, stem, number, target=bundles.KERNEL):
    schedule = folder / f"{stem}-{number}-schedule-analysis_final_bundles.txt"
    schedule.write_text(SCHEDULE.format(target=target))
    use = f"{stem}-{number + 2}-final_hlo-static-per-bundle-utilization.txt"
    (folder / use).write_text(USE)


def test_kernels_are_told_from_what_stands_beside_them(tmp_path):
    write(tmp_path, "12-delta.1", 70)
    write(tmp_path, "13-delta.10", 71)
    write(tmp_path, "14-fusion", 65, target="")
    write(tmp_path, "12-TLP", 72)
    assert bundles.read_figures(tmp_path) == Figures(2, 2 * 118, 2 * 2)


def test_a_program_without_a_kernel_or_a_count_is_an_error(tmp_path):
    write(tmp_path, "14-fusion", 65, target="")
    with pytest.raises(ValueError, match="wrote of no kernel"):
        bundles.read_figures(tmp_path)
    file = tmp_path / "15-k-3-schedule-analysis_final_bundles.txt"
    file.write_text(bundles.KERNEL)
    with pytest.raises(ValueError, match="counts no bundles"):
        bundles.read_figures(tmp_path)


def test_the_baseline_holds_every_kernel_and_no_other():
    wanted = {
        f"{device} {case.operation}/{case.name}"
        for device in DEVICES
        for case in all_cases("tpu")
        if device not in case.unfit
    }
    assert set(bundles.KEPT.figures()) == wanted


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
@pytest.mark.parametrize("only", ["delta_window/qwen3.5", "w8-pages-128"])
def test_the_compiler_makes_what_the_baseline_says(only):
    made_by = bundles.KEPT.made_by()
    if made_by != importlib.metadata.version("libtpu"):
        pytest.skip(f"the baseline is of libtpu {made_by}")
    command = [sys.executable, "-m", "pallas_kernels.aot.bundles", "--only", only]
    # libtpu reads its settings once, when it is loaded
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as the baseline says" in done.stdout
