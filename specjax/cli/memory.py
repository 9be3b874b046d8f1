"""Options of how the target remembers, and of the invariant mode."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from tyro import conf

from specjax.checkpoints import Checkpoint
from specjax.cli import options as o
from specjax.cli.console import stderr
from specjax.cli.errors import UsageError
from specjax.models.invariant import NotInvariant, check_invariant, invariant
from specjax.models.memory import (
    STRATEGIES,
    CacheError,
    has_recurrence,
    with_codec,
    with_recurrence,
)
from specjax.models.mixers.codecs import CODECS
from specjax.models.pages import Paged, PoolError, admit

CACHES = ("auto", *CODECS)
CHECKED_TOKENS = 24
"""Of the text that the invariant mode is tried on."""


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """How the target keeps what it has read."""

    rollback: Annotated[str, conf.arg(metavar="|".join(STRATEGIES))] = "replay"
    """How accepted inputs reach the states of recurrent layers: the same function but
    for rounding (see docs/models.md; specjax inspect tells what each costs).
    ring-bfloat16 rounds what it records: it decodes other tokens than the others where
    a choice is close, and near-ties may fall otherwise with drafts than without."""
    cache_dtype: Annotated[str, conf.arg(metavar="|".join(CACHES))] = "auto"
    """What attention's keys and values are kept in: "auto" in the weights' dtype
    (float32 under int8 weights, and on CPU); int8 and fp8 in a byte a number, and a
    scale a token and head (see docs/models.md). They are rounded with and without
    drafts alike: other tokens than "auto" where a choice is close, and near-ties may
    fall otherwise with drafts than without, but under --invariant."""
    pages: o.OptionalCount = None
    """Keep attention's keys and values in a pool of so many pages."""
    page_size: int = 16
    """Tokens a page. With --cache-dtype int8 or fp8 kernels take 128 or a multiple on
    a TPU, and 32 or a multiple of 64 on a GPU; others run in plain JAX there."""
    invariant: bool = False
    """Compute every token alike whatever the window: the same bits with and without
    drafts, in bfloat16 too, and slower. Tried first on a short text, which
    may take longer than loading the model, and refused where it fails."""

    def check(self) -> None:
        """What can be said before anything is loaded."""
        o.one_of("--rollback", self.rollback, STRATEGIES)
        o.one_of("--cache-dtype", self.cache_dtype, CACHES)
        o.at_least("--page-size", self.page_size, 1)
        if self.pages is not None:
            o.at_least("--pages", self.pages, 1)
        elif self.page_size != type(self)().page_size:
            raise UsageError(
                f"--page-size {self.page_size} needs --pages, the size of the pool"
            )
        if self.invariant and self.rollback != "replay":
            raise UsageError(
                "--invariant advances recurrent layers row by row: leave out --rollback"
            )

    def admit(self, prompt: int) -> None:
        """Refuse a prompt of so many tokens if the pool cannot hold it."""
        if self.pages is None:
            return
        try:
            admit(Paged(self.pages, self.page_size), [prompt])
        except PoolError as error:
            raise UsageError(f"--pages {self.pages}: {error}") from error

    def applied(self, checkpoint: Checkpoint, k: int) -> Checkpoint:
        """The checkpoint with its decoder set up so, for windows of ``k`` drafts."""
        decoder = with_recurrence(checkpoint.decoder, STRATEGIES[self.rollback])
        if self.rollback != "replay" and not has_recurrence(decoder):
            raise UsageError(
                f"--rollback {self.rollback} does nothing with this model: it has no "
                "recurrent layer; leave it out"
            )
        if self.cache_dtype != "auto":
            try:
                decoder = with_codec(decoder, CODECS[self.cache_dtype])
            except CacheError as error:
                raise UsageError(
                    f"--cache-dtype {self.cache_dtype}: {error}; leave it out"
                ) from error
        if self.invariant:
            try:
                decoder = invariant(decoder)
                with stderr().status("trying the invariant mode on a short text"):
                    check_invariant(decoder, (1, k + 1), tokens=CHECKED_TOKENS)
            except NotInvariant as error:
                raise UsageError(f"--invariant: {error}") from error
        if self.pages is not None:
            decoder = decoder.replace(paged=Paged(self.pages, self.page_size))
        return dataclasses.replace(checkpoint, decoder=decoder)
