"""Every family once, tiny and random: it builds and runs, and refuses what it must."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoints
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.load import decoder_config
from specjax.checkpoints.tensors import TensorInfo, Tensors
from specjax.decoding.windows import chunk_window
from specjax.models.build import Builder, WeightType
from specjax.models.decoder import Decoder
from specjax.models.families import FAMILIES
from specjax.models.families.harmless import is_harmless
from specjax.testing.toys import RandomReader

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
ROUTED = EXPERTS | {"n_routed_experts": 4}
LATENT = ROUTED | {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
SHARED = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 8}
MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "ssm_state_size": 4,
    "n_groups": 2,
    "mlp_bias": True,
    "moe_latent_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "hybrid_override_pattern": "M*E-",
    "num_hidden_layers": 4,
}
LINEAR_ATTENTION = {
    "full_attn_layers": [2],
    "kda_layers": [1],
    "num_heads": 2,
    "head_dim": 8,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"attention_bias": True, "mlp_bias": True},
    "qwen2": SIZES
    | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": SIZES,
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "qwen3_next": SIZES | DELTA | SHARED,
    "qwen3_5": {"text_config": SIZES | DELTA, "tie_word_embeddings": True},
    "qwen3_5_text": SIZES | DELTA,
    "qwen3_5_moe": {"text_config": SIZES | DELTA | SHARED},
    "qwen3_5_moe_text": SIZES | DELTA | SHARED,
    "deepseek_v3": SIZES | LATENT | {"rope_interleave": False},
    "glm4": SIZES,
    "glm4_moe": SIZES | ROUTED | {"use_qk_norm": True},
    "glm4_moe_lite": SIZES | LATENT,
    "glm_moe_dsa": SIZES
    | LATENT
    | {"index_topk": 2, "index_head_dim": 4, "indexer_types": ["full", "shared"]},
    "kimi_linear": SIZES | LATENT | {"linear_attn_config": LINEAR_ATTENTION},
    "nemotron_h": SIZES | ROUTED | MAMBA,
    "lfm2": SIZES | {"full_attn_idxs": [1], "block_multiple_of": 4, "conv_bias": True},
    "lfm2_moe": SIZES
    | SHARED
    | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gpt_oss": SIZES
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    "gemma3": {"text_config": SIZES | {"sliding_window_pattern": 2}},
    "gemma3_text": SIZES | {"sliding_window_pattern": 2, "sliding_window": 3},
}
for _name in ("kimi_linear", "lfm2_moe", "nemotron_h"):
    TINY[_name].pop("shared_expert_intermediate_size", None)


def parse(family: str, **changes: Any):
    """``None`` takes a field away."""
    raw = {"model_type": family} | TINY[family] | changes
    raw = {name: value for name, value in raw.items() if value is not None}
    return decoder_config(raw, Path("config.json"))[1]


class Held(Tensors):
    """Tensors in memory, counted like those of files."""

    readable = frozenset({"F32"})

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors
        file = Path("model.safetensors")
        super().__init__(
            file,
            {
                name: TensorInfo(name, array.shape, "F32", array.nbytes, file)
                for name, array in tensors.items()
            },
        )

    def _data(self, info: TensorInfo) -> np.ndarray:
        return self._tensors[info.name]


@functools.cache
def built(family: str):
    """The decoder, and the tensors that it was built from."""
    reader = RandomReader(0)
    config = parse(family)
    decoder = FAMILIES[family].build(config, Builder(reader, WeightType.FLOAT32))
    return decoder, reader.tensors


def load(family: str, tensors: dict[str, np.ndarray], **changes: Any):
    """As ``checkpoints.load`` does it, but for the numbers."""
    config = parse(family, **changes)
    held = Held(tensors)
    make = Builder(held, WeightType.FLOAT32)
    # its shapes will do: nothing is computed
    jax.eval_shape(lambda: FAMILIES[family].build(config, make))
    held.finish(FAMILIES[family].left_alone(config))


def some_window():
    tokens = jnp.asarray([[3, 5, 7, 11]], jnp.int32)
    start, end = jnp.asarray([0], jnp.int32), jnp.asarray([4], jnp.int32)
    return chunk_window(tokens, start, end, 4)


def test_every_family_is_here():
    assert set(TINY) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_family_builds_and_fits_together(family):
    decoder, _ = built(family)
    verdict = jax.eval_shape(decoder.verify, decoder.init(1, 8), some_window())
    assert verdict.logits.shape == (1, 4, 31)


ORACLES = Path(__file__).resolve().parents[1] / "data" / "oracles"
WIDE = ("deepseek_v3", "glm4_moe_lite")
QUICK = ("deepseek_v3", "gemma3_text", "lfm2_moe", "nemotron_h")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in sorted(TINY)
    ],
)
def test_a_family_runs(family):
    decoder, _ = built(family)
    verdict = jax.jit(decoder.verify)(decoder.init(1, 8), some_window())
    assert jnp.all(jnp.isfinite(verdict.logits))
    assert jnp.std(verdict.logits) > 0.01


@pytest.mark.parametrize(
    ("weights", "alike"),
    # experts and channels of random layers are chosen otherwise now and then
    [(WeightType.BFLOAT16, 0.98), (WeightType.INT8, 0.7)],
    ids=["bfloat16", "int8"],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=() if path.name in WIDE else pytest.mark.full)
        for path in sorted(ORACLES.iterdir())
    ],
)
def test_a_family_runs_with_narrower_weights(name, weights, alike):
    """A product that a backend has not got fails when it runs, and not before.

    Of layers as small as ``TINY`` it has them all.
    """
    exact = logits_of(checkpoints.load(ORACLES / name).decoder)
    narrow = logits_of(checkpoints.load(ORACLES / name, weights).decoder)
    assert alike < np.corrcoef(narrow.ravel(), exact.ravel())[0, 1] < 1 - 1e-7


def logits_of(decoder: Decoder) -> np.ndarray:
    verify = jax.jit(Decoder.verify)
    return np.asarray(verify(decoder, decoder.init(1, 8), some_window()).logits)


@pytest.mark.parametrize("family", sorted(TINY))
def test_what_is_missing_is_named_and_what_is_left_over_too(family):
    _, tensors = built(family)
    load(family, tensors)
    for name in list(tensors)[:: max(1, len(tensors) // 5)]:
        with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
            load(family, {key: tensors[key] for key in tensors if key != name})
    one = np.ones(1, np.float32)
    with pytest.raises(CheckpointError, match=r"of no use.*'model\.strange\.weight'"):
        load(family, tensors | {"model.strange.weight": one})


@pytest.mark.parametrize(
    ("family", "name", "none"),
    [
        ("qwen3_5", "mtp.fc.weight", {"text_config": {"mtp_num_hidden_layers": 0}}),
        ("qwen3_next", "mtp.fc.weight", {"mtp_num_hidden_layers": 0}),
        ("deepseek_v3", "model.layers.2.eh_proj.weight", {"num_mtp_layers": 0}),
        ("glm_moe_dsa", "model.layers.2.enorm.weight", {"num_nextn_predict_layers": 0}),
    ],
)
def test_layers_ahead_are_left_alone_only_where_there_are_any(family, name, none):
    _, tensors = built(family)
    extra = tensors | {name: np.ones(1, np.float32)}
    load(family, extra)
    if "text_config" in none:
        none = {"text_config": TINY[family]["text_config"] | none["text_config"]}
    with pytest.raises(CheckpointError, match=f"of no use.*'{name}'"):
        load(family, extra, **none)


def test_layers_ahead_of_nemotron_have_to_be_said():
    _, tensors = built("nemotron_h")
    extra = tensors | {"mtp.layers.0.enorm.weight": np.ones(1, np.float32)}
    load("nemotron_h", extra, num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"of no use.*'mtp\.layers"):
        load("nemotron_h", extra)


def test_encoders_of_images_are_left_alone():
    one = np.ones(1, np.float32)
    load("qwen3_5", built("qwen3_5")[1] | {"model.visual.blocks.0.weight": one})
    load("gemma3", built("gemma3")[1] | {"vision_tower.head.weight": one})
    with pytest.raises(CheckpointError, match=r"of no use.*'model\.visual"):
        load("qwen3", built("qwen3")[1] | {"model.visual.blocks.0.weight": one})


@pytest.mark.parametrize(
    ("family", "prefix", "head"),
    [
        ("qwen3_5", "model.language_model.", "lm_head.weight"),
        ("gemma3", "language_model.model.", "language_model.lm_head.weight"),
        ("gemma3", "model.language_model.", "lm_head.weight"),
    ],
)
def test_a_decoder_is_found_under_its_prefix_with_a_copy_of_its_head(
    family, prefix, head
):
    _, tensors = built(family)
    moved = {name.replace("model.", prefix, 1): tensors[name] for name in tensors}
    embedding = moved[f"{prefix}embed_tokens.weight"]
    load(family, moved | {head: embedding.copy()})
    with pytest.raises(CheckpointError, match=r"differs from .*embed_tokens"):
        load(family, moved | {head: embedding + 1})


WRONG = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "full_attention"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    ("llama", {"head_dim": 5}, "head_dim"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention"]}, "1 entries for 2"),
    ("qwen3_moe", {"mlp_only_layers": [1, 99]}, r"layers 0 to 1, found \[99\]"),
    ("qwen3_moe", {"num_experts_per_token": 2}, "num_experts_per_token"),
    ("qwen3_moe", {"num_experts_per_tok": 5}, "5 of 4 experts"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
    ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type"),
    ("qwen3_5_text", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"n_group": 3}, "n_group"),
    ("deepseek_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "first layer"),
    ("glm_moe_dsa", {"index_head_dim": 2}, "index_head_dim"),
    ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
    ("kimi_linear", {"linear_attn_config": {"use_full_rank_gate": 1}}, "full_rank"),
    ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ("nemotron_h", {"sliding_window": 8}, "sliding_window"),
    ("nemotron_h", {"hybrid_override_pattern": "M*XM"}, "'X'"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ("lfm2", {"conv_dim": 8}, "conv_dim"),
    ("lfm2", {"use_pos_enc": False}, "use_pos_enc"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
    ("gemma3", {"audio_config": {"hidden_size": 3}}, "audio_config"),
]


@pytest.mark.parametrize(("family", "change", "told"), WRONG)
def test_what_is_not_implemented_is_refused_by_name(family, change, told):
    parse(family)
    with pytest.raises(CheckpointError, match=told):
        parse(family, **change)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
def test_a_null_width_of_layers_that_slide_is_no_default(family):
    raw = {"model_type": family} | TINY[family] | {"sliding_window": None}
    with pytest.raises(CheckpointError, match=r"'sliding_window'.*null"):
        decoder_config(raw, Path("config.json"))


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
CONTRADICTIONS = [
    ("qwen3_moe", {"num_local_experts": 5}, "num_experts"),
    ("deepseek_v3", {"num_local_experts": 5}, "n_routed_experts"),
    ("kimi_linear", {"norm_topk_prob": False, "moe_renormalize": True}, "renormalize"),
    ("kimi_linear", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("kimi_linear", {"linear_num_heads": 3}, "linear_num_heads"),
    ("lfm2", {"block_ff_dim": 5}, "intermediate_size"),
    ("lfm2", {"tie_embedding": True, "tie_word_embeddings": False}, "tie_word"),
    ("lfm2", {"layer_types": ["conv", "conv"]}, "full_attn_idxs"),
    ("gpt_oss", {"experts_per_token": 3}, "num_experts_per_tok"),
    ("gpt_oss", {"rope_scaling": YARN, "initial_context_length": 16}, "32"),
    ("nemotron_h", {"layers_block_type": ["mamba"] * 4}, "hybrid_override_pattern"),
    ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers"),
    ("glm_moe_dsa", {"index_topk_pattern": "FF"}, "index_topk_pattern"),
    ("llama", {"rope_scaling": YARN, "rope_parameters": {"factor": 2.0}}, "rope_sc"),
    ("llama", {"rope_theta": 1e5, "rope_scaling": {"rope_theta": 5.0}}, "rope_theta"),
    ("qwen3_5", {"hidden_size": 5}, "hidden_size"),
]


@pytest.mark.parametrize(("family", "change", "told"), CONTRADICTIONS)
def test_spellings_that_contradict_each_other_are_refused(family, change, told):
    parse(family)
    with pytest.raises(CheckpointError, match=told):
        parse(family, **change)


def test_no_switch_passes_for_an_id_of_a_token():
    for name in ("num_experts_per_token", "experts_per_token", "output_gate_type"):
        assert not is_harmless(name)
    for name in ("eos_token_id", "image_token_index", "output_router_logits"):
        assert is_harmless(name)
