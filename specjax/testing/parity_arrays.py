"""The file of reference outputs beside a checkpoint: ``oracle.npz``.

Prompts and what another implementation says of them. Any array but one of the two
prompts may be left out; ``ARRAYS`` lists them, with the letters

``B`` prompts of ``S`` tokens, ``G`` tokens decoded greedily after each of them, ``R``
long prompts of ``Q`` tokens, ``V`` the vocabulary, ``L`` blocks, ``D`` the hidden size,
and of an MTP head ``M`` prompts of ``S-1`` pairs, ``F`` first ones and ``K`` drafts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np

from specjax.models.config import DecoderConfig

FILE = "oracle.npz"

ARRAYS: dict[str, str] = {
    "input_ids": "B S",
    "logits": "B S V",
    "hidden_states": "L+1 S D",
    "greedy_ids": "B G",
    "greedy_logits": "B G V",
    "long_input_ids": "R Q",
    "long_logits_last8": "R last V",
    "long_argmax": "R Q",
    "mtp_hidden": "M S-1 D",
    "mtp_logits": "M S-1 V",
    "mtp_logits_vllm_pos0mask": "M F V",
    "mtp_draft_ids": "B K",
    "mtp_draft_logits": "B K V",
}
"""Known arrays and their axes. ``hidden_states`` are prompt 0's: the embedding output,
what follows each block, and last what follows the final norm, in place of the last
block's own output. ``greedy_logits[:, j]`` are what ``greedy_ids[:, j]`` is the largest
of. ``long_logits_last8`` are those of a long prompt's last tokens, eight or any number
of them, and ``long_argmax`` is the largest of each.

``mtp_hidden`` and ``mtp_logits`` are what the checkpoint's MTP head says of the first
prompts' pairs, a hidden state and the token that follows it. ``mtp_draft_ids`` are
drafts behind ``greedy_ids[:, 0]``, each from the head's output for the one before it,
and ``mtp_draft_logits`` what each is the largest of. ``mtp_logits_vllm_pos0mask`` are
those of the first pairs where the very first has no embedding."""

MASKED = "mtp_logits_vllm_pos0mask"
MTP_OUTPUTS = tuple(name for name in ARRAYS if name.startswith("mtp_"))
"""The known arrays that a checkpoint's MTP head is compared with."""

OUTPUTS = tuple(
    name
    for name in ARRAYS
    if not name.endswith("input_ids") and name not in MTP_OUTPUTS
)
"""The known arrays that the decoder is compared with."""

_IDS = ("input_ids", "greedy_ids", "long_input_ids", "long_argmax", "mtp_draft_ids")

_NEEDS = {
    "logits": "input_ids",
    "hidden_states": "input_ids",
    "greedy_ids": "input_ids",
    "greedy_logits": "greedy_ids",
    "long_logits_last8": "long_input_ids",
    "long_argmax": "long_input_ids",
    "mtp_hidden": "input_ids",
    "mtp_logits": "input_ids",
    "mtp_logits_vllm_pos0mask": "input_ids",
    "mtp_draft_ids": "greedy_ids",
    "mtp_draft_logits": "mtp_draft_ids",
}

Kind = Literal["known", "later", "unknown"]


class OracleError(ValueError):
    """An ``oracle.npz`` that says nothing, or contradicts itself or the checkpoint."""


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The known arrays of one file, checked, and the names of the others."""

    arrays: dict[str, np.ndarray]
    others: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    @property
    def decoded(self) -> int:
        """``G``; 0 if nothing was decoded."""
        return self["greedy_ids"].shape[1] if "greedy_ids" in self else 0

    @property
    def prompts(self) -> list[list[int]]:
        """All prompts, the long ones last."""
        names = [n for n in ("input_ids", "long_input_ids") if n in self]
        return [row for name in names for row in self[name].tolist()]


def read_oracle(folder: Path, config: DecoderConfig) -> Oracle:
    """The arrays beside a checkpoint of this configuration.

    Raises ``OracleError``, naming the file and the array.
    """
    file = folder / FILE
    arrays = _load(file)
    known = {name: arrays[name] for name in ARRAYS if name in arrays}
    if not set(known) & set(OUTPUTS):
        found = f"it holds {', '.join(sorted(arrays)[:8])}" if arrays else "it is empty"
        raise OracleError(
            f"{file} has nothing to compare ({found}): one of {', '.join(OUTPUTS)} is "
            "needed; see `specjax parity --help`"
        )
    for name, needed in _NEEDS.items():
        if name in known and needed not in known:
            raise OracleError(f"{file} has {name!r}, but no {needed!r} to make it from")
    _check_axes(file, known, config)
    for name, array in known.items():
        known[name] = _checked(file, name, array, config.vocab_size)
    return Oracle(known, tuple(sorted(set(arrays) - set(known))))


def _load(file: Path) -> dict[str, np.ndarray]:
    if not file.exists():
        raise OracleError(
            f"{file.parent} has no {FILE}, the reference outputs to compare with; see "
            "`specjax parity --help`"
        )
    try:
        with file.open("rb") as stream, np.load(stream) as stored:
            return dict(stored)
    except Exception as error:  # zip files can be broken in many ways
        raise OracleError(f"{file} cannot be read: {error}") from error


def _check_axes(
    file: Path, known: dict[str, np.ndarray], config: DecoderConfig
) -> None:
    """Every letter has one size, in all arrays and in the configuration."""
    sizes: dict[str, tuple[int, str]] = {
        "V": (config.vocab_size, "the configuration"),
        "D": (config.hidden_size, "the configuration"),
        "L+1": (len(config.blocks) + 1, "the configuration, with a block more"),
    }
    if "input_ids" in known and known["input_ids"].ndim == 2:
        sizes["S-1"] = (known["input_ids"].shape[1] - 1, "'input_ids', less one")
    for name, array in known.items():
        axes = ARRAYS[name].split()
        if array.ndim != len(axes) or 0 in array.shape:
            raise OracleError(
                f"{file}: {name!r} has shape {list(array.shape)}, it must be "
                f"[{', '.join(axes)}]"
            )
        for axis, size in zip(axes, array.shape, strict=True):
            wanted, whose = sizes.setdefault(axis, (size, repr(name)))
            if size != wanted:
                raise OracleError(
                    f"{file}: {name!r} has shape {list(array.shape)}, of which "
                    f"{axis} = {size}; {whose} says {wanted}"
                )
    for first, most in (("M", "B"), ("F", "S-1")):
        if first in sizes and sizes[first][0] > sizes[most][0]:
            (size, whose), limit = sizes[first], sizes[most][0]
            raise OracleError(f"{file}: {whose} has {first} = {size}, of {limit}")
    if "last" in sizes and sizes["last"][0] > sizes["Q"][0]:
        raise OracleError(
            f"{file}: 'long_logits_last8' has {sizes['last'][0]} tokens, the long "
            f"prompts {sizes['Q'][0]}"
        )


def _checked(file: Path, name: str, array: np.ndarray, vocab: int) -> np.ndarray:
    """Integers inside the vocabulary, or finite floats."""
    if name not in _IDS:
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise OracleError(
                f"{file}: {name!r} must hold finite floats, it holds {array.dtype}"
                f"{' that are not' if array.dtype.kind == 'f' else ''}"
            )
        return array
    if array.dtype.kind not in "iu":
        raise OracleError(f"{file}: {name!r} must hold integers, not {array.dtype}")
    outside = array[(array < 0) | (array >= vocab)]
    if outside.size:
        raise OracleError(
            f"{file}: {name!r} holds the id {outside[0]}, outside the vocabulary of "
            f"{vocab}"
        )
    return array.astype(np.int32)
