"""Write the greedy fixture of a model of the zoo: what transformers decodes.

    python experiments/peers/make_zoo_fixture.py MODEL.gguf OUT.json --turns MARKUP

transformers reads the GGUF file itself, tokenizer included, so it shares nothing with
specjax but the file. One prompt of each bundled kind is decoded, and one that is longer
than Gemma's sliding windows. As in make_greedy_fixture.py, each continuation is decoded
with the cache and scored again without it, and the two must name the same tokens.
"""

import argparse
import datetime
from pathlib import Path

import torch
import transformers
from make_greedy_fixture import KINDS, read_prompts, record, write_fixture
from prepare import sha256
from transformers import AutoModelForCausalLM, AutoTokenizer

LONG = "long-01"
LONG_CHARACTERS = 4000
"""Of the bundled wiki prompts, one after the other: over 800 tokens."""


def texts() -> dict[str, dict]:
    """Return the first prompt of each kind by name, and the long one."""
    prompts = read_prompts()
    chosen = {p["id"]: p for p in prompts if p["id"] in {f"{k}-01" for k in KINDS}}
    wiki = [p["prompt"] for p in prompts if p["kind"] == "wiki"]
    chosen[LONG] = {"id": LONG, "prompt": "\n\n".join(wiki)[:LONG_CHARACTERS]}
    return chosen


def encode(tokenizer, prompt: dict, turns: str) -> list[int]:
    """Return a prompt's ids, turns marked as the file's template or Gemma does."""
    if "prompt" in prompt:
        return tokenizer(prompt["prompt"])["input_ids"]
    if turns == "file":
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn} for turn in prompt["turns"]],
            add_generation_prompt=True,
            tokenize=False,
        )
    else:
        marked = [f"<start_of_turn>user\n{t}<end_of_turn>\n" for t in prompt["turns"]]
        text = "<bos>" + "".join(marked) + "<start_of_turn>model\n"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def main() -> None:
    """Decode every prompt and write the fixture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="the fixture to write")
    parser.add_argument("--turns", choices=["file", "gemma"], default="file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--names", nargs="*", help="only these prompts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    source = {"gguf_file": arguments.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(arguments.gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.gguf.parent,
        **source,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    model.generation_config.eos_token_id = None
    entries, differences = {}, []
    for name, prompt in texts().items():
        if arguments.names and name not in arguments.names:
            continue
        ids = encode(tokenizer, prompt, arguments.turns)
        entries[name], difference = record(model, ids, arguments.tokens)
        differences.append(difference)
        smallest = min(entries[name]["margin"])
        print(
            f"{name}: {len(ids)} ids, margin {smallest:.4f}, passes differ by "
            f"{difference:.1e}: {tokenizer.decode(entries[name]['ids'])[:60]!r}",
            flush=True,
        )
    header = {
        "model": arguments.gguf.name,
        "gguf_sha256": sha256(arguments.gguf),
        "weights": "dequantised from the GGUF to float32 by transformers",
        "tokenizer": "transformers', out of the GGUF",
        "turns": arguments.turns,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "attention": "eager",
        "threads": arguments.threads,
        "command": "python experiments/peers/make_zoo_fixture.py "
        f"{arguments.gguf.name} OUT.json --turns {arguments.turns} "
        f"--threads {arguments.threads}"
        + (f" --names {' '.join(arguments.names)}" if arguments.names else ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "new_tokens": arguments.tokens,
        "long": f"{LONG}: the bundled wiki prompts with blank lines between them, their"
        f" first {LONG_CHARACTERS} characters",
        "eos": "ignored: decoding goes on past it",
        "margin": "gap between the two largest logits, from the cached run",
        "smallest_margin": min(min(entry["margin"]) for entry in entries.values()),
        "largest_logit_difference": float(f"{max(differences):.2g}"),
        "largest_logit_difference_of": "cached decoding and one pass over the whole "
        "sequence without a cache; both choose the same tokens everywhere",
    }
    write_fixture(arguments.out, header, entries)


if __name__ == "__main__":
    main()
