"""The Hopper kernel of gated delta windows, emulated, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import compat, platforms
from pallas_kernels.aot import cuda
from pallas_kernels.aot.program import copies
from pallas_kernels.delta_window import api, gpu, gpu_plan, reference
from pallas_kernels.delta_window.calls import MOST_ROWS, Window
from pallas_kernels.delta_window.conformance import (
    CHECKS,
    CLOSE,
    as_array,
    check_both,
    check_commit,
    exactly,
)
from pallas_kernels.delta_window.problems import Problem, spoilt
from pallas_kernels.delta_window.specs import MODELS, DeltaSpec
from pallas_kernels.mesh import Spread

pytestmark = pytest.mark.timeout(240)

emulated = pytest.mark.skipif(
    compat.VERSION < (0, 12), reason="JAX before 0.12 cannot emulate these kernels"
)

GDN = DeltaSpec(heads=2, key_heads=1, key_dim=128, value_dim=64)
KDA = DeltaSpec(heads=1, key_heads=1, key_dim=64, value_dim=128, channel_decay=True)
PLAIN = DeltaSpec(heads=2, key_heads=1, key_dim=64, value_dim=64, delta=False)
SPECS = {"gdn": GDN, "kda": KDA, "plain": PLAIN}


@emulated
@pytest.mark.parametrize(
    ("operation", "name", "width"),
    [("verify", "gdn", 5), ("ring", "plain", 2), ("both", "kda", 3)],
)
def test_the_kernel_is_the_reference(operation, name, width):
    """Chains, stars and trees; NaN in every row that does not count."""
    CHECKS[operation](gpu, Problem(SPECS[name], width), compat.gpu_interpret())


@emulated
def test_a_state_that_takes_no_row_keeps_its_bits():
    check_commit(gpu, Problem(PLAIN, 9), compat.gpu_interpret())


def by_kernel(case: Problem) -> Any:
    q, k, v, decay, beta, mask = map(as_array, case.window)
    arguments = (q, k, v, decay, beta, jnp.asarray(case.state), mask)
    return gpu.delta_window(*arguments, interpret=compat.gpu_interpret())


@emulated
def test_a_wrong_bit_in_the_mask_shows():
    case = Problem(GDN, 4, batch=2)
    q, k, v, decay, beta, mask = case.window
    wanted = exactly(
        reference.delta_window, q, k, v, decay, beta, case.state, mask.copy()
    )
    mask[1, 3, 2] = True  # sees its sibling
    off = np.abs(np.asarray(by_kernel(case)[0]) - wanted[0]).max(axis=(2, 3))
    assert off[1, 3] > 100 * CLOSE["atol"]
    assert np.all(np.delete(off.reshape(-1), 4 + 3) < CLOSE["atol"])


@emulated
def test_a_row_too_many_shows():
    """The row behind the last that counts is NaN, and is not looked at."""
    case = Problem(PLAIN, 1, batch=1)
    rows = case.records(3)
    path, num = np.asarray([[0, 1, 2]], np.int32), np.asarray([2], np.int32)
    poisoned, state = spoilt(rows, path, num), jnp.asarray(case.state)

    def folded(count: int) -> np.ndarray:
        num = jnp.full((1,), count, jnp.int32)
        return np.asarray(
            gpu.delta_fold(state, poisoned, num, interpret=compat.gpu_interpret())
        )

    assert np.isfinite(folded(2)).all()
    assert np.isnan(folded(3)).all()


@emulated
def test_a_wait_that_is_left_out_shows(monkeypatch):
    """What the looking for races would see."""
    jax.clear_caches()  # what was traced whole would be run again
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *_: None)
    with pytest.raises(compat.RaceError), compat.without_gpu_races():
        jax.block_until_ready(by_kernel(Problem(PLAIN, 1, batch=1)))
    jax.clear_caches()


@emulated
def test_long_forgotten_rows_and_loud_siblings_do_no_harm():
    case = Problem(GDN, 6, batch=2)
    q, k, v, decay, beta, mask = case.window
    star = 1  # in this row of the batch all drafts are siblings
    k[star, 3] *= 1e3
    v[star, 3] *= 1e6
    decay[star, 4], decay[star, 5] = -2000.0, -1e-3
    decay[0, :3] = -700.0  # a sum with these has lost what later rows add
    wanted = exactly(reference.delta_window, q, k, v, decay, beta, case.state, mask)
    quiet = np.delete(np.arange(6), 3)
    for ours, theirs in zip(by_kernel(case), wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours)[:, quiet], theirs[:, quiet], **CLOSE
        )


@pytest.mark.parametrize("width", [3, 33])
@pytest.mark.parametrize("name", SPECS)
def test_products_that_are_fused_are_the_products(name, width):
    """33 rows go by blocks."""
    window = Problem(SPECS[name], width).window
    q, k, _, decay, beta, mask = map(as_array, window)

    def products(fused: bool) -> Any:
        return reference.weigh(q, k, decay, beta, mask, fused=fused)

    wanted = exactly(reference.weigh, q, k, decay, beta, mask)
    for fused in (False, True):
        got = products(fused)
        for ours, theirs in zip(
            jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=2e-6)


def shapes(
    spec: DeltaSpec, width: int, slots: int = 0, dtype: Any = jnp.float32
) -> tuple[Any, Window, Any]:
    """Of a call: state, window and past rows."""
    case = Problem(spec, 1)

    def rows(x: Any, count: int) -> Any:
        if x is None:
            return None
        return jax.ShapeDtypeStruct((x.shape[0], count, *x.shape[2:]), dtype)

    mask = jax.ShapeDtypeStruct((3, width, width), jnp.bool_)
    window = Window(*(rows(x, width) for x in case.window[:5]), mask)
    past = case.records(1)
    past = jax.tree.map(lambda x: rows(x, slots), past) if slots else None
    return jax.ShapeDtypeStruct(case.state.shape, dtype), window, past


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 8, 16, MOST_ROWS])
def test_layers_of_real_models_are_taken(name, width):
    call = shapes(MODELS[name], width, 16)
    assert gpu_plan.refusal(*call) is None
    assert gpu_plan.refusal(*call, writes=True) is None
    plan = gpu_plan.plan_of(*call)
    assert plan.columns >= width
    assert plan.weights[0] * plan.weights[1] % gpu_plan.LINE == 0
    assert plan.slots % gpu_plan.LINE == 0


def test_what_it_cannot_take_is_said():
    def told(spec: DeltaSpec, width: int, *more: Any) -> str:
        return str(gpu_plan.refusal(*shapes(spec, width, *more)))

    assert "65" in told(GDN, MOST_ROWS + 1)
    assert "65" in told(GDN, 1, MOST_ROWS + 1)
    assert "state is bfloat16" in told(GDN, 4, 0, jnp.bfloat16)
    odd = DeltaSpec(heads=1, key_heads=1, key_dim=96, value_dim=64)
    assert "96 by 64" in told(odd, 4)
    assert "128 by 256" in told(DeltaSpec(heads=1, key_heads=1, value_dim=256), 4)
    wide = DeltaSpec(heads=1, key_heads=1, channel_decay=True)
    assert "shared memory" in told(wide, MOST_ROWS, MOST_ROWS)
    assert told(wide, MOST_ROWS) == "None"


def lowered(kind: str) -> str:
    """Of a window and a commit, for a GPU of a kind."""
    case = Problem(GDN, 2)
    records, (path, num) = case.records(2), case.paths(2)

    def run(state: jax.Array) -> Any:
        rest = map(as_array, (path, num, *case.window))
        return api.delta_commit_window(state, records, *rest)

    with compat.lowering_for("gpu", kind, 132):
        traced = jax.jit(run).trace(jnp.asarray(case.state))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_hopper_runs_the_kernel_and_other_gpus_the_reference():
    assert "mosaic_gpu" in lowered("NVIDIA H100 80GB HBM3")
    platforms.forget_choices()
    assert "mosaic_gpu" not in lowered("NVIDIA A100-SXM4-80GB")
    (choice,) = platforms.choices()
    assert "A100" in choice.on("cuda") and "Hopper" in choice.on("cuda")


@pytest.mark.full
@emulated
@pytest.mark.parametrize("width", [1, 2, 8, 9, 16, 33])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("operation", CHECKS)
def test_every_width(operation, name, width):
    case = Problem(SPECS[name], width, batch=3 if width < 16 else 2, seed=1)
    CHECKS[operation](gpu, case, compat.gpu_interpret())


# of value heads to key heads, and of head sizes
SIZES = {
    "one each": DeltaSpec(heads=2, key_heads=2),
    "three each": DeltaSpec(heads=6, key_heads=2, key_dim=64, value_dim=64),
    "four each, by channel": DeltaSpec(
        heads=4, key_heads=1, value_dim=64, channel_decay=True
    ),
    "64 by 128": DeltaSpec(heads=2, key_heads=1, key_dim=64),
    "plain, 128 by 64": DeltaSpec(heads=4, key_heads=2, value_dim=64, delta=False),
}


@pytest.mark.full
@emulated
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_size(name, batch):
    check_both(gpu, Problem(SIZES[name], 5, batch), compat.gpu_interpret(), rows=5)


@pytest.mark.full
@emulated
def test_the_widest_window():
    case = Problem(GDN, MOST_ROWS, batch=2)
    check_both(gpu, case, compat.gpu_interpret(), rows=MOST_ROWS)


@pytest.mark.full
@pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
def test_on_a_mesh_each_gpu_has_its_rows():
    """Compiled for four H100 that are not there: no state is gathered or copied."""
    case = Problem(MODELS["qwen3-next-80b"], 4, batch=4)
    path, num = case.paths(4)
    arguments = (case.state, case.records(4), path, num, *case.window)
    mesh = Mesh(np.array(cuda.devices("h100", 4)).reshape(2, 2), ("rows", "cols"))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    there = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), arguments
    )

    def run(*arguments: Any) -> Any:
        spread = Spread(mesh, batch="rows", heads="cols")
        return api.delta_commit_window(
            *arguments, spread=spread, implementation="require"
        )

    with jax.set_mesh(mesh):
        program = jax.jit(run, donate_argnums=0).lower(*there).compile()
    text = program.as_text()
    (call,) = [line for line in text.splitlines() if '"mosaic_gpu' in line]
    assert "f32[2,32,128,128]" in call.split(" custom-call(")[0]
    assert "all-gather" not in text
    assert copies(text, ((2, 32, 128, 128),)) == []
