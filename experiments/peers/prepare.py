"""Turn one GGUF file into the model directories that the peers read.

Every peer gets the same numbers: the GGUF's weights, dequantised once to float32.

    OUT/hf           config, safetensors, tokenizer   (transformers)
    OUT/ct2-float32  CTranslate2
    OUT/ort-float32  ONNX Runtime GenAI

Run it with the peers' Python (README.md beside this file):

    python experiments/peers/prepare.py MODEL.gguf OUT
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

CHECK_PROMPT = "The capital of France is"
CHECK_TOKENS = 12
DIGITS_TEXT = "In 2024 it was 1234567."
CONTROL = 3  # gguf.TokenType.CONTROL: <|im_start|> and its like
USER_DEFINED = 4  # gguf.TokenType.USER_DEFINED: found whole, but plain text


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def metadata(reader: GGUFReader, key: str):
    """Return one metadata value of the GGUF, or None."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Build the byte-level BPE tokenizer that the GGUF's metadata describes.

    transformers' own GGUF route leaves out the splitting of digits, so numbers (and
    what stands beside them) come out as other tokens than the model was trained on.
    """
    pre = metadata(reader, "tokenizer.ggml.pre")
    if pre != "smollm":
        raise ValueError(f"pre-tokenizer {pre!r} is not known here, only 'smollm'")
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    merges = [
        tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata(reader, "tokenizer.ggml.token_type")
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL
            added = AddedToken(token, special=special, normalized=False)
            tokenizer.add_tokens([added])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ValueError("special tokens were given new ids")
    return tokenizer


def save_tokenizer(reader: GGUFReader, out: Path) -> None:
    """Write the tokenizer and check that it comes back unchanged."""
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    names = {
        f"{name}_token": tokens[index]
        for name, key in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown")]
        if (index := metadata(reader, f"tokenizer.ggml.{key}_token_id")) is not None
    }
    built = build_tokenizer(reader)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=built, clean_up_tokenization_spaces=False, **names
    )
    wrapped.chat_template = metadata(reader, "tokenizer.chat_template")
    wrapped.save_pretrained(out)
    # A tokenizer class can rebuild its pre-tokenizer on loading: see what peers get.
    loaded = AutoTokenizer.from_pretrained(out)
    expected = built.encode(DIGITS_TEXT, add_special_tokens=False).ids
    if loaded(DIGITS_TEXT)["input_ids"] != expected:
        raise ValueError("the saved tokenizer does not load as it was built")


def save_hf(gguf: Path, out: Path) -> None:
    """Write the dequantised model as a Hugging Face directory."""
    reader = GGUFReader(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are dequantised by now; the marks of quantisation forbid saving.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.bos_token_id = model.config.bos_token_id
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(out)
    save_tokenizer(reader, out)


def convert_ct2(hf: Path, out: Path) -> None:
    """Convert the Hugging Face directory for CTranslate2, in float32."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(hf)).convert(str(out), quantization="float32", force=True)


def convert_ort(hf: Path, out: Path) -> None:
    """Convert the Hugging Face directory for ONNX Runtime GenAI, in float32."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = ["-i", str(hf), "-o", str(out), "-p", "fp32", "-e", "cpu"]
    subprocess.run(builder + options, check=True, stdout=sys.stderr)


def check(out: Path) -> None:
    """Let every engine continue one prompt; refuse ids that differ from the first's."""
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    prompt = tokenizer(CHECK_PROMPT)["input_ids"]
    arms = ["hf-float32", "ct2-float32", "ort-float32"]
    requests = [
        {"arm": arm, "ids": prompt, "max_new_tokens": CHECK_TOKENS, "ignore_eos": True}
        for arm in arms
    ]
    worker = Path(__file__).with_name("worker.py")
    answer = subprocess.run(
        [sys.executable, str(worker), str(out), "--threads", "1", "--arms", *arms],
        input="".join(json.dumps(request) + "\n" for request in requests),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    replies = [json.loads(line) for line in answer.stdout.splitlines()]
    for reply in replies:
        if "error" in reply:
            raise RuntimeError(f"{reply['arm']}: {reply['error']}")
        print(f"{reply['arm']:12} {tokenizer.decode(reply['ids'])!r}")
    if any(reply["ids"] != replies[0]["ids"] for reply in replies):
        raise RuntimeError("the engines do not agree on the greedy continuation")


def main() -> None:
    """Run the conversions that are still missing, then check all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="the folder to write to")
    arguments = parser.parse_args()
    steps = {
        "hf": lambda target: save_hf(arguments.gguf, target),
        "ct2-float32": lambda target: convert_ct2(arguments.out / "hf", target),
        "ort-float32": lambda target: convert_ort(arguments.out / "hf", target),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, step in steps.items():
        target = arguments.out / name
        if target.exists():
            print(f"{name}: kept as it is")
            continue
        # Made beside its place and moved: a run cut short leaves nothing half-made.
        part = arguments.out / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        step(part)
        part.rename(target)
        print(f"{name}: written")
    check(arguments.out)
    source = {"gguf": arguments.gguf.name, "sha256": sha256(arguments.gguf)}
    (arguments.out / "source.json").write_text(json.dumps(source, indent=1) + "\n")


if __name__ == "__main__":
    main()
