"""The block family replayed: context, block, slots and drafts of both rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.types import Acceptance, Context, Sampling, Verdict
from specjax.drafters.block import BlockChain, DFlash2, DSpark
from specjax.drafters.block.backbone import Backbone
from specjax.drafters.block.context import BlockAttention
from specjax.drafters.block.slots import SlotHead
from specjax.drafters.drawing import Pick
from specjax.models.committed import CommittedState
from specjax.models.mixers.base import Aids
from specjax.models.mixers.caches import held_positions
from specjax.models.stack import mixers_of, rope_of, rotary_tables

CAPACITY = 32
"""Of the text of both rounds."""


def replay(
    part: SlotHead,
    oracle: Mapping[str, np.ndarray],
    features: Callable[[str], np.ndarray],
) -> dict[str, np.ndarray]:
    """The oracle's arrays, by the functions that ``observe`` and ``propose`` call."""
    backbone, out = part.backbone, {}
    accepted = int(oracle["accepted"])
    text = [*oracle["prompt_ids"].tolist(), int(oracle["first_token"])]
    state = backbone.init(1, CAPACITY)
    contexts = []
    for number in (1, 2):
        rows = jnp.asarray(features(f"features{number}"))[None]
        state = _take_in(backbone, state, rows, text[-rows.shape[1] :])
        contexts.append(np.asarray(backbone.fuse(rows))[0])
        context = np.concatenate(contexts)
        out[f"ctx{number}"] = context[-len(oracle[f"ctx{number}"]) :]
        found = _round(part, state, text)
        out |= {name.format(number): array for name, array in found.items()}
        text += [*found["draft{}"][:accepted].tolist(), int(oracle["next_token"])]
    return out


def _take_in(
    backbone: Backbone, state: CommittedState, rows: jax.Array, behind: list[int]
) -> CommittedState:
    """Rows of features side by side, as a verdict on an accepted path."""
    count = rows.shape[1]
    columns = np.split(np.asarray(rows), len(backbone.taps), axis=-1)
    verdict = Verdict(
        logits=None,
        features={
            tap: jnp.asarray(x) for tap, x in zip(backbone.taps, columns, strict=True)
        },
        pending=None,
        bad=jnp.zeros((1, count), bool),
    )
    path = Acceptance(
        path=jnp.arange(count, dtype=jnp.int32)[None],
        tokens=jnp.asarray([behind], jnp.int32),
        num_tokens=jnp.asarray([count], jnp.int32),
    )
    return _taken(backbone, state, verdict, path)


@jax.jit
def _taken(
    backbone: Backbone, state: CommittedState, verdict: Verdict, path: Acceptance
) -> CommittedState:
    return backbone.take_in(state, verdict, path)


@jax.jit
def _filled(
    backbone: Backbone, state: CommittedState, anchor: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A block's rows, and their logits."""
    hidden = backbone.block(anchor, state)
    return hidden, backbone.logits(hidden)


@jax.jit
def _drafted(drafter: BlockChain, state: CommittedState, context: Context) -> jax.Array:
    return drafter.propose(state, context)[0].tokens


def _round(
    part: SlotHead, state: CommittedState, text: list[int]
) -> dict[str, np.ndarray]:
    """What one round says, array by array."""
    backbone = part.backbone
    anchor = jnp.asarray(text[-1:], jnp.int32)
    hidden, logits = _filled(backbone, state, anchor)
    drafter = BlockChain(part, backbone.slots, pick=Pick.BEST)
    context = _context(text, backbone.slots)
    draft = np.asarray(_drafted(drafter, state, context))[0]
    masks = [backbone.mask_token] * (backbone.block_size - 1)
    out: dict[str, Any] = {
        "block": np.asarray([text[-1], *masks], np.int32),
        "hidden": hidden[0],
        "logits": logits[0],
        "draft": draft,
        "sliding_mask": _sliding_mask(backbone, state),
    }
    rows = backbone.slot_rows(hidden)
    if isinstance(part, DSpark):
        out |= {"base_logits": logits[0], **_judged(part, rows, text[-1], draft)}
    if isinstance(part, DFlash2):
        out |= _scored(part, rows, text[-1], draft)
    return {
        "block{}_in" if name == "block" else name + "{}": np.asarray(x)
        for name, x in out.items()
        if x is not None
    }


def _context(text: list[int], slots: int) -> Context:
    one = jnp.ones((1,), jnp.int32)
    return Context(
        tokens=jnp.asarray([text + [0] * (CAPACITY - len(text))], jnp.int32),
        lengths=len(text) * one,
        room=(slots + 1) * one,
        done=one > 1,
        seeds=one.astype(jnp.uint32),
        sampling=Sampling(),
        counts=None,
    )


def _judged(
    part: DSpark, rows: jax.Array, anchor: int, draft: np.ndarray
) -> dict[str, Any]:
    """Corrected logits and confidences of the slots behind the drafts' own tokens."""
    reading, memory = part.read(rows), part.start(1)
    logits, right = [], []
    for step, token in enumerate([anchor, *draft[:-1].tolist()]):
        previous = jnp.asarray([token], jnp.int32)
        slot, memory = part.slot(reading, step, previous, memory)
        logits.append(slot.logits[0])
        right.append(slot.right)
    out = {"logits": jnp.stack(logits)}
    if part.confidence is not None:
        out["confidence"] = jnp.concatenate(right)
        out["confidence_logits"] = jax.scipy.special.logit(out["confidence"])
    return out


def _scored(
    part: DFlash2, rows: jax.Array, anchor: int, draft: np.ndarray
) -> dict[str, Any]:
    """Every slot's candidates, and their scores behind the drafts' own tokens."""
    reading, scores = part.read(rows), []
    for step, token in enumerate([anchor, *draft[:-1].tolist()]):
        previous = jnp.asarray([token], jnp.int32)
        scores.append(part.scored(reading, step, previous)[0][0])
    return {"candidates": reading.tokens[0], "scores": jnp.stack(scores)}


def _sliding_mask(backbone: Backbone, state: CommittedState) -> np.ndarray | None:
    """``[S, context + S]``: what the rows of a block see in the first sliding layer,
    found out by asking which values their outputs depend on."""
    sliding = [
        (mixer, own)
        for mixer, own in zip(mixers_of(backbone.blocks), state.blocks, strict=True)
        if isinstance(mixer, BlockAttention) and mixer.config.reach is not None
    ]
    if not sliding:
        return None
    (mixer, own), size = sliding[0], backbone.block_size
    window = backbone.window(jnp.zeros((1,), jnp.int32), state.lengths)
    tables = rotary_tables([mixer], window.positions, jnp.dtype(jnp.float32))
    aids = Aids(rotary=tables.get(rope_of(mixer)))
    rows = jax.random.normal(jax.random.key(0), (1, size, backbone.ends.hidden_size))

    def seen(x: jax.Array, v: jax.Array) -> jax.Array:
        held = own.replace(v=v)
        return mixer.mix(x, window, held, state.lengths, aids)[0][0].sum(axis=-1)

    by_row, by_slot = jax.jit(jax.jacrev(seen, argnums=(0, 1)))(rows, own.v)
    length = int(state.lengths[0])
    mask = np.zeros((size, length + size), bool)
    mask[:, length:] = np.asarray(by_row != 0).any(axis=(1, 3))
    slots = np.asarray(held_positions(state.lengths, own.v.shape[2]))[0]
    mask[:, slots] = np.asarray(by_slot != 0).any(axis=(1, 2, 4))
    return mask
