"""Text to ids and back, for both kinds of checkpoint."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from specjax.checkpoints.chat import ChatTemplate, Turn
from specjax.checkpoints.errors import CheckpointError
from specjax.prompts import Prompt


class Tokenizer:
    """A checkpoint's tokenizer, its special ids and its chat template.

    Attributes:
        source: the file it came from, for messages.
        bos_id: what ``encode`` puts first, or ``None``.
        eos_ids: ids that end a text; the checkpoint's generation settings come first.
        special_tokens: strings by role (``bos_token``, ...), for chat templates.
        template: the chat template's source, or ``None``.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        source: str,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        template: str | None = None,
    ) -> None:
        self.inner = inner
        self.source = source
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.special_tokens = dict(special_tokens or {})
        self.template = template
        for what, token in [("bos", bos_id), *(("eos", i) for i in self.eos_ids)]:
            if token is not None and inner.id_to_token(token) is None:
                raise CheckpointError(
                    f"{source} names {token} as {what} id, which is no id of its "
                    f"tokenizer ({self.vocab_size} ids)"
                )

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's may be larger, by padding."""
        return (
            max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )

    @functools.cached_property
    def tokens(self) -> tuple[str | None, ...]:
        """Every token's string as the vocabulary spells it; ``None`` for a gap."""
        strings: list[str | None] = [None] * self.vocab_size
        for string, index in self.inner.get_vocab(with_added_tokens=True).items():
            strings[index] = string
        return tuple(strings)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; bos comes first only if the checkpoint says so.

        Names of special tokens in the text become those tokens.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is no valid UTF-8: {error}") from error
        ids = self.inner.encode(text, add_special_tokens=False).ids
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of some ids; special tokens are left out unless asked for.

        Bytes that are no UTF-8 become U+FFFD. Raises ``ValueError`` for an id that
        is not in the vocabulary.
        """
        for index in ids:
            if not 0 <= index < self.vocab_size:
                raise ValueError(
                    f"id {index} is not in the vocabulary of {self.vocab_size} tokens"
                )
        if not self._byte_pieces:
            return self.inner.decode(list(ids), skip_special_tokens=not special)
        hidden = frozenset() if special else self._hidden
        shown = [index for index in ids if index not in hidden]
        return self.inner.decoder.decode(self._pieces(shown))

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """The strings of some ids, with characters for the bytes of byte pieces.

        The library's decoder would turn a run of bytes into U+FFFD from end to end if
        one byte of it is wrong, and so take back what a stream has shown.
        """
        pieces: list[str] = []
        for spelled, run in itertools.groupby(ids, self._byte_pieces.__contains__):
            if spelled:
                data = bytes(self._byte_pieces[index] for index in run)
                pieces.extend(data.decode("utf-8", "replace"))
            else:
                pieces.extend(self.inner.id_to_token(index) or "" for index in run)
        return pieces

    @functools.cached_property
    def _byte_pieces(self) -> dict[int, int]:
        """Byte values by id, of a vocabulary in which ``<0x0A>`` stands for a byte."""
        if not getattr(self.inner.model, "byte_fallback", False):
            return {}
        names = {f"<0x{value:02X}>": value for value in range(256)}
        ids = {self.inner.token_to_id(name): names[name] for name in names}
        return {index: value for index, value in ids.items() if index is not None}

    @functools.cached_property
    def _hidden(self) -> frozenset[int]:
        """Special tokens."""
        added = self.inner.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def chat(self, turns: Iterable[Turn]) -> list[int]:
        """The ids of a conversation, ready for the assistant's answer.

        A turn is a user's message, or a mapping with ``role`` and ``content``.
        Raises ``CheckpointError`` if the checkpoint has no template, or if the
        template refuses the turns.
        """
        return self.inner.encode(self.render(turns), add_special_tokens=False).ids

    def render(self, turns: Iterable[Turn]) -> str:
        """As ``chat``, as text."""
        if self.template is None:
            raise CheckpointError(
                f"{self.source} has no chat template, so turns cannot be put to this "
                "model; give raw text, or use an instruction-tuned checkpoint"
            )
        return self._chat_template.render(turns, self.special_tokens)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        assert self.template is not None
        return ChatTemplate(self.template, self.source)


class StreamDecoder:
    """Decodes ids as they come and shows whole characters only.

    The pieces together, ``flush`` included, are ``decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._decode = functools.partial(tokenizer.decode, special=special)
        # The text of a token may depend on its left neighbour (leading spaces, bytes
        # of one character), so the tokens shown last are decoded once more.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending tokens

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids; the text that is now complete, which may be empty."""
        return "".join(self._step(index) for index in ids)

    def flush(self) -> str:
        """The rest, at the end: a cut character shows as U+FFFD."""
        rest = self._new_text()[self._shown :]
        self._context, self._pending, self._shown = [], [], 0
        return rest

    def _step(self, index: int) -> str:
        self._pending.append(index)
        text = self._new_text()
        piece = text[self._shown : _complete(text)]
        if text and _complete(text) == len(text):
            self._context, self._pending, self._shown = self._pending, [], 0
        else:
            self._shown += len(piece)
        return piece

    def _new_text(self) -> str:
        if not self._pending:
            return ""
        seen = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(seen) :]


def _complete(text: str) -> int:
    """How much of a text stays as it is, whatever bytes follow.

    Up to three bytes of a character may have come, each shown as U+FFFD until the
    last one does.
    """
    unsure = len(text) - len(text.rstrip("\ufffd"))
    return len(text) - min(unsure, 3)


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt: text as it stands, turns through the chat template."""
    if prompt.text is not None:
        return tokenizer.encode(prompt.text)
    return tokenizer.chat(prompt.turns)
