"""Write the tokenizer fixture of a model of the zoo: texts and llama.cpp's ids.

    python experiments/peers/make_zoo_tokenizer_fixture.py MODEL.gguf OUT.json

The texts are those of make_tokenizer_fixture.py and some that matter to SentencePiece.
transformers' tokenizer, which it makes out of the same file, is held against the ids;
where it differs is written down with them.
"""

import argparse
import datetime
import importlib.metadata
from pathlib import Path

from make_tokenizer_fixture import TEXTS, start_server, write_fixture
from prepare import sha256
from transformers import AutoTokenizer

MORE = [
    # runs longer than the longest piece of spaces, newlines, tabs (31 of each)
    " " * 31,
    "x" + " " * 33 + "x",
    " " * 70,
    "\n" * 70,
    "\t" * 40 + "x",
    # the mark that stands for a space, and names of bytes
    "\u2581a\u2581\u2581b",
    "<0x0A> is five characters and one more",
    # turns, markup, unused pieces
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<bos>a<eos> <unused5>[multimodal]",
    "<table><tr><td> 1</td></tr></table><h1>a</h1>",
    # characters without a piece, which become bytes
    "\u16a0\u16c7\u16bb \U00013000\U00013050 \U0001fae8 \U0001f9d1\u200d\U0001f9b0",
    "class A:\n    def f(self):\n\n        return {\n            'k': 1,\n        }\n",
]


def main() -> None:
    """Tokenise the texts by both, compare, and write llama.cpp's ids."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("out", type=Path, help="the fixture to write")
    arguments = parser.parse_args()
    # The server object must live for as long as it is asked.
    server, tokenize = start_server(arguments.gguf)
    records = [{"text": text, "ids": tokenize(text)} for text in [*TEXTS, *MORE]]
    del server
    other = AutoTokenizer.from_pretrained(
        arguments.gguf.parent, gguf_file=arguments.gguf.name
    )
    differing = [
        record["text"]
        for record in records
        if other(record["text"], add_special_tokens=False)["input_ids"] != record["ids"]
    ]
    version = importlib.metadata.version
    header = {
        "model": arguments.gguf.name,
        "gguf_sha256": sha256(arguments.gguf),
        "tokenizer": f"llama.cpp, as built into xllamacpp {version('xllamacpp')}",
        "settings": "add_special=false, parse_special=true",
        "command": "python experiments/peers/make_zoo_tokenizer_fixture.py "
        f"{arguments.gguf.name} OUT.json",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "compared_with": f"transformers {version('transformers')}'s tokenizer out of "
        f"the same file: {len(records) - len(differing)} of {len(records)} texts have "
        "the same ids",
        "transformers_differs": differing,
    }
    write_fixture(arguments.out, header, records)
    print(f"{len(records)} texts, transformers differs in {differing}")


if __name__ == "__main__":
    main()
