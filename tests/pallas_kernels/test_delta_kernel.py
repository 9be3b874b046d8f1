"""The TPU kernel of gated delta windows, emulated, against the reference in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, platforms
from pallas_kernels.delta_window import api, calls, plan, reference, tpu
from pallas_kernels.delta_window.conformance import (
    CHECKS,
    CLOSE,
    as_array,
    check_both,
    compare,
    exactly,
)
from pallas_kernels.delta_window.problems import Problem, spoilt
from pallas_kernels.delta_window.specs import MODELS, DeltaSpec
from pallas_kernels.mesh import Spread

GDN = DeltaSpec(heads=4, key_heads=2)
KDA = DeltaSpec(heads=2, key_heads=2, channel_decay=True)
PLAIN = DeltaSpec(heads=4, key_heads=2, value_dim=64, delta=False)

B = 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("operation", "spec", "width"),
    [("verify", GDN, 8), ("ring", PLAIN, 3), ("both", KDA, 7), ("commit", GDN, 9)],
)
def test_the_kernel_is_the_reference(operation, spec, width):
    CHECKS[operation](tpu, Problem(spec, width))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("spec", [GDN, KDA, PLAIN], ids=["gdn", "kda", "plain"])
@pytest.mark.parametrize("operation", CHECKS)
def test_the_kernel_is_the_reference_at_every_width(operation, spec, width):
    CHECKS[operation](tpu, Problem(spec, width, seed=1))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("operation", ["verify", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_is_the_reference_at_the_sizes_of_real_models(name, operation):
    CHECKS[operation](tpu, Problem(MODELS[name], 8, seed=2))


# of value heads to key heads, of head sizes and of head counts
SIZES = {
    "one each": DeltaSpec(heads=3, key_heads=3),
    "three each": DeltaSpec(heads=6, key_heads=2),
    "four each, by channel": DeltaSpec(heads=8, key_heads=2, channel_decay=True),
    "a prime number": DeltaSpec(heads=7, key_heads=7, key_dim=64, value_dim=64),
    "a larger prime": DeltaSpec(heads=13, key_heads=13),
    "80 wide": DeltaSpec(heads=4, key_heads=2, key_dim=80, value_dim=80),
    "96 by 64": DeltaSpec(heads=4, key_heads=4, key_dim=96, value_dim=64),
    "flipped, by channel": DeltaSpec(
        heads=4, key_heads=2, value_dim=64, channel_decay=True
    ),
    "256 wide": DeltaSpec(heads=4, key_heads=2, key_dim=256, value_dim=256),
    "four steps": DeltaSpec(heads=32, key_heads=32),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SIZES)
def test_the_kernel_is_the_reference_at_other_sizes(name):
    spec = SIZES[name]
    case = Problem(spec, 16 if name == "four steps" else 5)
    check_both(tpu, case)
    steps = plan.plan_of(case.state, case.window).steps
    assert steps == (4 if name == "four steps" else 1)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_steps_do_not_depend_on_their_order_or_on_what_memory_holds(seed):
    # memory starts as NaN, and parallel steps are walked in an order that is drawn
    interpret = compat.tpu_interpret(detect_races=True, seed=seed)
    with compat.without_races():
        check_both(tpu, Problem(DeltaSpec(heads=32, key_heads=32), 16), interpret)


@pytest.mark.timeout(120)
def test_long_forgotten_rows_and_loud_siblings_do_no_harm():
    case = Problem(GDN, 8)
    q, k, v, decay, _, _ = case.window
    star = 1  # in this row of the batch all drafts are siblings
    k[star, 3] *= 1e3
    v[star, 3] *= 1e6
    decay[star, 4], decay[star, 5] = -2000.0, -1e-3
    decay[0, :3] = -700.0  # a sum with these has lost what later rows add
    q, k, v, decay, beta, mask = (as_array(x) for x in case.window)
    got = tpu.delta_window(
        q, k, v, decay, beta, jnp.asarray(case.state), mask, interpret=True
    )
    wanted = exactly(reference.delta_window, q, k, v, decay, beta, case.state, mask)
    quiet = np.delete(np.arange(8), 3)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours)[:, quiet], theirs[:, quiet], **CLOSE
        )


def test_a_wrong_bit_in_the_mask_shows():
    case = Problem(GDN, 8)
    q, k, v, decay, beta, mask = (as_array(x) for x in case.window)
    wanted = exactly(reference.delta_window, q, k, v, decay, beta, case.state, mask)
    wrong = mask.at[1, 5, 4].set(True)  # sees its sibling
    got = tpu.delta_window(
        q, k, v, decay, beta, jnp.asarray(case.state), wrong, interpret=True
    )
    off = np.abs(np.asarray(got[0]) - wanted[0]).max(axis=(2, 3))
    assert off[1, 5] > 100 * CLOSE["atol"]
    assert np.all(np.delete(off.reshape(-1), 8 + 5) < CLOSE["atol"])


def traced(*arguments: Any, **kind: Any) -> str:
    """What the last call of an operation that is only traced was to run on TPU."""
    platforms.forget_choices()
    jax.eval_shape(lambda *x: api.delta_window(*x, **kind), *arguments)
    (choice,) = platforms.choices()
    return choice.on("tpu")


def shapes(spec: DeltaSpec, width: int, dtype: Any = jnp.float32) -> list[Any]:
    case = Problem(spec, 1)
    q, k, v, decay, beta, _ = case.window

    def wide(x: Any) -> Any:
        if x is None:
            return None
        return jax.ShapeDtypeStruct((B, width, *x.shape[2:]), dtype)

    state = jax.ShapeDtypeStruct(case.state.shape, dtype)
    mask = jax.ShapeDtypeStruct((B, width, width), jnp.bool_)
    return [*map(wide, (q, k, v, decay, beta)), state, mask]


def test_what_runs_is_said():
    assert traced(*shapes(GDN, 8)) == "kernel"
    assert "65" in traced(*shapes(GDN, calls.MOST_ROWS + 1))
    assert "bfloat16" in traced(*shapes(GDN, 8, jnp.bfloat16))
    tiny = DeltaSpec(heads=4, key_heads=2, key_dim=8, value_dim=8)
    assert "8 by 8" in traced(*shapes(tiny, 8))
    odd = DeltaSpec(heads=4, key_heads=2, key_dim=96, value_dim=64)
    assert "copy the state" in traced(*shapes(odd, 8))
    with pytest.raises(platforms.NoKernelError, match="8 by 8"):
        traced(*shapes(tiny, 8), implementation="require")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 8, 16, 64])
def test_layers_of_real_models_are_cut_into_steps_of_whole_heads(name, width):
    spec = MODELS[name]
    arguments = shapes(spec, width)
    window = calls.Window(*arguments[:5], arguments[6])
    cut = plan.plan_of(arguments[5], window)
    assert cut.refusal() is None
    assert cut.steps * cut.heads_per_step == spec.heads
    assert cut.heads_per_step * spec.value_dim % plan.LANES == 0


def test_other_platforms_run_the_reference_bit_for_bit():
    case = Problem(GDN, 5)
    q, k, v, decay, beta, mask = (as_array(x) for x in case.window)
    arguments = (q, k, v, decay, beta, jnp.asarray(case.state), mask)
    program = jax.jit(api.delta_window).lower(*arguments)
    assert "tpu_custom_call" not in program.as_text()
    ours = program.compile()(*arguments)
    theirs = jax.jit(reference.delta_window)(*arguments)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch", [4, 3])
def test_on_a_mesh_each_device_has_its_rows(cpu_devices, batch):
    # three rows do not divide by two devices: each then has all of them
    mesh = jax.sharding.Mesh(np.array(cpu_devices[:4]).reshape(2, 2), ("rows", "cols"))
    spread = Spread(mesh, batch="rows", heads="cols")
    case = Problem(GDN, 5, batch)
    records, (path, num) = case.records(5), case.paths(5)
    rest = (path, num, *case.window)
    wanted = exactly(reference.delta_commit_window, case.state, records, *rest)
    poisoned = spoilt(records, path, num)
    run = jax.jit(
        functools.partial(
            api.delta_commit_window, spread=spread, implementation="interpret"
        )
    )
    arguments = (jnp.asarray(case.state), poisoned, *map(as_array, rest))
    got = run(*arguments)
    compare(got, wanted)
    divided = {x.sharding.shard_shape(x.shape)[0] for x in got}
    assert divided == {2 if batch == 4 else 3}
    q, k, v, decay, beta, mask = map(as_array, case.window)
    ring = functools.partial(
        api.delta_window, spread=spread, implementation="interpret"
    )
    args = (q, k, v, decay, beta, jnp.asarray(case.state), mask, records, num)
    compare(jax.jit(ring)(*args), exactly(reference.delta_window, *args))
