"""A tiny llama with a tokenizer, and the command line run in this process."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from specjax.cli import main

ORACLE = Path(__file__).resolve().parent.parent / "data/oracles/llama"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def write_tokenizer(folder: Path, *, reverse: bool = False) -> None:
    """Byte level, one id a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A folder with a random llama of 256 ids: one layer of four, to compile fast."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    tensors = load_file(ORACLE / "model.safetensors")
    kept = {
        n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n
    }
    save_file(kept, folder / "model.safetensors")
    config = json.loads((ORACLE / "config.json").read_text())
    # the bundled prompts have up to some thousand bytes
    config |= {"max_position_embeddings": 8192, "eos_token_id": 255}
    config |= {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def other_tokenizer(model, tmp_path_factory) -> Path:
    """The same weights, with ids that mean other bytes."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(model, folder)
    write_tokenizer(folder, reverse=True)
    return folder


class Result:
    """What a command did."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> dict:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def run(capsys, monkeypatch):
    """``run("generate", "--prompt", "x")``."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run
