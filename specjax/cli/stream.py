"""Text as it comes: whole characters, drafts in colour, no half stop string."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.table import Table

from specjax.checkpoints import StreamDecoder, Tokenizer
from specjax.decoding.generate import Completion

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def paint(text: str, drafted: bool, colour: bool) -> str:
    """Green on a terminal, if it came from a draft."""
    return f"{GREEN}{text}{RESET}" if drafted and colour else text


class IdStream:
    """The ids of a growing ``Completion``, for models without a tokenizer."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._taken = 0

    def push(self, completion: Completion) -> str:
        """The row so far; returns the new ids, a space before each but the first."""
        start, self._taken = self._taken, len(completion.ids)
        flags = completion.from_draft[start:]
        return "".join(
            paint(f"{' ' if at else ''}{index}", drafted, self._colour)
            for at, (index, drafted) in enumerate(
                zip(completion.ids[start:], flags, strict=True), start=start
            )
        )

    def finish(self, completion: Completion) -> str:
        """The row at its end; returns the rest."""
        return self.push(completion)


class TextStream:
    """Turns a growing ``Completion`` into the pieces to be written.

    What may still become a stop string is held back. All pieces together are the
    completion's text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, colour: bool
    ) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._vocab_size = tokenizer.vocab_size
        self._colour = colour
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._taken = 0  # ids that the decoder has seen
        self._written = 0  # characters
        self._waiting: list[tuple[str, bool]] = []  # characters, from a draft or not

    def push(self, completion: Completion) -> str:
        """The row so far; returns what can be written now."""
        self._take(completion)
        # the text ends before a stop string that has been found
        left = len(completion.text or "") - self._written
        return self._release(min(len(self._waiting) - self._hold, left))

    def finish(self, completion: Completion) -> str:
        """The row at its end; returns the rest."""
        self._take(completion)
        self._waiting += [(c, False) for c in self._decoder.flush()]
        return self._release(len(completion.text or "") - self._written)

    def _take(self, completion: Completion) -> None:
        new = completion.ids[self._taken :]
        flags = completion.from_draft[self._taken :]
        for index, drafted in zip(new, flags, strict=True):
            known = [index] if index < self._vocab_size else []
            piece = self._decoder.push(known)
            self._waiting += [(character, drafted) for character in piece]
        self._taken = len(completion.ids)

    def _release(self, count: int) -> str:
        count = max(0, min(count, len(self._waiting)))
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        self._written += count
        runs = itertools.groupby(ready, key=lambda pair: pair[1])
        return "".join(
            paint("".join(c for c, _ in run), drafted, self._colour)
            for drafted, run in runs
        )


def logprob_table(completion: Completion, tokenizer: Tokenizer | None) -> Table:
    """Each token, its log-probability, and the alternatives with theirs.

    A token that is no whole text, or of no known text, is shown by its id: ``#123``.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("token")
    table.add_column("log p", justify="right")
    table.add_column("most probable", overflow="fold")

    def name(index: int) -> str:
        known = tokenizer is not None and index < tokenizer.vocab_size
        text = tokenizer.decode([index], special=True) if tokenizer and known else ""
        # a part of a character has no text of its own
        return f"#{index}" if not text or "\ufffd" in text else repr(text)

    for index, entry in zip(completion.ids, completion.logprobs or (), strict=True):
        others = "  ".join(f"{name(i)} {value:.3f}" for i, value in entry.top)
        table.add_row(name(index), f"{entry.logprob:.3f}", others)
    return table
