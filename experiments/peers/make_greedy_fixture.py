"""Write the greedy fixture: what transformers decodes for the bundled prompts.

    python experiments/peers/make_greedy_fixture.py MODEL.gguf MODELS OUT.json

MODELS is what prepare.py wrote from MODEL.gguf. Everything is float32 with eager
attention: plain matrix products, in the order that the model's definition has them.
Each continuation is decoded with the cache and then scored again in one pass without
it; the two must name the same tokens.
"""

import argparse
import datetime
import json
from pathlib import Path

import torch
import transformers
from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment
from prepare import metadata, sha256
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

KINDS = ("code", "list", "wiki", "chat", "edit")
PROMPTS = Path(__file__).parents[2] / "specjax" / "prompts" / "data"


def read_prompts() -> list[dict]:
    """Read the bundled prompts."""
    return [
        json.loads(line)
        for kind in KINDS
        for line in (PROMPTS / f"{kind}.jsonl").read_bytes().split(b"\n")
        if line.strip()
    ]


class Encoder:
    """Turns prompts into ids, templates through jinja2 and transformers alike."""

    def __init__(self, gguf: Path, models: Path):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        template = metadata(GGUFReader(gguf), "tokenizer.chat_template")
        self.template = environment.from_string(template)
        self.tokenizer = AutoTokenizer.from_pretrained(models / "hf")

    def text(self, prompt: dict) -> str:
        """Return the text that is tokenised: raw as it stands, turns in the template.

        Raises:
            ValueError: transformers makes another text of the turns.
        """
        if "prompt" in prompt:
            return prompt["prompt"]
        messages = [{"role": "user", "content": turn} for turn in prompt["turns"]]
        text = self.template.render(messages=messages, add_generation_prompt=True)
        other = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        if text != other:
            raise ValueError(f"{prompt['id']}: jinja2 and transformers disagree")
        return text

    def ids(self, prompt: dict) -> list[int]:
        """Return the prompt's ids, without a token that the text does not hold."""
        return self.tokenizer(self.text(prompt), add_special_tokens=False)["input_ids"]


def decode(model, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Decode greedily with the cache, through EOS; return ids and their logits."""
    start = torch.tensor([prompt])
    output = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=count,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def teacher_forced(model, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Return the logits that each of `ids` was chosen from, in one pass, no cache."""
    sequence = torch.tensor([prompt + ids])
    return model(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1]


def record(model, prompt: list[int], count: int) -> tuple[dict, float]:
    """Return one prompt's entry and how far the two ways of scoring differ.

    Raises:
        ValueError: scored in one pass, another token would have been chosen.
    """
    ids, cached = decode(model, prompt, count)
    full = teacher_forced(model, prompt, ids)
    if len(ids) != count or full.argmax(-1).tolist() != ids:
        raise ValueError(f"{prompt=}: the cached run and the full pass do not agree")
    top = cached.topk(2).values
    margin = [round(gap, 4) for gap in (top[:, 0] - top[:, 1]).tolist()]
    entry = {"prompt_ids": prompt, "ids": ids, "margin": margin}
    return entry, (full - cached).abs().max().item()


def load(models: Path):
    """Load the prepared model so that nothing ends a continuation early."""
    model = AutoModelForCausalLM.from_pretrained(
        models / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def write_fixture(out: Path, header: dict, entries: dict[str, dict]) -> None:
    """Write the header, then one prompt a line."""
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}"
        for name, entry in entries.items()
    )
    head = json.dumps(header, indent=1)
    out.write_text(f'{{"header": {head},\n"prompts": {{\n{lines}\n}}}}\n')


def main() -> None:
    """Decode every bundled prompt and write the fixture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("models", type=Path, help="the folder that prepare.py wrote")
    parser.add_argument("out", type=Path, help="the fixture to write")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    arguments = parser.parse_args()
    digest = sha256(arguments.gguf)
    source = json.loads((arguments.models / "source.json").read_text())
    if source["sha256"] != digest:
        raise ValueError("MODELS was prepared from another GGUF file")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    encoder, model = Encoder(arguments.gguf, arguments.models), load(arguments.models)
    entries, differences = {}, []
    for prompt in read_prompts():
        name = prompt["id"]
        entries[name], difference = record(model, encoder.ids(prompt), arguments.tokens)
        differences.append(difference)
        smallest = min(entries[name]["margin"])
        print(f"{name}: margin {smallest:.4f}, passes differ by {difference:.1e}")
    header = {
        "model": arguments.gguf.name,
        "gguf_sha256": digest,
        "weights": "dequantised from the GGUF to float32",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "attention": "eager",
        "threads": arguments.threads,
        "command": "python experiments/peers/make_greedy_fixture.py "
        f"MODEL.gguf MODELS OUT.json --threads {arguments.threads}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "new_tokens": arguments.tokens,
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
