"""The reference's models against published implementations."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.testing.reference import (
    Settings,
    continue_greedy,
    continue_sampled,
    logits,
    model,
    rescore,
)

ORACLES = Path(__file__).resolve().parent.parent / "data" / "oracles"


def oracle(name: str):
    folder = ORACLES / name
    config = json.loads((folder / "config.json").read_text("utf-8"))
    with np.load(folder / "oracle.npz") as arrays:
        return load_file(folder / "model.safetensors"), config, dict(arrays)


@pytest.fixture(scope="module")
def llama():
    return oracle("llama")


def toy_hybrid():
    """Random weights, every one off its default; heads and sizes all different."""
    draw = np.random.default_rng(3)
    config = {
        "model_type": "toy_hybrid",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "hidden_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 4,
    }
    shapes = {"model.embed_tokens.weight": (40, 20), "lm_head.weight": (40, 20)}
    linear = {
        "in_proj_qkv.weight": (2 * 10 + 18, 20),
        "in_proj_z.weight": (18, 20),
        "in_proj_b.weight": (6, 20),
        "in_proj_a.weight": (6, 20),
        "conv1d.weight": (38, 1, 4),
        "A_log": (6,),
        "dt_bias": (6,),
        "norm.weight": (3,),
        "out_proj.weight": (20, 18),
    }
    full = {"q_proj": (24, 20), "k_proj": (12, 20), "v_proj": (12, 20)}
    mlp = {"gate_proj": (30, 20), "up_proj": (30, 20), "down_proj": (20, 30)}
    for i, kind in enumerate(config["layer_types"]):
        name = f"model.layers.{i}."
        shapes |= {f"{name}mlp.{key}.weight": shape for key, shape in mlp.items()}
        if kind == "linear_attention":
            shapes |= {f"{name}linear_attn.{k}": shape for k, shape in linear.items()}
        else:
            shapes |= {f"{name}self_attn.{k}.weight": s for k, s in full.items()}
            shapes[f"{name}self_attn.o_proj.weight"] = (20, 24)
        shapes[f"{name}input_layernorm.weight"] = (20,)
        shapes[f"{name}post_attention_layernorm.weight"] = (20,)
    shapes["model.norm.weight"] = (20,)
    tensors = {
        name: draw.normal(float(name.endswith("norm.weight")), 0.4, shape)
        for name, shape in shapes.items()
    }
    return tensors, config


def test_llama_logits_are_those_of_transformers(llama):
    tensors, config, expected = llama
    for ids, rows in zip(expected["input_ids"], expected["logits"], strict=True):
        ours = logits(tensors, config, ids)
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, rows, rtol=0, atol=5e-4)
    ids = expected["long_input_ids"][0]
    rows = logits(tensors, config, ids, last=8)
    np.testing.assert_allclose(rows, expected["long_logits_last8"][0], atol=5e-4)


def test_greedy_tokens_are_those_of_transformers(llama):
    tensors, config, expected = llama
    for prompt, ids in zip(expected["input_ids"], expected["greedy_ids"], strict=True):
        assert continue_greedy(tensors, config, prompt, len(ids)) == ids.tolist()
        verdict = rescore(tensors, config, prompt, ids)
        assert verdict.ok.all() and verdict.first_difference is None
        assert verdict.agrees(0.0) and verdict.margin.min() > 0.02


def test_gated_delta_layers_are_those_of_transformers():
    """Qwen3.5's first layers, whose maths is ours but for norms centred on zero."""
    tensors, config, expected = oracle("qwen3_5")
    ours = {}
    for name, tensor in tensors.items():
        tensor = np.asarray(tensor).astype(np.float64)
        if name.endswith("layernorm.weight"):
            tensor = 1 + tensor
        ours[name.replace("model.language_model.", "model.")] = tensor
    text = config["text_config"] | {"model_type": "toy_hybrid"}
    for layers in (1, 2, 3):
        kinds = text["layer_types"][:layers]
        assert set(kinds) == {"linear_attention"}
        part = text | {"num_hidden_layers": layers, "layer_types": kinds}
        residual = model.residual(ours, part, expected["input_ids"][0])
        np.testing.assert_allclose(
            residual, expected["hidden_states"][layers], rtol=0, atol=1e-4
        )


def test_delta_rule_is_its_closed_form():
    """All tokens at once: a triangular system in place of the recurrence."""
    draw = np.random.default_rng(0)
    S, nv, dk, dv = 9, 2, 4, 3
    q, k = draw.normal(size=(2, S, nv, dk))
    v = draw.normal(size=(S, nv, dv))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta, log_decay = draw.uniform(size=(S, nv)), -draw.exponential(size=(S, nv))
    total = np.cumsum(log_decay, axis=0)
    expected = np.empty_like(v)
    for head in range(nv):
        decay = np.exp(total[:, None, head] - total[None, :, head])  # from j to i
        within = np.tril(decay * (k[:, head] @ k[:, head].T), -1)
        system = np.eye(S) + beta[:, head, None] * within
        u = np.linalg.solve(system, beta[:, head, None] * v[:, head])
        expected[:, head] = np.tril(decay * (q[:, head] @ k[:, head].T)) @ u
    np.testing.assert_allclose(
        model.delta_rule(q, k, v, beta, log_decay), expected, atol=1e-12
    )


def test_a_prefix_has_the_same_logits():
    tensors, config = toy_hybrid()
    ids = np.random.default_rng(1).integers(0, 40, 17)
    whole = logits(tensors, config, ids)
    assert whole.shape == (17, 40) and whole.std() > 0.1
    for n in (1, 2, 5, 16):
        rows = logits(tensors, config, ids[:n])
        np.testing.assert_allclose(rows, whole[:n], rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            logits(tensors, config, ids[:n], last=1), rows[-1:], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_llama3_frequencies(spelling):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {"rope_theta": 500_000.0, "rope_scaling": scaling}
    if spelling == "new":
        config = {"rope_parameters": {"rope_theta": 500_000.0, **scaling}}
    seen = set()
    for i, ours in enumerate(model.rotary_frequencies(config, 128)):
        plain = 500_000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            band, expected = "kept", plain
        elif wavelength > 8192 / 1:
            band, expected = "stretched", plain / 8
        else:
            s = (8192 / wavelength - 1) / (4 - 1)
            band, expected = "between", (1 - s) * plain / 8 + s * plain
        seen.add(band)
        assert ours == pytest.approx(expected, rel=1e-12)
    assert len(seen) == 3


def test_biases_are_added_where_the_settings_say_so(llama):
    tensors, config, expected = llama
    ids = expected["input_ids"][0]
    draw = np.random.default_rng(0)
    biases = {
        name.replace(".weight", ".bias"): draw.normal(size=len(tensor))
        for name, tensor in tensors.items()
        if "_proj" in name
    }
    plain = logits(tensors, config, ids)
    with_tensors = tensors | biases
    np.testing.assert_array_equal(logits(with_tensors, config, ids), plain)
    for flag in ("attention_bias", "mlp_bias"):
        asked = config | {flag: True}
        assert np.abs(logits(with_tensors, asked, ids) - plain).max() > 0.1
        with pytest.raises(KeyError, match="bias"):
            logits(tensors, asked, ids)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": "other"},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"model_type": "toy_hybrid", "layer_types": ["full_attention"]},
    ],
)
def test_what_is_not_implemented_is_refused(llama, wrong):
    tensors, config, _ = llama
    with pytest.raises(ValueError):
        logits(tensors, config | wrong, [1])


@pytest.mark.parametrize("ids", [[], [-1], [256], np.array([[1]])])
def test_what_are_no_token_ids_is_refused(llama, ids):
    tensors, config, _ = llama
    with pytest.raises(ValueError, match="token ids"):
        logits(tensors, config, ids)


def test_scoring_a_hybrid():
    """Token by token, and in one pass: no difference, greedy or sampled."""
    tensors, config = toy_hybrid()
    prompt = [3, 1, 4, 1, 5]
    greedy = continue_greedy(tensors, config, prompt, 12)
    assert rescore(tensors, config, prompt, greedy).ok.all()
    settings = Settings(temperature=1.0, top_p=0.9)
    sampled = continue_sampled(tensors, config, prompt, 12, settings, seed=8)
    assert sampled != greedy
    assert rescore(tensors, config, prompt, sampled, settings, seed=8).ok.all()
    assert not rescore(tensors, config, prompt, sampled, settings, seed=9).agrees(0.01)


def test_the_reference_stands_alone():
    """A fresh interpreter: neither jax nor any other part of the project comes along.

    If ``specjax.testing`` begins to import its other modules, so would this.
    """
    code = (
        "import sys, specjax.testing.reference\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'jaxtyping', 'torch'} & set(sys.modules)\n"
        "own = [m for m in sys.modules if m.startswith(('specjax', 'pallas'))]\n"
        "own = [m for m in own if not m.startswith('specjax.testing.reference')]\n"
        "print(sorted(heavy), sorted(own))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[0] == "[] ['specjax', 'specjax.testing']"
