"""Configuration fields that change nothing of what a decoder computes.

Any other field that a family does not read is refused: it may be a switch that the
decoder does not know.
"""

from __future__ import annotations

import re

_PATTERNS = (
    r"_.*|unsloth_.*|transformers.*|auto_map|architectures|model_type|name_or_path",
    r"model_name",
    r"(torch_)?dtype|quantization_config",
    # ids of special tokens, of images and sounds; sampling defaults
    r".*_token_(id|ids|index)|(bos|eos|pad|unk|sep|cls|mask|image|video)_token|prefix",
    r"bad_words_ids|suppress_tokens",
    r"begin_suppress_tokens|temperature|top_k|top_p|typical_p|do_sample|num_beams",
    r"num_beam_groups|diversity_penalty|repetition_penalty|length_penalty|max_length",
    r"min_length|early_stopping|num_return_sequences|(encoder_)?no_repeat_ngram_size",
    r"remove_invalid_values|exponential_decay_length_penalty|return_dict.*",
    # training
    r"initializer_.*|.*_dropout(_prob)?|embd_pdrop|resid_pdrop|attn_pdrop|.*aux_loss.*",
    r"router_z_loss_coef|router_jitter_noise|seq_aux|rescale_prenorm_residual",
    r"gradient_checkpointing|max_seq_length|rope_max_seq_length",
    # how some code runs or stores the model
    r"output_(attentions|hidden_states|router_logits|scores)|tie_last_hidden_states",
    r"use_cache|use_return_dict|torchscript|use_bfloat16|pruned_heads|is_.*_config",
    r"chunk_size_feed_forward|(attn|experts)_implementation|tie_encoder_decoder",
    r"is_encoder_decoder|is_decoder|add_cross_attention|cross_attention_hidden_size",
    r"tf_legacy_loss|ep_size|moe_grouped_gemm|num_logits_to_keep|use_mamba_kernels",
    r"cache_implementation|mamba_ssm_dtype|mamba_ssm_cache_dtype|base_model_(tp|pp)_plan",
    # labels of other tasks
    r"id2label|label2id|problem_type|task_specific_params|finetuning_task|num_labels",
)
_HARMLESS = re.compile("|".join(f"(?:{pattern})" for pattern in _PATTERNS))


def is_harmless(name: str) -> bool:
    """Whether a field of this name may be ignored in any family."""
    return _HARMLESS.fullmatch(name) is not None
