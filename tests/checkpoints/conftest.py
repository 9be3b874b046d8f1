"""Tiny checkpoints, written by the tests themselves."""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "a"), ("1", "2")]
TOOL = "<tool>"  # a user-defined token: found in text, shown in text
VOCABULARY = [*SPECIALS, TOOL, *BYTES, *("".join(pair) for pair in MERGES)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


class Tiny:
    """Writes llama checkpoints of one small size; what a test changes, it passes."""

    config = CONFIG
    vocabulary = VOCABULARY

    def __init__(self, folder: Path):
        self.folder = folder

    def weights(self, seed: int = 0, dtype: Any = np.float32, **config: Any) -> dict:
        """Tensors under their Hugging Face names."""
        c = {**CONFIG, **config}
        hidden, mlp = c["hidden_size"], c["intermediate_size"]
        head = c.get("head_dim", hidden // c["num_attention_heads"])
        queries, keys = (c[f"num_{k}_heads"] * head for k in ("attention", "key_value"))
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (c["vocab_size"], hidden),
            "model.norm.weight": (hidden,),
        }
        if not c["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (c["vocab_size"], hidden)
        for i in range(c["num_hidden_layers"]):
            block = {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }
            for name, shape in block.items():
                shapes[f"model.layers.{i}.{name}.weight"] = shape
        rng = np.random.default_rng(seed)
        return {n: rng.normal(size=s).astype(dtype) for n, s in shapes.items()}

    def directory(
        self,
        name: str = "tiny",
        weights: dict | None = None,
        config: dict | None = None,
        tokenizer: bool = False,
    ) -> Path:
        """A Hugging Face directory with one safetensors file."""
        path = self.folder / name
        path.mkdir()
        save_file(self.weights() if weights is None else weights, self.single(path))
        self.write(path / "config.json", CONFIG if config is None else config)
        if tokenizer:
            self.inner_tokenizer().save(str(path / "tokenizer.json"))
            settings = {"bos_token": SPECIALS[1], "eos_token": {"content": SPECIALS[2]}}
            self.write(path / "tokenizer_config.json", settings)
            (path / "chat_template.jinja").write_text(TEMPLATE)
        return path

    @staticmethod
    def metadata() -> dict[str, Any]:
        """What a GGUF file says, unless a test says otherwise."""
        return gguf_metadata()

    @staticmethod
    def single(path: Path) -> Path:
        return path / "model.safetensors"

    @staticmethod
    def write(path: Path, value: Any) -> None:
        path.write_text(json.dumps(value))

    def sharded(self, weights: dict | None = None) -> Path:
        """The same in two shards behind an index."""
        weights = self.weights() if weights is None else weights
        path = self.folder / "sharded"
        path.mkdir()
        names = list(weights)
        shards = {
            "model-00001-of-00002.safetensors": names[: len(names) // 2],
            "model-00002-of-00002.safetensors": names[len(names) // 2 :],
        }
        for shard, inside in shards.items():
            save_file({n: weights[n] for n in inside}, path / shard)
        weight_map = {n: shard for shard, inside in shards.items() for n in inside}
        self.write(path / "model.safetensors.index.json", {"weight_map": weight_map})
        self.write(path / "config.json", CONFIG)
        return path

    @staticmethod
    def inner_tokenizer() -> tokenizers.Tokenizer:
        """Byte-level BPE over all bytes and a few merges, digits by themselves."""
        ids = {string: i for i, string in enumerate(VOCABULARY)}
        inner = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=MERGES))
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        inner.add_tokens([AddedToken(s, special=True) for s in SPECIALS])
        inner.add_tokens([AddedToken(TOOL, special=False)])
        return inner

    def gguf(
        self,
        name: str = "tiny.gguf",
        weights: dict | None = None,
        kinds: dict[str, GGMLQuantizationType] | None = None,
        metadata: dict[str, Any] | None = None,
        arch: str = "llama",
        extra: dict[str, np.ndarray] | None = None,
    ) -> Path:
        """A GGUF file; ``kinds`` says how to store a tensor (by Hugging Face name).

        ``metadata`` replaces or adds keys; ``None`` removes one.
        """
        path = self.folder / name
        writer = gguf.GGUFWriter(path, arch)
        for key, value in {**gguf_metadata(), **(metadata or {})}.items():
            _add(writer, key, value)
        for own, array in (self.weights() if weights is None else weights).items():
            kind = (kinds or {}).get(own)
            data = gguf_order(own, array)
            if kind is not None:
                data = quantised(data, kind)
            writer.add_tensor(gguf_name(own), data, raw_dtype=kind)
        for own, array in (extra or {}).items():
            writer.add_tensor(own, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def gguf_order(name: str, array: np.ndarray) -> np.ndarray:
    """Permute q and k as llama.cpp's converter does, in its own words."""
    if "q_proj" in name:
        heads = CONFIG["num_attention_heads"]
    elif "k_proj" in name:
        heads = CONFIG["num_key_value_heads"]
    else:
        return array
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def quantised(array: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Bytes of a type; of those that gguf cannot write, any valid ones."""
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(0)
        blocks = array.size // block
        raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
        # The two float16 scales that begin a Q4_K block must be finite.
        raw[:, :4] = rng.normal(size=(blocks, 2)).astype(np.float16).view(np.uint8)
        return raw.reshape(*array.shape[:-1], -1)


def gguf_metadata() -> dict[str, Any]:
    types = [3] * len(SPECIALS) + [4] + [1] * (len(VOCABULARY) - len(SPECIALS) - 1)
    return {
        "llama.block_count": CONFIG["num_hidden_layers"],
        "llama.context_length": CONFIG["max_position_embeddings"],
        "llama.embedding_length": CONFIG["hidden_size"],
        "llama.feed_forward_length": CONFIG["intermediate_size"],
        "llama.attention.head_count": CONFIG["num_attention_heads"],
        "llama.attention.head_count_kv": CONFIG["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
        "llama.rope.freq_base": CONFIG["rope_theta"],
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": CONFIG["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """Writes tiny checkpoints into the test's own folder."""
    return Tiny(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in place of the user's."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def bfloat16() -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16)
