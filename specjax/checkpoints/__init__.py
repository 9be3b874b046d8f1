"""Reading and writing weights and tokenizers."""

from __future__ import annotations

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.files import Progress
from specjax.checkpoints.inspect import Description, describe
from specjax.checkpoints.load import Checkpoint, load
from specjax.checkpoints.progress import progress_bar
from specjax.checkpoints.tokenizer import StreamDecoder, Tokenizer, prompt_ids

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Description",
    "Progress",
    "StreamDecoder",
    "Tokenizer",
    "describe",
    "load",
    "progress_bar",
    "prompt_ids",
]
