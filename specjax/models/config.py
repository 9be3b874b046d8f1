"""What a decoder is made of: a list of blocks, each a mixer and a feed-forward.

These are static, hashable descriptions. A family file translates a checkpoint's own
configuration into them; nothing in here knows a family by name.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from specjax.models.recurrence import REPLAY, MatrixShape, Strategy
from specjax.models.rope import Rope

Activation = Literal["silu", "sigmoid", "gelu_tanh", "relu2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query softmax attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """``None``: positions enter through the mask alone (NoPE)."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    """Queries and keys are normed, head by head, before they turn."""
    out_gate: bool = False
    """The output is multiplied by the sigmoid of a projection of the input."""
    sinks: bool = False
    """Every head has one more logit, of a key without a value."""
    reach: int | None = None
    """A sliding window: how many positions a token sees, itself included."""
    scale: float | None = None
    """Of the scores; ``head_dim ** -0.5`` where it is ``None``."""
    softcap: float | None = None
    """Scores pass through ``softcap * tanh(score / softcap)``."""

    def __post_init__(self) -> None:
        _check_multiple(self, "num_heads", "num_kv_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """GLM-5's choice of the keys that a token attends to."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention: one latent vector a token instead of its heads."""

    num_heads: int
    query_rank: int | None
    """``None``: queries are projected in one step."""
    latent_dim: int
    content_dim: int
    """Of a head's query and key, the part that does not turn."""
    rotary_dim: int
    """Of a head's query, and of the key that all heads share. It does not turn either
    where ``rope`` is ``None``."""
    value_dim: int
    rope: Rope | None
    scale: float
    latent_eps: float
    bias: bool = False
    """Of the projections to the two latents, and out of the heads."""
    rotary_pairs: bool = False
    """The checkpoint turns neighbouring dimensions; they are put apart when read."""
    indexer: IndexerConfig | None = None
    chosen_before: bool = False
    """Attend to the keys that the nearest indexer above this block has chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """The gated delta rule and its short convolution: GDN, and KDA.

    GDN has one decay a head and gates its output with SiLU; KDA has one a channel of
    the key, gates with a sigmoid and makes both through a narrow layer.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    channel_decay: bool = False
    gate_rank: int | None = None
    """Width of the layer that decays and output gates pass through."""
    gate: Activation = "silu"
    decay_floor: float | None = None
    """KDA's safe gate: log decays lie between this (negative) number and 0."""
    recurrence: Strategy = REPLAY
    """How accepted inputs reach the state."""

    def __post_init__(self) -> None:
        _check_multiple(self, "num_value_heads", "num_key_heads")
        if self.decay_floor is not None and self.decay_floor >= 0:
            raise ValueError(f"decay_floor = {self.decay_floor} is not negative")

    @property
    def channels(self) -> int:
        """Convolved channels: queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return 2 * keys + self.num_value_heads * self.value_dim

    @property
    def matrix_shape(self) -> MatrixShape:
        """The sizes of the recurrent state."""
        return MatrixShape(
            heads=self.num_value_heads,
            key_heads=self.num_key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            channel_decay=self.channel_decay,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """A state space layer with one scalar decay a head (Mamba2)."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Heads of one group share what is written and read (``B`` and ``C``)."""
    conv_width: int
    conv_bias: bool
    bias: bool
    norm_eps: float
    recurrence: Strategy = REPLAY
    """How accepted inputs reach the state."""

    def __post_init__(self) -> None:
        _check_multiple(self, "num_heads", "num_groups")

    @property
    def values(self) -> int:
        """Channels of ``x``, of the gate and of the output."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Convolved channels: ``x``, ``B`` and ``C``."""
        return self.values + 2 * self.num_groups * self.state_dim

    @property
    def matrix_shape(self) -> MatrixShape:
        """The sizes of the recurrent state."""
        return MatrixShape(
            heads=self.num_heads,
            key_heads=self.num_groups,
            key_dim=self.state_dim,
            value_dim=self.head_dim,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """LFM2's gated short convolution."""

    channels: int
    conv_width: int
    bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLPConfig:
    """``down(activation(gate x) * up x)``."""

    size: int
    bias: bool = False
    activation: Activation = "silu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainMLPConfig:
    """``down(activation(up x))``."""

    size: int
    bias: bool = False
    activation: Activation = "relu2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Which experts a token goes to, and with what weights.

    ``softmax``: of all logits, then the largest. ``chosen``: the largest logits, then
    a softmax over these. ``sigmoid``: each expert for itself.
    """

    kind: Literal["softmax", "chosen", "sigmoid"]
    top_k: int
    bias: bool = False
    """The projection to logits has a bias."""
    selection_bias: bool = False
    """A bias that takes part in the choice, and not in the weights."""
    groups: int = 1
    kept_groups: int = 1
    """Of ``groups`` groups of neighbours, those whose two best experts sum highest."""
    normalize: bool = False
    epsilon: float = 0.0
    """Added to the sum that weights are divided by."""
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts, and the expert that every token goes to."""

    num_experts: int
    size: int
    router: RouterConfig
    kind: Literal["gated", "plain", "clamped"] = "gated"
    """``gated`` and ``plain`` are the MLPs of these names, with SiLU and relu squared;
    ``clamped`` is gpt-oss's gated MLP with biases."""
    limit: float | None = None
    """Of the activations of clamped experts."""
    slope: float = 1.702
    """Of the sigmoid in clamped experts."""
    latent_dim: int | None = None
    """Experts work on a projection of this size."""
    shared: GatedMLPConfig | PlainMLPConfig | None = None
    shared_gate: bool = False
    """What the shared expert adds is multiplied by a sigmoid of the input."""

    def __post_init__(self) -> None:
        router, experts = self.router, self.num_experts
        if not 1 <= router.kept_groups <= router.groups:
            raise ValueError(f"{router.kept_groups} kept of {router.groups} groups")
        if experts % router.groups or experts < 2 * router.groups > 2:
            raise ValueError(
                f"{experts} experts do not form {router.groups} groups of two or more"
            )
        within = experts // router.groups * router.kept_groups
        if not 1 <= router.top_k <= within:
            raise ValueError(f"top_k = {router.top_k} of {within} experts")
        if (self.kind == "clamped") != (self.limit is not None):
            raise ValueError("a limit belongs to clamped experts, and to no others")
        if self.shared_gate and self.shared is None:
            raise ValueError("shared_gate without a shared expert")

    @property
    def wide(self) -> int:
        """What an expert's first layer gives: its gate, if it has one, and ``size``."""
        return self.size if self.kind == "plain" else 2 * self.size


MixerConfig = (
    AttentionConfig
    | LatentAttentionConfig
    | GatedDeltaConfig
    | Mamba2Config
    | ShortConvConfig
)
FeedForwardConfig = GatedMLPConfig | PlainMLPConfig | MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One residual block: mixer, then feed-forward, each behind a norm.

    A block may lack one of the two.
    """

    mixer: MixerConfig | None
    feedforward: FeedForwardConfig | None
    post_norms: bool = False
    """What mixer and feed-forward add is normed as well."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AheadConfig:
    """One layer that predicts a token further than the layer before it (MTP)."""

    blocks: tuple[BlockConfig, ...]
    own_embedding: bool = False
    """It embeds tokens by a matrix of its own, not by the decoder's."""
    shares_choice: bool = False
    """All drafts of a round attend to the keys that its indexer chose for the last true
    row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A whole decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockConfig, ...]
    norm_eps: float
    tied: bool
    """Whether the output head is the embedding matrix."""
    max_positions: int
    """Positions the model was made for."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    heads_ahead: int = 0
    """Layers of the checkpoint that predict further tokens: drafters. Where the file
    does not say, the most that there are."""
    ahead: AheadConfig | None = None
    """What each of these is made of; ``None`` in families that have none."""


def _check_multiple(config: object, name: str, divisor: str) -> None:
    value, by = getattr(config, name), getattr(config, divisor)
    if value % by:
        raise ValueError(f"{name} = {value} is not a multiple of {divisor} = {by}")
