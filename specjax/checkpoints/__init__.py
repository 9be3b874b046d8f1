"""Reading and writing weights and tokenizers."""

from __future__ import annotations

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import Progress
from specjax.checkpoints.load import Checkpoint, load
from specjax.checkpoints.tokenizer import StreamDecoder, Tokenizer, prompt_ids

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Progress",
    "StreamDecoder",
    "Tokenizer",
    "load",
    "prompt_ids",
]
