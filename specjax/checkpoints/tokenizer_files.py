"""Making a ``Tokenizer``: from a Hugging Face directory, and the files of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import id_list, read_json, read_optional_json
from specjax.checkpoints.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

# Tokenizers that transformers runs by other means; without tokenizer.json these files
# are no use here, and saying "no tokenizer" of such a checkpoint would be wrong.
_OTHER_FILES = ("tokenizer.model", "vocab.json", "tiktoken.model", "vocab.txt")


def has_tokenizer(folder: Path) -> bool:
    """Whether the directory holds a ``tokenizer.json``."""
    return (folder / TOKENIZER).exists()


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """The directory's tokenizer, or ``None`` if it has no file of one.

    Raises ``CheckpointError`` if it cannot be read, or is of another kind.
    """
    file = folder / TOKENIZER
    if not file.exists():
        other = [name for name in _OTHER_FILES if (folder / name).exists()]
        if other:
            raise CheckpointError(
                f"{folder} has a tokenizer in {other[0]} but no {TOKENIZER}, the only "
                "kind that is implemented; save it as a fast tokenizer with "
                "transformers, or load with tokenizer=False"
            )
        return None
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{file} cannot be read by the tokenizers library ({error}); download it "
            "again, or update tokenizers"
        ) from error
    inner.no_padding()
    inner.no_truncation()
    settings = read_optional_json(folder / TOKENIZER_CONFIG)
    special = special_strings(settings)
    return Tokenizer(
        inner,
        source=str(folder),
        bos_id=_leading_bos(inner, settings, special, folder),
        eos_ids=folder_eos_ids(folder) or _ids(inner, special.get("eos_token")),
        special_tokens=special,
        template=template_from_folder(folder, settings),
    )


def folder_eos_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: of ``generation_config.json``, else of ``config.json``."""
    for name in (GENERATION_CONFIG, "config.json"):
        raw = read_optional_json(folder / name)
        for part in (raw, raw.get("text_config")):
            if not isinstance(part, dict):
                continue
            ids = id_list(part.get("eos_token_id"), f"{folder / name}, eos_token_id")
            if ids:
                return ids
    return ()


def template_from_folder(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: its own file comes before ``tokenizer_config.json``."""
    file = folder / CHAT_TEMPLATE
    if file.exists():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    value = settings.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    return _default_template(value, folder)


def _default_template(value: Any, folder: Path) -> str:
    """The one named "default" of a list of named templates."""
    where = folder / TOKENIZER_CONFIG
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: chat_template must be a string or a list")
    try:
        named = {item["name"]: item["template"] for item in value}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{where}: chat_template must list objects with name and template"
        ) from error
    if not isinstance(named.get("default"), str):
        raise CheckpointError(
            f"{where}: none of the chat templates {list(named)} is named 'default'"
        )
    return named["default"]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that ``tokenizer_from_folder`` reads."""
    tokenizer.inner.save(str(folder / TOKENIZER))
    settings: dict[str, Any] = dict(tokenizer.special_tokens)
    settings["add_bos_token"] = tokenizer.bos_id is not None
    if tokenizer.template is not None:
        settings["chat_template"] = tokenizer.template
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings), "utf-8")
    generation = {"eos_token_id": list(tokenizer.eos_ids)}
    (folder / GENERATION_CONFIG).write_text(json.dumps(generation), "utf-8")


def special_strings(settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role; a token stands as a string or as an object."""
    found = {}
    for role in _ROLES:
        value = settings.get(role)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[role] = value
    return found


def _ids(inner: tokenizers.Tokenizer, token: str | None) -> tuple[int, ...]:
    index = None if token is None else inner.token_to_id(token)
    return () if index is None else (index,)


def _leading_bos(
    inner: tokenizers.Tokenizer,
    settings: dict[str, Any],
    special: dict[str, str],
    folder: Path,
) -> int | None:
    """The bos id if texts begin with it.

    ``add_bos_token`` decides; where it is absent, what the post-processor does with
    an empty text.
    """
    bos = next(iter(_ids(inner, special.get("bos_token"))), None)
    wanted = settings.get("add_bos_token")
    if wanted is None:
        added = inner.encode("", add_special_tokens=True).ids
        # A tokenizer that closes texts as well (with eos) is still one that opens them.
        return bos if bos is not None and added[:1] == [bos] else None
    if wanted and bos is None:
        raise CheckpointError(
            f"{folder / TOKENIZER_CONFIG} says add_bos_token, but its bos_token "
            f"{special.get('bos_token')!r} is not in the vocabulary"
        )
    return bos if wanted else None


def read_config(folder: Path) -> dict[str, Any]:
    """The directory's ``config.json``; ``CheckpointError`` if there is none."""
    file = folder / "config.json"
    if not file.exists():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        state = "is empty" if not any(folder.iterdir()) else "has no config.json"
        raise CheckpointError(
            f"{folder} {state}; name a folder that holds config.json and "
            "model.safetensors, or a .gguf file itself"
            + (f" (such as {folder / ggufs[0]})" if ggufs else "")
        )
    return read_json(file)
