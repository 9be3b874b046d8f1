"""Write the tokenizer fixture: texts and the ids that llama.cpp gives them.

llama.cpp reads tokens and merges from the GGUF and splits text by its own code, so it
shares nothing with the `tokenizers` library that specjax and transformers use. It runs
here as xllamacpp's server, on the loopback address.

    python experiments/peers/make_tokenizer_fixture.py MODEL.gguf MODELS OUT.json

MODELS is what prepare.py wrote: its tokenizer.json is held against the same ids.
"""

import argparse
import datetime
import importlib.metadata
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import xllamacpp
from prepare import sha256
from tokenizers import Tokenizer

TEXTS = [
    # nothing, and next to nothing
    "",
    " ",
    "a",
    "\n",
    # prose
    "The quick brown fox jumps over the lazy dog.",
    " leading space and trailing space ",
    "Don't you think they're what we've said? I'll say it's HE'S, I'D, 'tis.",
    "WE'RE SHOUTING, WeIrD CaPs, camelCaseWord, snake_case_word, kebab-case-word",
    "e-mail: someone@example.org; see https://example.org/a?b=c&d=%20#top",
    "An em dash \u2014 and \u201ccurly quotes\u201d, dots\u2026 and \u2018so\u2019 on.",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "!!!???...,,,;;;:::---___***###@@@$$$%%%^^^&&&((()))",
    # digits, which stand alone each
    "0",
    "7 88 999 1000",
    "In 2024 it was 1234567.",
    "3.14159265358979323846264338327950288419716939937510",
    "12345678901234567890123456789012345678901234567890",
    "1,234,567.89 -42 +7 1e-9 6.02E23 0x1F 0b1010 10% #42 $5.00",
    "v1.2.3-rc4 ISO8601 2026-11-30T01:23:45Z h264 mp3 4k 1st 2nd 3rd",
    "abc123def456 123abc 1a2b3c",
    "\u0661\u0662\u0663 \u0967\u0968\u0969 \u2460\u2461 \u00bd \u00b2\u00b3 \u2167",
    "\uff11\uff12\uff13\uff21\uff22\uff43",
    # runs of white space
    "  ",
    "          ",
    "a  b   c    d     e",
    "\t",
    "\t\t\tthree tabs",
    " \t \t mixed \t\t  run",
    "\n\n\n\n",
    "line one\nline two\n\nline four\n",
    "windows\r\nlines\r\n\r\n",
    "trailing spaces   \n   leading spaces",
    "   \n\t\n  \n",
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space, line\u2028separator",
    "zero\u200bwidth\ufeffmarks",
    # code
    "def add(a: int, b: int = 10) -> int:\n    return a + b\n",
    '\tif (x != 0 && y <= 0xFF) {\n\t\tprintf("%d\\n", x++);\n\t}\n',
    "for i in range(100):\n    print(f'{i:>5} {i**2:08.3f}')  # squares\n",
    '{"name": "value", "list": [1, 2.5, -3e4, null, true], "nested": {"a": {}}}',
    '<div class="a">\n  <p>Text &amp; more</p>\n</div>',
    "SELECT * FROM t WHERE id = 42 AND name LIKE '%x%';",
    "#!/bin/sh\nset -eu\nls -la | grep '\\.py$' > out.txt 2>&1\n",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i^2 = \\alpha",
    "| a | b |\n|---|---|\n| 1 | 22 |\n| 333 | 4444 |\n",
    # other scripts
    "Na\u00efve caf\u00e9 d\u00e9j\u00e0 vu \u00fcber Stra\u00dfe \u0130d\u017a",
    "Cafe\u0301 with a combining accent",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u8fd9\u662f2024\u5e74\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u3001\u30ab\u30bf\u30ab\u30ca\u3068\u6f22\u5b57123",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 42",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 2024",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0415\u0449\u0451 5",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    # emoji: one code point, skin tone, joined by ZWJ, a flag, a keycap
    "\U0001f642 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea 3\ufe0f\u20e3\U0001f680\U0001f680\U0001f680!",
    "mixed: x=\u03c0\u00b7r\u00b2 \u2248 3\u00d710\u2078 \u4e2da\u0639123\U0001f600\n",
    # names of special tokens, whole and broken
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> <|im_end|><|im_end|>",
    " <|im_start|> \n<|im_end|>7",
    "<|im_start| > <|im_star|> im_start|> <|IM_END|>",
    "<repo_name>x<file_sep>y.py\n<empty_output>",
    # bytes at the edge: NUL, DEL, noncharacters; the last have no token and vanish
    "a\x00b\x7fc",
    "a\U00040000b \U000e0001",
    "a\x04b\x06\x16c",
]


def start_server(gguf: Path) -> tuple[xllamacpp.Server, Callable[[str], list[int]]]:
    """Start llama.cpp on the model; return it and its way to tokenise a text."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(gguf)
    parameters.n_ctx = 64  # nothing is generated
    parameters.warmup = False
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)

    def tokenize(text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": True}
        request = urllib.request.Request(
            server.listening_address + "/tokenize",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["tokens"]

    return server, tokenize


def write_fixture(out: Path, header: dict, records: list[dict]) -> None:
    """Write the header, then one text a line."""
    lines = ",\n".join(json.dumps(record) for record in records)
    head = json.dumps(header, indent=1)
    out.write_text(f'{{"header": {head},\n"texts": [\n{lines}\n]}}\n')


def main() -> None:
    """Tokenise the texts twice, compare, and write llama.cpp's ids."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("models", type=Path, help="the folder that prepare.py wrote")
    parser.add_argument("out", type=Path, help="the fixture to write")
    arguments = parser.parse_args()
    # The server object must live for as long as it is asked.
    server, tokenize = start_server(arguments.gguf)
    records = [{"text": text, "ids": tokenize(text)} for text in TEXTS]
    del server
    library = Tokenizer.from_file(str(arguments.models / "hf" / "tokenizer.json"))
    differing = [
        record["text"]
        for record in records
        if library.encode(record["text"], add_special_tokens=False).ids != record["ids"]
    ]
    for text in differing:
        print("differs from tokenizer.json:", repr(text))
    version = importlib.metadata.version
    header = {
        "model": arguments.gguf.name,
        "gguf_sha256": sha256(arguments.gguf),
        "tokenizer": f"llama.cpp, as built into xllamacpp {version('xllamacpp')}",
        "settings": "add_special=false, parse_special=true",
        "command": "python experiments/peers/make_tokenizer_fixture.py "
        "MODEL.gguf MODELS OUT.json",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "compared_with": f"tokenizer.json of prepare.py, tokenizers "
        f"{version('tokenizers')}: {len(records) - len(differing)} of {len(records)} "
        "texts have the same ids",
        "note": "21 byte values (0x04, 0x06, 0x13, 0x14, 0x16, 0x1d, 0xc0, 0xc1, 0xf1, "
        "0xf2, 0xf5-0xff) have no token in this vocabulary and are dropped",
    }
    write_fixture(arguments.out, header, records)
    print(f"{len(records)} texts, {len(differing)} differ from tokenizer.json")


if __name__ == "__main__":
    main()
