"""The mixture of experts against loops over rows and experts, in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.types import Window
from specjax.models.config import (
    BlockConfig,
    DecoderConfig,
    GatedMLPConfig,
    MoEConfig,
    PlainMLPConfig,
    RouterConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.feedforward import dispatch
from specjax.models.feedforward.experts import Experts, activation
from specjax.models.feedforward.gated_mlp import GatedMLP
from specjax.models.feedforward.moe import MoE
from specjax.models.feedforward.plain_mlp import PlainMLP
from specjax.models.feedforward.router import Router, Routes
from specjax.models.linear import Linear, StackedLinear, quantize_linear
from specjax.models.norms import RMSNorm
from specjax.models.stack import Block, Sublayer
from specjax.testing.conformance.hlo import rewrites

D, SIZE, E, K = 12, 6, 8, 3
WAYS = {
    "tiles": dispatch.by_tiles,
    "gather": dispatch.by_gather,
    "groups": dispatch.by_groups,
}
SOFT = RouterConfig(kind="softmax", top_k=K)
ROUTERS = {
    "softmax": SOFT,
    "softmax, normed": dataclasses.replace(SOFT, normalize=True),
    "chosen, biased": RouterConfig(kind="chosen", top_k=K, bias=True),
    "sigmoid, all": RouterConfig(
        kind="sigmoid",
        top_k=K,
        selection_bias=True,
        groups=4,
        kept_groups=2,
        normalize=True,
        epsilon=1e-20,
        scale=2.5,
    ),
    "sigmoid, epsilon": RouterConfig(
        kind="sigmoid", top_k=K, selection_bias=True, normalize=True, epsilon=0.3
    ),
    "sigmoid, not normed": RouterConfig(
        kind="sigmoid", top_k=2, groups=2, kept_groups=1, scale=0.7
    ),
}
KINDS = {
    "gated": MoEConfig(num_experts=E, size=SIZE, router=SOFT),
    "plain": MoEConfig(num_experts=E, size=SIZE, router=SOFT, kind="plain"),
    "clamped": MoEConfig(
        num_experts=E, size=SIZE, router=SOFT, kind="clamped", limit=0.8
    ),
}

# (several at once: one compilation)
route = jax.jit(lambda routers, x: [router(x) for router in routers])
run = jax.jit(lambda layer, *arguments: layer(*arguments))


@functools.partial(jax.jit, static_argnames=("way", "config"))
def dispatched(way, config, up, down, x, experts, valid):
    between = functools.partial(activation, config)
    return WAYS[way](between, up, down, x, experts, valid)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def naive_routes(config, logits, selection_bias):
    """One row's experts and weights, by the rules in words."""
    count = len(logits)
    if config.kind == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    else:
        scores = logits if config.kind == "chosen" else sigmoid(logits)
    ranked = scores + selection_bias
    per_group = count // config.groups
    if config.groups > 1:
        worth = [
            sum(sorted(ranked[g * per_group : (g + 1) * per_group])[-2:])
            for g in range(config.groups)
        ]
        kept = sorted(range(config.groups), key=lambda g: -worth[g])
        kept = kept[: config.kept_groups]
    else:
        kept = [0]
    open_to = [e for e in range(count) if e // per_group in kept]
    chosen = sorted(open_to, key=lambda e: -ranked[e])[: config.top_k]
    weights = scores[chosen]
    if config.kind == "chosen":
        weights = np.exp(weights) / np.exp(weights).sum()
    if config.normalize:
        weights = weights / (weights.sum() + config.epsilon)
    return chosen, weights * config.scale


def naive_expert(config, up, down, up_bias, down_bias, row):
    hidden = up @ row + up_bias
    if config.kind == "plain":
        return down @ np.maximum(hidden, 0) ** 2 + down_bias
    gate, value = hidden[: config.size], hidden[config.size :]
    if config.kind == "gated":
        return down @ (gate * sigmoid(gate) * value) + down_bias
    gate = np.minimum(gate, config.limit)
    value = np.clip(value, -config.limit, config.limit)
    return down @ ((value + 1) * gate * sigmoid(1.702 * gate)) + down_bias


def weights_of(config, draw, *, biases):
    """Numpy weights of all experts: up, down and their biases."""
    inner = config.latent_dim or D
    up = draw.normal(size=(E, config.wide, inner)) / math.sqrt(inner) * 2
    down = draw.normal(size=(E, inner, config.size)) / math.sqrt(config.size)
    scale = 1.0 if biases else 0.0
    return (
        up,
        down,
        scale * draw.normal(size=(E, config.wide)),
        scale * draw.normal(size=(E, inner)),
    )


def stacks(weights, dtype=jnp.float64, *, biases=True):
    up, down, up_bias, down_bias = (jnp.asarray(w) for w in weights)
    return tuple(
        StackedLinear(weight=weight.astype(dtype), bias=bias if biases else None)
        for weight, bias in [(up, up_bias), (down, down_bias)]
    )


def choices(draw, rows, *, skewed=False):
    """``[rows, K]`` different experts a row; ``skewed``: one of them in every row."""
    picked = np.stack([draw.permutation(E)[:K] for _ in range(rows)])
    if skewed:
        picked = np.stack([np.r_[5, draw.permutation(5)[: K - 1]] for _ in range(rows)])
    return picked.astype(np.int32)


def router_of(config, draw, dtype):
    """Random, with biases of both signs: a masked group must lose against them."""
    weight, bias, offset = (
        jnp.asarray(draw.normal(size=shape), dtype) for shape in [(E, D), (E,), (E,)]
    )
    return Router(
        config=config,
        weight=weight,
        bias=bias if config.bias else None,
        selection_bias=offset - 1.0 if config.selection_bias else None,
    )


def test_routes_are_those_of_the_rule_in_words():
    x = np.random.default_rng(1).normal(size=(40, D))
    with jax.enable_x64(True):
        routers = [
            router_of(config, np.random.default_rng(2), jnp.float64)
            for config in ROUTERS.values()
        ]
        routes = route(routers, jnp.asarray(x))
    for router, (experts, weights) in zip(routers, routes, strict=True):
        assert weights.dtype == jnp.float64 and experts.dtype == jnp.int32
        config = router.config
        logits = x @ np.asarray(router.weight).T
        if config.bias:
            logits = logits + np.asarray(router.bias)
        offset = np.asarray(router.selection_bias) if config.selection_bias else 0.0
        for row in range(len(x)):
            chosen, wanted = naive_routes(config, logits[row], offset)
            assert experts[row].tolist() == chosen, config
            np.testing.assert_allclose(weights[row], wanted, rtol=1e-12)


def test_every_setting_of_a_router_is_of_consequence():
    config = ROUTERS["sigmoid, all"]
    changes = [
        {"selection_bias": False},
        {"groups": 1, "kept_groups": 1},
        {"kept_groups": 3},
        {"normalize": False},
        {"epsilon": 0.1},
        {"scale": 1.0},
        {"kind": "softmax"},
        {"kind": "chosen"},
    ]
    routers = [
        router_of(
            dataclasses.replace(config, **change), np.random.default_rng(2), jnp.float32
        )
        for change in [{}, *changes]
    ]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(40, D)), jnp.float32)
    one, *others = route(routers, x)
    for change, other in zip(changes, others, strict=True):
        same = (one.experts == other.experts).all()
        assert not same or not np.allclose(one.weights, other.weights, rtol=1e-3), (
            change
        )


def test_of_equal_scores_the_lower_index_wins():
    config = dataclasses.replace(ROUTERS["sigmoid, all"], selection_bias=False)
    weight = jnp.zeros((E, D), jnp.float32)
    router = Router(config=config, weight=weight)
    [(experts, weights)] = route([router], jnp.ones((2, D)))
    assert experts.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 2.5 / 3, rtol=1e-6)


def test_a_nan_row_is_routed_somewhere_and_no_other_row_differs():
    draw = np.random.default_rng(4)
    routers = [router_of(config, draw, jnp.float32) for config in ROUTERS.values()]
    x = draw.normal(size=(5, D)).astype(np.float32)
    sound = route(routers, jnp.asarray(x))
    x[2, 3] = np.nan
    others = np.array([0, 1, 3, 4])
    for clean, (experts, weights) in zip(
        sound, route(routers, jnp.asarray(x)), strict=True
    ):
        assert ((np.asarray(experts) >= 0) & (np.asarray(experts) < E)).all()
        assert np.isnan(weights[2]).all()
        np.testing.assert_array_equal(experts[others], clean.experts[others])
        np.testing.assert_array_equal(weights[others], clean.weights[others])


@pytest.mark.parametrize(
    ("way", "kind", "biases"),
    [
        ("tiles", "gated", False),
        ("tiles", "plain", True),
        ("tiles", "clamped", True),
        ("gather", "clamped", True),
        ("groups", "clamped", True),
    ],
)
def test_experts_of_every_kind_are_those_of_the_loop(way, kind, biases):
    config, draw = KINDS[kind], np.random.default_rng(5)
    weights = weights_of(config, draw, biases=biases)
    x, experts = draw.normal(size=(7, D)), choices(draw, 7)
    valid = np.array([True, True, False, True, True, True, False])
    with jax.enable_x64(True):
        up, down = stacks(weights, biases=biases)
        arguments = (jnp.asarray(a) for a in (x, experts, valid))
        y = dispatched(way, config, up, down, *arguments)
        assert y.dtype == jnp.float64
    for row in range(7):
        for place, expert in enumerate(experts[row]):
            own = (w[expert] for w in weights)
            wanted = naive_expert(config, *own, x[row]) if valid[row] else 0.0
            np.testing.assert_allclose(y[row, place], wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize(
    ("way", "rows"),
    [("tiles", 1), ("tiles", 30), ("tiles", 150), ("gather", 30), ("groups", 30)],
)
def test_experts_of_any_number_of_rows_are_those_of_the_loop(way, rows, skewed):
    """One to many tiles an expert, tiles of 4 to 64 rows, and experts without a row."""
    config, draw = KINDS["plain"], np.random.default_rng(6)
    weights = weights_of(config, draw, biases=False)
    x, experts = draw.normal(size=(rows, D)), choices(draw, rows, skewed=skewed)
    with jax.enable_x64(True):
        up, down = stacks(weights, biases=False)
        arguments = (jnp.asarray(x), jnp.asarray(experts), jnp.ones((rows,), bool))
        y = dispatched(way, config, up, down, *arguments)
    hidden = np.maximum(np.einsum("rd,rksd->rks", x, weights[0][experts]), 0) ** 2
    wanted = np.einsum("rks,rkds->rkd", hidden, weights[1][experts])
    np.testing.assert_allclose(y, wanted, rtol=1e-11, atol=1e-12)


def test_tiles_grow_with_the_share_of_an_expert():
    sizes = [dispatch.tile_rows(slots, 64) for slots in (1, 8, 128, 512, 2048, 9999)]
    assert sizes == [4, 4, 4, 16, 64, 64]
    assert dispatch.tile_rows(24, 4) == 16  # of 12, the next power of two


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_all_ways_agree_within_rounding_for_every_weight_type(dtype):
    config, draw = KINDS["gated"], np.random.default_rng(7)
    weights = weights_of(config, draw, biases=True)
    x, experts = draw.normal(size=(9, D)), choices(draw, 9)
    up, down = typed_stacks(weights, dtype)
    assert up.weight.dtype == jnp.dtype(dtype)
    arguments = (jnp.asarray(x, jnp.float32), jnp.asarray(experts), jnp.ones(9, bool))
    between = functools.partial(activation, config)
    ways = jax.jit(
        lambda *arguments: [way(between, *arguments) for way in WAYS.values()]
    )
    got = dict(zip(WAYS, ways(up, down, *arguments), strict=True))
    assert all(y.dtype == jnp.float32 for y in got.values())
    # a hidden number at a rounding edge may go either way
    edge = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 1 / 127}[dtype]
    for way in ("gather", "groups"):
        np.testing.assert_allclose(
            got["tiles"], got[way], rtol=1e-5 + edge, atol=1e-5 + edge
        )
    exact = np.array(
        [
            [
                naive_expert(config, *(w[e] for w in weights), x[row])
                for e in experts[row]
            ]
            for row in range(9)
        ]
    )
    off = np.abs(got["tiles"] - exact).max() / np.abs(exact).max()
    assert off < {"float32": 1e-5, "bfloat16": 2e-2, "int8": 3e-2}[dtype]
    assert dtype == "float32" or off > 1e-4


def typed_stacks(weights, dtype):
    if dtype != "int8":
        return stacks([w.astype(np.float32) for w in weights], jnp.dtype(dtype))
    made = []
    for weight, bias in zip(weights[:2], weights[2:], strict=True):
        layers = [
            quantize_linear(Linear(weight=jnp.asarray(w, jnp.float32))) for w in weight
        ]
        made.append(
            StackedLinear(
                weight=jnp.stack([layer.weight for layer in layers]),
                scale=jnp.stack([layer.scale for layer in layers]),
                bias=jnp.asarray(bias, jnp.float32),
            )
        )
    return tuple(made)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(3, "bfloat16"), (21, "bfloat16"), (21, "float32"), (21, "int8")],
)
def test_a_rows_bits_are_its_own(rows, dtype):
    """C4, C6: whatever the others are, NaN or padding, and wherever it stands."""
    wide = MoEConfig(num_experts=E, size=80, router=SOFT)
    draw = np.random.default_rng(8)
    dim = 160  # past the smallest blocks of the products
    weights = (
        draw.normal(size=(E, 160, dim)) / 12,
        draw.normal(size=(E, dim, 80)) / 9,
        draw.normal(size=(E, 160)),
        draw.normal(size=(E, dim)),
    )
    up, down = typed_stacks(weights, dtype)
    moe = MoE(
        config=wide,
        router=Router(config=SOFT, weight=jnp.asarray(draw.normal(size=(E, dim)) / 12)),
        experts=Experts(config=wide, up=up, down=down),
    )
    moe = jax.tree.map(
        lambda w: w.astype(jnp.float32) if w.dtype == jnp.float64 else w, moe
    )
    row = draw.normal(size=dim).astype(np.float32)
    seen = []
    for trial in range(6):
        x = draw.normal(size=(1, rows, dim)).astype(np.float32)
        place = trial % rows
        valid = draw.random(size=(1, rows)) < 0.7
        if trial % 2:
            x[0, (place + 1) % rows] = np.nan
            x[0, (place + 2) % rows, 3] = np.inf
        if trial == 5:
            x[0] = row  # all of one mind: the others fill the row's own tiles
        x[0, place], valid[0, place] = row, True
        y = np.asarray(run(moe, jnp.asarray(x), jnp.asarray(valid)))
        assert np.isfinite(y[0, place]).all()
        if trial % 2 and trial != 5:
            bad = (place + 1) % rows
            assert np.isnan(y[0, bad]).all() == valid[0, bad]
        assert not y[0][~valid[0]].any()
        seen.append(y[0, place])
    for other in seen[1:]:
        np.testing.assert_array_equal(other, seen[0])


def test_each_wanted_expert_is_read_once_a_tile_and_no_other_is():
    config, draw = KINDS["plain"], np.random.default_rng(9)
    up, down = stacks(
        [w.astype(np.float32) for w in weights_of(config, draw, biases=True)],
        jnp.float32,
    )
    calls = []

    @jax.jit
    def count(x, experts, valid):
        def between(hidden):
            jax.debug.callback(lambda: calls.append(1))
            return activation(config, hidden)

        return dispatch.by_tiles(between, up, down, x, experts, valid)

    experts = np.array([[0, 1, 2]] * 9 + [[0, 6, 7]] * 2, np.int32)
    valid = np.array([True] * 9 + [False] * 2)
    count(
        jnp.ones((11, D)), jnp.asarray(experts), jnp.asarray(valid)
    ).block_until_ready()
    jax.effects_barrier()
    tile = dispatch.tile_rows(33, E)
    assert tile == 8 and len(calls) == 3 * 2
    count(jnp.ones((11, D)), jnp.asarray(experts), jnp.zeros(11, bool))
    jax.effects_barrier()
    assert len(calls) == 3 * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_loop_of_rounds_copies_no_experts(dtype):
    """C8: neither in the loop over tiles nor in one around it."""
    config, draw = KINDS["gated"], np.random.default_rng(10)
    up, down = typed_stacks(weights_of(config, draw, biases=True), dtype)
    experts = Experts(config=config, up=up, down=down)

    def rounds(experts, x, chosen, weights):
        def body(carry):
            i, x = carry
            return i + 1, experts(x, Routes(chosen, weights))

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (jnp.int32(0), x))

    arguments = (
        experts,
        jnp.ones((2, D), jnp.float32),
        jnp.zeros((2, K), jnp.int32),
        jnp.ones((2, K), jnp.float32),
    )
    text = jax.jit(rounds).lower(*arguments).compile().as_text()
    shapes = [up.weight.shape, down.weight.shape]
    assert rewrites(text, shapes) == []
    whole = {f"[{','.join(map(str, shape))}]" for shape in shapes}
    entry = text[text.index("\nENTRY") :]
    made = [
        line
        for line in entry.splitlines()[2:]
        if any(f"{w}{{" in line.split("(")[0] for w in whole)
        and " parameter(" not in line
        and " get-tuple-element(" not in line
    ]
    assert made == []


SHARED = {
    "none": None,
    "gated": GatedMLPConfig(size=5),
    "plain": PlainMLPConfig(size=5),
}


@pytest.mark.parametrize(
    ("shared", "gate", "latent"),
    [
        ("none", False, None),
        ("gated", True, None),
        ("plain", False, 4),
    ],
)
def test_the_whole_mixture_is_that_of_the_loop(shared, gate, latent):
    config = MoEConfig(
        num_experts=E,
        size=SIZE,
        router=ROUTERS["sigmoid, all"],
        kind="plain",
        latent_dim=latent,
        shared=SHARED[shared],
        shared_gate=gate,
    )
    draw = np.random.default_rng(11)
    weights = weights_of(config, draw, biases=False)
    names = {"router": (E, D), "shared_gate": (1, D), "bias": (E,)}
    names |= {"latent_in": (4, D), "latent_out": (D, 4)}
    names |= {"gate": (5, D), "up": (5, D), "down": (D, 5)}
    tensors = {name: draw.normal(size=shape) for name, shape in names.items()}
    x = draw.normal(size=(2, 3, D))
    valid = np.array([[True, True, False], [True, False, True]])
    with jax.enable_x64(True):
        moe = mixture(config, weights, tensors)
        got = np.asarray(run(moe, jnp.asarray(x), jnp.asarray(valid)))
        everywhere = np.asarray(run(moe, jnp.asarray(x), jnp.ones((2, 3), bool)))
    rows = x.reshape(-1, D)
    wanted = np.array([naive_mixture(config, weights, tensors, row) for row in rows])
    np.testing.assert_allclose(everywhere.reshape(-1, D), wanted, rtol=1e-10)
    np.testing.assert_array_equal(got[valid], everywhere[valid])
    alone = [naive_shared(config, tensors, row) for row in x[~valid]]
    np.testing.assert_allclose(got[~valid], alone, rtol=1e-10)


def mixture(config, weights, tensors):
    def linear(name):
        return Linear(weight=jnp.asarray(tensors[name]))

    up, down = stacks(weights, biases=False)
    shared = None
    if isinstance(config.shared, GatedMLPConfig):
        layers = {name: linear(name) for name in ("gate", "up", "down")}
        shared = GatedMLP(config=config.shared, **layers)
    elif config.shared is not None:
        shared = PlainMLP(config=config.shared, up=linear("up"), down=linear("down"))
    inner = config.latent_dim is not None
    return MoE(
        config=config,
        router=Router(
            config=config.router,
            weight=jnp.asarray(tensors["router"]),
            selection_bias=jnp.asarray(tensors["bias"]),
        ),
        experts=Experts(config=config, up=up, down=down),
        shared=shared,
        shared_gate=linear("shared_gate") if config.shared_gate else None,
        latent_in=linear("latent_in") if inner else None,
        latent_out=linear("latent_out") if inner else None,
    )


def naive_mixture(config, weights, tensors, row):
    chosen, shares = naive_routes(
        config.router, tensors["router"] @ row, tensors["bias"]
    )
    inner = row if config.latent_dim is None else tensors["latent_in"] @ row
    y = np.zeros(len(inner))
    for expert, share in zip(chosen, shares, strict=True):
        y += share * naive_expert(config, *(w[expert] for w in weights), inner)
    if config.latent_dim is not None:
        y = tensors["latent_out"] @ y
    return y + naive_shared(config, tensors, row)


def naive_shared(config, tensors, row):
    if config.shared is None:
        return np.zeros(len(row))
    hidden = tensors["up"] @ row
    if isinstance(config.shared, GatedMLPConfig):
        gate = tensors["gate"] @ row
        hidden = hidden * gate * sigmoid(gate)
    else:
        hidden = np.maximum(hidden, 0) ** 2
    y = tensors["down"] @ hidden
    return y * sigmoid(tensors["shared_gate"] @ row) if config.shared_gate else y


def test_a_decoder_routes_no_padding():
    """Rows beyond a draft, and those that make a window wide enough for bfloat16."""
    config, draw = KINDS["gated"], np.random.default_rng(12)
    up, down = typed_stacks(weights_of(config, draw, biases=True), "bfloat16")
    moe = MoE(
        config=config,
        router=Router(config=SOFT, weight=jnp.asarray(draw.normal(size=(E, D)))),
        experts=Experts(config=config, up=up, down=down),
    )
    ones = jnp.ones((D,), jnp.float32)
    embedding = jnp.asarray(draw.normal(size=(5, D)), jnp.bfloat16)
    decoder = Decoder(
        config=DecoderConfig(
            family="moe",
            vocab_size=5,
            hidden_size=D,
            blocks=(BlockConfig(mixer=None, feedforward=config),),
            norm_eps=1e-6,
            tied=True,
            max_positions=9,
        ),
        embedding=embedding,
        blocks=(Block(None, Sublayer(norm=RMSNorm(ones, eps=1e-6), body=moe)),),
        norm=RMSNorm(ones, eps=1e-6),
        head=Linear(weight=embedding),
    )
    window = Window(
        tokens=jnp.asarray([[1, 2]], jnp.int32),
        positions=jnp.asarray([[0, 1]], jnp.int32),
        ancestors=jnp.tril(jnp.ones((1, 2, 2), bool)),
        valid=jnp.asarray([[True, False]]),
    )
    verify = jax.jit(functools.partial(Decoder.verify, taps=(0, 1)))
    taps = verify(decoder, decoder.init(1, 4), window).features
    added = np.asarray(taps[1] - taps[0])
    assert added[0, 0].all() and not added[0, 1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 2}, "top_k = 3 of 2 experts"),
        ({"kind": "clamped"}, "a limit belongs to clamped experts"),
        ({"limit": 7.0}, "a limit belongs to clamped experts"),
        ({"shared_gate": True}, "shared_gate without a shared expert"),
        ({"router": {"groups": 3}}, "8 experts do not form 3 groups"),
        ({"router": {"groups": 8}}, "8 experts do not form 8 groups of two"),
        ({"router": {"groups": 4, "kept_groups": 5}}, "5 kept of 4 groups"),
        ({"router": {"groups": 4, "kept_groups": 0}}, "0 kept of 4 groups"),
        ({"router": {"groups": 4}}, "top_k = 3 of 2 experts"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(change, message):
    if "router" in change:
        change = {"router": dataclasses.replace(SOFT, **change["router"])}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(KINDS["gated"], **change)
