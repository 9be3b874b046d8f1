"""Two decoders, whole sequences at a time, from Hugging Face names and settings.

``llama`` is the published Llama layout (Llama, SmolLM2). ``toy_hybrid`` is the same
with ``layer_types``: its ``linear_attention`` layers are gated delta nets with the
names and the maths of Qwen3.5, written as the serial recurrence.

Letters: ``S`` tokens, ``D`` hidden size, ``V`` vocabulary, ``h`` query heads, ``kv``
key heads, ``d`` their size; in a gated delta net ``nk`` key heads, ``nv`` value heads,
``dk`` and ``dv`` their sizes, ``C`` convolved channels, ``K`` taps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Tensors = Mapping[str, np.ndarray]
Config = Mapping[str, Any]
Ids = Sequence[int] | np.ndarray

HEAD_ROWS = 4096  # rows of the head in float64 at a time


def logits(
    tensors: Tensors, config: Config, ids: Ids, *, last: int | None = None
) -> np.ndarray:
    """Logits after each of ``ids``, or after the ``last`` of them: ``[S, V]``."""
    x = residual(tensors, config, ids)
    if last is not None:
        x = x[len(x) - last :]
    x = rms_norm(x, tensors["model.norm.weight"], config)
    tied = config.get("tie_word_embeddings", False)
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    parts = [head[i : i + HEAD_ROWS] for i in range(0, len(head), HEAD_ROWS)]
    return np.concatenate([x @ float64(part).T for part in parts], axis=1)


def residual(tensors: Tensors, config: Config, ids: Ids) -> np.ndarray:
    """The residual stream after the last block, before the last norm: ``[S, D]``."""
    embedding = tensors["model.embed_tokens.weight"]
    ids = np.asarray(ids, dtype=np.int64)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"one sequence of token ids is needed, not shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= len(embedding):
        raise ValueError(f"token ids must be in [0, {len(embedding)})")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not implemented")
    x = float64(embedding[ids])
    for i, kind in enumerate(layer_kinds(config)):
        name = f"model.layers.{i}"
        mixer = attention if kind == "full_attention" else gated_delta_net
        branch = "self_attn" if kind == "full_attention" else "linear_attn"
        y = rms_norm(x, tensors[f"{name}.input_layernorm.weight"], config)
        x = x + mixer(tensors, f"{name}.{branch}", config, y)
        y = rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], config)
        x = x + gated_mlp(tensors, f"{name}.mlp", config, y)
    return x


def layer_kinds(config: Config) -> list[str]:
    """``full_attention`` or ``linear_attention`` for each layer."""
    layers = config["num_hidden_layers"]
    if config["model_type"] == "llama":
        return ["full_attention"] * layers
    if config["model_type"] != "toy_hybrid":
        raise ValueError(f"model_type {config['model_type']!r} is not implemented")
    kinds = list(config["layer_types"])
    if len(kinds) != layers or set(kinds) - {"full_attention", "linear_attention"}:
        raise ValueError(f"layer_types {kinds} do not fit {layers} layers")
    return kinds


def attention(tensors: Tensors, name: str, config: Config, x: np.ndarray) -> np.ndarray:
    """Causal attention with rotary positions; groups of query heads share a key head.

    ``[S, D] -> [S, D]``
    """
    h = config["num_attention_heads"]
    kv = config.get("num_key_value_heads") or h
    d = config.get("head_dim") or config["hidden_size"] // h
    bias = config.get("attention_bias", False)
    q = linear(tensors, f"{name}.q_proj", x, bias).reshape(-1, h, d)
    k = linear(tensors, f"{name}.k_proj", x, bias).reshape(-1, kv, d)
    v = linear(tensors, f"{name}.v_proj", x, bias).reshape(-1, kv, d)
    frequencies = rotary_frequencies(config, d)
    q, k = rotate(q, frequencies), rotate(k, frequencies)
    k, v = stored(k, config), stored(v, config)

    position = np.arange(len(x))
    future = position[None, :] > position[:, None]  # [query, key]
    out = np.empty_like(q)
    for head in range(h):
        group = head // (h // kv)
        scores = q[:, head] @ k[:, group].T / math.sqrt(d)
        scores[future] = -np.inf
        out[:, head] = softmax(scores) @ v[:, group]
    return linear(tensors, f"{name}.o_proj", out.reshape(-1, h * d), bias)


def stored(rows: np.ndarray, config: Config) -> np.ndarray:
    """Keys or values as a cache of ``config["cache_dtype"]`` gives them back.

    ``int8`` and ``fp8`` (E4M3): codes times a power of two for each token and head,
    which brings the largest number to 64 and above, and to 128 and above.
    """
    kind = config.get("cache_dtype")
    if kind is None:
        return rows
    _, exponent = np.frexp(np.abs(rows).max(axis=-1, keepdims=True))
    if kind == "int8":
        scale = np.ldexp(1.0, exponent - 7)
        return np.clip(np.rint(rows / scale), -127, 127) * scale
    if kind != "fp8":
        raise ValueError(f"cache_dtype {kind!r} is not implemented")
    scale = np.ldexp(1.0, exponent - 8)
    return float64((rows / scale).astype(ml_dtypes.float8_e4m3fn)) * scale


def rotary_frequencies(config: Config, d: int) -> np.ndarray:
    """Radians a position for each pair of dimensions: ``[d / 2]``."""
    new = config.get("rope_parameters") or {}
    scaling = new or config.get("rope_scaling") or {}
    theta = new.get("rope_theta") or config.get("rope_theta", 10000.0)
    if (new.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial rotary positions are not implemented")
    frequency = float(theta) ** (-np.arange(0, d, 2) / d)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequency
    if kind != "llama3":
        raise ValueError(f"rope type {kind!r} is not implemented")
    # Llama 3: long waves are stretched, short ones kept, those between blended
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = context * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def rotate(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Rotate dimension ``i`` with ``i + d/2`` by the position: ``[S, heads, d]``."""
    angle = np.arange(len(x))[:, None, None] * frequencies
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def gated_delta_net(
    tensors: Tensors, name: str, config: Config, x: np.ndarray
) -> np.ndarray:
    """Gated delta net (Yang et al., 2412.06464) as in Qwen3.5: ``[S, D] -> [S, D]``."""
    nk, nv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
    S = len(x)
    mixed = linear(tensors, f"{name}.in_proj_qkv", x)  # [S, C]
    weight = tensors[f"{name}.conv1d.weight"]
    if weight.shape != (mixed.shape[1], 1, config["linear_conv_kernel_dim"]):
        raise ValueError(f"{name}.conv1d.weight has shape {weight.shape}")
    mixed = silu(causal_convolution(mixed, float64(weight[:, 0])))
    q, k, v = np.split(mixed, [nk * dk, 2 * nk * dk], axis=1)
    q = unit(q.reshape(S, nk, dk)) / math.sqrt(dk)
    k = unit(k.reshape(S, nk, dk))
    # value head j reads key head j // (nv // nk)
    q, k = np.repeat(q, nv // nk, axis=1), np.repeat(k, nv // nk, axis=1)

    beta = sigmoid(linear(tensors, f"{name}.in_proj_b", x))  # [S, nv]
    step = softplus(
        linear(tensors, f"{name}.in_proj_a", x) + float64(tensors[f"{name}.dt_bias"])
    )
    log_decay = -np.exp(float64(tensors[f"{name}.A_log"])) * step  # [S, nv]
    o = delta_rule(q, k, v.reshape(S, nv, dv), beta, log_decay)

    z = linear(tensors, f"{name}.in_proj_z", x).reshape(S, nv, dv)
    y = rms_norm(o, tensors[f"{name}.norm.weight"], config) * silu(z)
    return linear(tensors, f"{name}.out_proj", y.reshape(S, nv * dv))


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, log_decay: np.ndarray
) -> np.ndarray:
    """The recurrence, token by token.

    ``q, k [S, nv, dk]``, ``v [S, nv, dv]``, ``beta, log_decay [S, nv]``; returns
    ``[S, nv, dv]``. The state decays before it is read, and the output reads it after
    it has been written.
    """
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2]))  # [nv, dk, dv]
    o = np.empty_like(v)
    for t in range(len(v)):
        state *= np.exp(log_decay[t])[:, None, None]
        old = np.einsum("hkv,hk->hv", state, k[t])
        u = beta[t][:, None] * (v[t] - old)
        state += k[t][:, :, None] * u[:, None, :]
        o[t] = np.einsum("hkv,hk->hv", state, q[t])
    return o


def causal_convolution(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Each channel by itself, the last tap on the current token.

    ``[S, C], [C, K] -> [S, C]``
    """
    K = weight.shape[1]
    padded = np.concatenate([np.zeros((K - 1, x.shape[1])), x])
    return np.sum([padded[j : j + len(x)] * weight[:, j] for j in range(K)], axis=0)


def gated_mlp(tensors: Tensors, name: str, config: Config, x: np.ndarray) -> np.ndarray:
    """``down(silu(gate x) * up x)``: ``[S, D] -> [S, D]``."""
    bias = config.get("mlp_bias", False)
    gate = linear(tensors, f"{name}.gate_proj", x, bias)
    up = linear(tensors, f"{name}.up_proj", x, bias)
    return linear(tensors, f"{name}.down_proj", silu(gate) * up, bias)


def linear(
    tensors: Tensors, name: str, x: np.ndarray, bias: bool = False
) -> np.ndarray:
    """``x W^T (+ b)``; weights are stored as [out, in]."""
    y = x @ float64(tensors[f"{name}.weight"]).T
    return y + float64(tensors[f"{name}.bias"]) if bias else y


def rms_norm(x: np.ndarray, weight: np.ndarray, config: Config) -> np.ndarray:
    """Over the last axis; the weight is centred on one."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    eps = config.get("rms_norm_eps", 1e-6)
    return x / np.sqrt(mean_square + eps) * float64(weight)


def float64(x: np.ndarray) -> np.ndarray:
    """The same numbers in float64, bfloat16 included."""
    return np.asarray(x).astype(np.float64)


def unit(x: np.ndarray) -> np.ndarray:
    """To length one over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-x))``, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    """``x sigmoid(x)``."""
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    """``log(1 + exp(x))``, without overflow."""
    return np.logaddexp(0.0, x)
