"""From named tensors to layers: types, stacks of experts, and errors that name."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.safetensors import SafetensorsReader
from specjax.models.axes import EMBED, EXPERT, LATENT, MLP
from specjax.models.build import Builder, WeightType
from specjax.models.config import MoEConfig, RouterConfig

D, SIZE, E = 6, 5, 4
NAMES = [f"experts.{e}" for e in range(E)]
ROUTER = RouterConfig(kind="sigmoid", top_k=2)
GATED = MoEConfig(num_experts=E, size=SIZE, router=ROUTER)
PLAIN = MoEConfig(num_experts=E, size=SIZE, router=ROUTER, kind="plain", latent_dim=3)
TYPES = [WeightType.FLOAT32, WeightType.BFLOAT16, WeightType.INT8]


class Memory:
    """Tensors by name."""

    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, name, shape):
        assert self.tensors[name].shape == shape, name
        return self.tensors[name]

    def has(self, name):
        return name in self.tensors


def parts(inner=D, dtype=np.float32):
    draw = np.random.default_rng(0)
    shapes = {"gate": (SIZE, inner), "up": (SIZE, inner), "down": (inner, SIZE)}
    return {
        f"{name}.{part}.weight": draw.normal(size=shape).astype(dtype)
        for name in NAMES
        for part, shape in shapes.items()
    }


def read_parts(make, config=GATED):
    def every(part):
        return [f"{name}.{part}" for name in NAMES]

    gate = None if config.kind == "plain" else every("gate")
    return make.experts_from_parts(
        config, D, gate=gate, up=every("up"), down=every("down")
    )


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.map(lambda x: x.dtype, one) == jax.tree.map(
        lambda x: x.dtype, other
    )


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("weights", TYPES)
def test_stacked_experts_are_the_layers_read_one_by_one(weights, stored):
    make = Builder(Memory(parts(dtype=stored)), weights)
    experts = read_parts(make)
    assert experts.config is GATED
    assert experts.up.axes == (EXPERT, MLP, EMBED)
    assert experts.down.axes == (EXPERT, EMBED, MLP)
    for e, name in enumerate(NAMES):
        gate, up = (
            make.linear(f"{name}.{part}", SIZE, D, bias=False, axes=(MLP, EMBED))
            for part in ("gate", "up")
        )
        down = make.linear(f"{name}.down", D, SIZE, bias=False, axes=(EMBED, MLP))
        own = experts.up.at(jnp.int32(e))
        assert_equal(own.replace(weight=own.weight[:SIZE]).weight, gate.weight)
        assert_equal(own.weight[SIZE:], up.weight)
        assert_equal(experts.down.at(jnp.int32(e)), down)
        if weights is WeightType.INT8:
            assert_equal(own.scale, jnp.concatenate([gate.scale, up.scale]))


def test_experts_of_float64():
    with jax.enable_x64(True):
        make = Builder(Memory(parts(dtype=np.float64)), WeightType.FLOAT64)
        experts = read_parts(make)
        assert experts.up.weight.dtype == experts.down.weight.dtype == jnp.float64
    np.testing.assert_array_equal(
        experts.down.weight[2], parts(dtype=np.float64)["experts.2.down.weight"]
    )


def test_plain_experts_on_a_latent():
    make = Builder(Memory(parts(inner=3)), WeightType.FLOAT32)
    experts = read_parts(make, PLAIN)
    assert experts.up.axes == (EXPERT, MLP, LATENT)
    assert experts.down.axes == (EXPERT, LATENT, MLP)
    assert experts.up.weight.shape == (E, SIZE, 3)
    assert experts.down.weight.shape == (E, 3, SIZE)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("weights", TYPES)
def test_fused_experts_are_their_parts(weights, transposed, interleaved):
    tensors = parts()
    draw = np.random.default_rng(1)
    up_bias, down_bias = draw.normal(size=(E, 2, SIZE)), draw.normal(size=(E, D))
    pairs = [
        [tensors[f"{name}.gate.weight"], tensors[f"{name}.up.weight"]] for name in NAMES
    ]
    up, offset = np.array(pairs), up_bias  # [E, 2, SIZE, D], [E, 2, SIZE]
    if interleaved:
        up, offset = up.swapaxes(1, 2), offset.swapaxes(1, 2)
    up = up.reshape(E, 2 * SIZE, D)
    down = np.array([tensors[f"{name}.down.weight"] for name in NAMES])
    if transposed:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    fused = {
        "up": up,
        "down": down,
        "up_bias": offset.reshape(E, 2 * SIZE).astype(np.float32),
        "down_bias": down_bias.astype(np.float32),
    }
    got = Builder(Memory(fused), weights).experts_fused(
        GATED,
        D,
        up="up",
        down="down",
        up_bias="up_bias",
        down_bias="down_bias",
        transposed=transposed,
        interleaved=interleaved,
    )
    wanted = read_parts(Builder(Memory(tensors), weights))
    assert_equal(got.up.replace(bias=None), wanted.up)
    assert_equal(got.down.replace(bias=None), wanted.down)
    flat = up_bias.reshape(E, 2 * SIZE).astype(np.float32)
    np.testing.assert_array_equal(got.up.bias, flat)
    np.testing.assert_array_equal(got.down.bias, fused["down_bias"])


def test_experts_are_stacked_without_a_second_copy_of_the_whole():
    count, size, hidden = 32, 64, 128
    config = MoEConfig(num_experts=count, size=size, router=ROUTER, kind="plain")
    one = np.ones((size, hidden), np.float32)
    make = Builder(Memory({}), WeightType.FLOAT32)
    whole = 2 * count * one.nbytes
    tracemalloc.start()
    experts = make.experts(config, hidden, (one for _ in range(count)), [one.T] * count)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert experts.down.weight.shape == (count, hidden, size)
    # the buffers that were filled are what JAX now holds
    assert whole <= kept <= peak < 1.1 * whole


def test_what_is_read_and_put_in_order_becomes_a_layer():
    weight = np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16)
    tensors = {"w.weight": weight, "w.bias": np.arange(4, dtype=np.float32)}
    make = Builder(Memory(tensors), WeightType.INT8)
    assert make.read("w.weight", 4, 6) is weight
    order = np.array([2, 0])
    bias = make.read("w.bias", 4)[order]
    part = make.linear_from(make.read("w.weight", 4, 6)[order], bias, ("a", "b"))
    whole = make.linear("w", 4, 6, bias=True, axes=("a", "b"))
    assert part.axes == ("a", "b") and part.weight.dtype == jnp.int8
    assert_equal(part, jax.tree.map(lambda x: x[order], whole))
    assert make.linear_from(weight, None, ("a", "b")).bias is None


@pytest.mark.parametrize("weights", TYPES)
def test_a_router_keeps_float32(weights):
    draw = np.random.default_rng(2)
    names = {"gate": (E, D), "bias": (E,), "offset": (E,)}
    tensors = {n: draw.normal(size=s).astype(np.float32) for n, s in names.items()}
    config = MoEConfig(
        num_experts=E,
        size=SIZE,
        router=RouterConfig(kind="sigmoid", top_k=2, bias=True, selection_bias=True),
    )
    make = Builder(Memory(tensors), weights)
    router = make.router(config, D, "gate", bias="bias", selection_bias="offset")
    assert router.config is config.router and router.axes == (EXPERT, EMBED)
    for got, name in [
        (router.weight, "gate"),
        (router.bias, "bias"),
        (router.selection_bias, "offset"),
    ]:
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, tensors[name])
    with pytest.raises(ValueError, match=r"gate: .*\(True, True\).*None"):
        make.router(config, D, "gate", bias="bias")
    bare = make.router(GATED, D, "gate")
    assert bare.bias is None and bare.selection_bias is None
    with pytest.raises(ValueError, match=r"gate: .*\(False, False\).*'offset'"):
        make.router(GATED, D, "gate", selection_bias="offset")


def test_a_wrong_shape_is_an_error_that_names_the_tensor(tmp_path):
    tensors = parts()
    tensors["experts.2.down.weight"] = np.zeros((D, SIZE + 1), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    make = Builder(SafetensorsReader(tmp_path), WeightType.FLOAT32)
    with pytest.raises(CheckpointError, match=r"experts\.2\.down\.weight.*\[6, 6\]"):
        read_parts(make)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate\.weight.*\[5, 6\]"):
        make.experts_fused(
            GATED, D, up="experts.0.gate.weight", down="experts.0.down.weight"
        )


def test_experts_that_are_too_few_or_of_another_shape_are_refused():
    make = Builder(Memory(parts()), WeightType.FLOAT32)
    names = [f"{name}.up" for name in NAMES]
    with pytest.raises(ValueError, match=r"4 experts.* 3 names of down"):
        make.experts_from_parts(GATED, D, gate=names, up=names, down=names[:3])
    with pytest.raises(ValueError, match="plain experts have no gate"):
        make.experts_from_parts(PLAIN, D, gate=names, up=names, down=names)
    with pytest.raises(ValueError, match="gated experts have a gate"):
        make.experts_from_parts(GATED, D, gate=None, up=names, down=names)
    wide, narrow = np.zeros((2 * SIZE, D)), np.zeros((D, SIZE))
    with pytest.raises(ValueError, match=r"expert 3: .*\(5, 6\).*\(10, 6\)"):
        make.experts(GATED, D, [wide] * 3 + [wide[:SIZE]], [narrow] * E)
