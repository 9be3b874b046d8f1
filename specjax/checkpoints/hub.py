"""Checkpoints by hub id, through ``huggingface_hub``'s own cache."""

from __future__ import annotations

import re
from pathlib import Path

from specjax.checkpoints.errors import CheckpointError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
# Copies of the weights in other layouts, which some repositories hold as well.
_UNWANTED = ["original/*", "onnx/*", "consolidated*", "*.onnx", "*.bin", "*.pth"]


def looks_like_hub_id(name: str) -> bool:
    """Whether this could be ``organisation/name``."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def snapshot(name: str) -> Path:
    """The local directory of a hub checkpoint, downloaded if it is not there.

    Raises ``CheckpointError`` saying what to do, if it cannot be had.
    """
    # Imported late: most runs need no hub.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"hub checkpoint {name!r} asks you to accept its terms; do that on its "
            "page and log in (hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no hub checkpoint {name!r}, or it is private; check the name, "
            "or log in (hf auth login)"
        ) from error
    except Exception as error:  # anything a network can do, through several libraries
        raise CheckpointError(
            f"{name!r} is no local path, and the hub cannot be reached "
            f"({type(error).__name__}); go online, download the checkpoint elsewhere "
            "and give its folder, or name a model of the zoo"
        ) from error
    return Path(folder)
