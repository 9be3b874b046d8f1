"""Tiny random decoders with every mixer there is, for the conformance suite.

Two decoders, so that few programs are compiled: one of all kinds of attention and the
short convolution, one of all recurrent mixers, under any rollback strategy. They are
assembled from the families' own parts, in their names.
"""

from __future__ import annotations

import dataclasses

from specjax.models.build import Builder, WeightType
from specjax.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    GatedDeltaConfig,
    GatedMLPConfig,
    IndexerConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MixerConfig,
    MoEConfig,
    PlainMLPConfig,
    RouterConfig,
    ShortConvConfig,
)
from specjax.models.decoder import Decoder
from specjax.models.families import parts
from specjax.models.families.kimi import kimi_delta
from specjax.models.families.latents import latent_attention
from specjax.models.families.lfm2 import short_convolution
from specjax.models.families.nemotron_h import mamba2
from specjax.models.families.qwen_hybrid import gated_delta
from specjax.models.mixers.base import Mixer
from specjax.models.recurrence import REPLAY, Strategy
from specjax.models.rope import Rope
from specjax.testing.toys import RandomReader, Toy

HIDDEN, VOCAB, EPS = 24, 61, 1e-5
ROPE = Rope(theta=10000.0, dims=8)

SLIDING = AttentionConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=ROPE,
    qkv_bias=True,
    sinks=True,
    reach=5,
)
"""As gpt-oss, with a ring shorter than a window."""
GATED = AttentionConfig(
    num_heads=4,
    num_kv_heads=1,
    head_dim=8,
    rope=dataclasses.replace(ROPE, dims=4),
    qk_norm_eps=EPS,
    out_gate=True,
    softcap=4.0,
)
"""As Qwen3-Next: one key head, half of which turns."""
INDEXED = LatentAttentionConfig(
    num_heads=3,
    query_rank=10,
    latent_dim=12,
    content_dim=8,
    rotary_dim=8,
    value_dim=6,
    rope=ROPE,
    scale=0.3,
    latent_eps=EPS,
    rotary_pairs=True,
    indexer=IndexerConfig(num_heads=4, head_dim=8, top_k=7),
)
"""As GLM-5, with fewer keys than the context soon has."""
SHARING = dataclasses.replace(INDEXED, indexer=None, chosen_before=True)
LATENT = dataclasses.replace(
    INDEXED,
    indexer=None,
    query_rank=None,
    rope=None,
    rotary_dim=4,
    rotary_pairs=False,
)
"""As Kimi-Linear: nothing turns."""
CONVOLUTION = ShortConvConfig(channels=HIDDEN, conv_width=3, bias=True)
ATTENTIONS = (SLIDING, CONVOLUTION, INDEXED, SHARING, GATED, LATENT)

GDN = GatedDeltaConfig(
    num_key_heads=2,
    num_value_heads=4,
    key_dim=8,
    value_dim=6,
    conv_width=4,
    norm_eps=EPS,
)
KDA = GatedDeltaConfig(
    num_key_heads=2,
    num_value_heads=2,
    key_dim=8,
    value_dim=8,
    conv_width=3,
    norm_eps=EPS,
    channel_decay=True,
    gate_rank=8,
    gate="sigmoid",
)
MAMBA = Mamba2Config(
    num_heads=4,
    head_dim=6,
    state_dim=8,
    num_groups=2,
    conv_width=4,
    conv_bias=True,
    bias=False,
    norm_eps=EPS,
)
RECURRENT = (GDN, KDA, MAMBA)

GATED_MLP = GatedMLPConfig(size=32)
EXPERTS = MoEConfig(
    num_experts=6,
    size=12,
    router=RouterConfig(
        kind="sigmoid", top_k=2, selection_bias=True, normalize=True, epsilon=1e-20
    ),
    shared=GatedMLPConfig(size=12),
)


def toy_attentions(
    seed: int = 0, weights: WeightType = WeightType.FLOAT32, vocab_size: int = VOCAB
) -> Toy:
    """Sinks in a ring, a short convolution, an indexer and a block that shares its
    choice, a gated head with norms, and latents that do not turn; one mixture.
    """
    return _toy(ATTENTIONS, seed, weights, vocab_size)


def toy_softmax(seed: int = 0, weights: WeightType = WeightType.FLOAT32) -> Toy:
    """The first of the attentions and the last that is no latent one: sinks in a ring,
    and a gated head with norms and a soft cap.
    """
    return _toy((SLIDING, GATED), seed, weights, VOCAB)


def toy_recurrent(
    strategy: Strategy = REPLAY,
    seed: int = 0,
    weights: WeightType = WeightType.FLOAT32,
    vocab_size: int = VOCAB,
) -> Toy:
    """GDN, KDA and Mamba2; one mixture and one block without a feed-forward."""
    mixers = tuple(dataclasses.replace(m, recurrence=strategy) for m in RECURRENT)
    return _toy(mixers, seed, weights, vocab_size)


def _toy(
    mixers: tuple[MixerConfig, ...], seed: int, weights: WeightType, vocab_size: int
) -> Toy:
    bodies = [GATED_MLP, EXPERTS, *[PlainMLPConfig(size=32)] * len(mixers)]
    config = DecoderConfig(
        family="toy_mixers",
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        blocks=tuple(
            BlockConfig(mixer=mixer, feedforward=body, post_norms=i == 0)
            for i, (mixer, body) in enumerate(zip(mixers, bodies, strict=False))
        ),
        norm_eps=EPS,
        tied=False,
        max_positions=512,
    )
    reader = RandomReader(seed)
    decoder = _build(config, Builder(reader, weights))
    return Toy(decoder, {"model_type": config.family}, reader.tensors)


def _build(config: DecoderConfig, make: Builder) -> Decoder:
    blocks = []
    for i, block in enumerate(config.blocks):
        name = f"model.layers.{i}"
        assert block.mixer is not None
        assert block.feedforward is not None
        mixer = any_mixer(f"{name}.mixer", HIDDEN, block.mixer, make)
        body = parts.feedforward(f"{name}.mlp", HIDDEN, block.feedforward, make)
        after = ("post_mixer_layernorm", "post_mlp_layernorm")
        blocks.append(
            parts.pre_norm_block(
                config,
                name,
                mixer,
                body,
                make,
                post_norms=after if block.post_norms else None,
            )
        )
    return parts.assemble(config, tuple(blocks), make)


def any_mixer(name: str, hidden: int, config: MixerConfig, make: Builder) -> Mixer:
    """A mixer of any kind, its tensors named as one of the families names them."""
    match config:
        case AttentionConfig():
            return parts.attention(name, hidden, config, make)
        case LatentAttentionConfig():
            return latent_attention(name, hidden, config, make)
        case GatedDeltaConfig(channel_decay=True):
            return kimi_delta(name, hidden, config, make)
        case GatedDeltaConfig():
            return gated_delta(name, hidden, config, make)
        case Mamba2Config():
            return mamba2(name, hidden, config, make)
        case ShortConvConfig():
            return short_convolution(name, config, make)
