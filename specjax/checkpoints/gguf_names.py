"""The architectures of GGUF files that can be read: what their tensors are called.

The names are those of llama.cpp's converter; two architectures may use one name for
different tensors (``ffn_norm`` stands before the feed-forward, and in Gemma the norm
after attention is another).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_PROJECTIONS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_HEAD_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}

_LLAMA = {**_PROJECTIONS, "ffn_norm": "post_attention_layernorm"}

_GEMMA3 = {
    **_PROJECTIONS,
    **_HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one architecture's tensors differ from those of a Hugging Face checkpoint."""

    block_names: Mapping[str, str]
    """Inside ``blk.N`` to inside ``model.layers.N``."""
    pairs: bool = False
    """Rows 2i and 2i+1 of a head of q and k turn together, not i and i + dim/2."""
    norm_shift: float = 0.0
    """What the converter has added to the weights of every norm."""

    def hugging_face_name(self, name: str) -> str:
        """The Hugging Face name of a tensor; an unknown name stays as it is."""
        stem, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if block is not None and block[2] in self.block_names:
            return f"model.layers.{block[1]}.{self.block_names[block[2]]}.{kind}"
        return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_LLAMA, pairs=True),
    "qwen2": Architecture(_LLAMA),
    "qwen3": Architecture({**_LLAMA, **_HEAD_NORMS}),
    "gemma3": Architecture(_GEMMA3, norm_shift=1.0),
}
"""By ``general.architecture``."""

FAMILIES_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "deepseek2": ("deepseek_v3", "glm4_moe_lite"),
    "glm4": ("glm4",),
    "glm4moe": ("glm4_moe",),
    "glm-dsa": ("glm_moe_dsa",),
    "gpt-oss": ("gpt_oss",),
    "kimi-linear": ("kimi_linear",),
    "lfm2": ("lfm2",),
    "lfm2moe": ("lfm2_moe",),
    "nemotron_h": ("nemotron_h",),
    "nemotron_h_moe": ("nemotron_h",),
    "qwen3moe": ("qwen3_moe",),
    "qwen3next": ("qwen3_next",),
    "qwen35": ("qwen3_5",),
    "qwen35moe": ("qwen3_5_moe",),
}
"""Architectures whose GGUF files are not read, and the ``model_type`` of the families
that read their safetensors: all families with MTP layers are among them."""
