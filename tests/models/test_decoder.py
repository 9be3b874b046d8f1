"""The decoder's windows against whole sequences of the independent reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.interfaces import FINAL
from specjax.decoding.types import Acceptance, Proposal, Verdict, Window
from specjax.decoding.windows import chunk_window, draft_window
from specjax.models.build import WeightType
from specjax.models.decoder import Decoder, pad_rows
from specjax.testing.reference import logits as reference_logits
from specjax.testing.reference.model import residual, rms_norm
from specjax.testing.toys import Toy, toy_hybrid, toy_llama

T = 32
EXACT = {"rtol": 0, "atol": 1e-10}
DRAW = np.random.default_rng(0)
TEXTS = [DRAW.integers(0, 61, n).tolist() for n in (21, 9)]
TREE = (-1, -1, 0, 0, 1, 2, 5, 5)

verify = jax.jit(
    lambda decoder, state, window, taps=(), logits="all": decoder.verify(
        state, window, taps=taps, logits=logits
    ),
    static_argnames=("taps", "logits"),
)
commit = jax.jit(lambda decoder, *args: decoder.commit(*args))


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def toy(request: pytest.FixtureRequest) -> Toy:
    """In float64, so that what is equal is equal to ten places."""
    with jax.enable_x64(True):
        made = {"llama": toy_llama, "hybrid": toy_hybrid}[request.param]
        return made(weights=WeightType.FLOAT64)


def int32(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def stretch(texts: list[list[int]], start: int, width: int, stop: Any) -> Window:
    tokens = np.zeros((len(texts), T), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return chunk_window(int32(tokens), int32([start] * len(texts)), int32(stop), width)


def take_all(decoder: Decoder, state: Any, window: Window, verdict: Verdict) -> Any:
    num = window.valid.sum(axis=1, dtype=jnp.int32)
    path = int32(np.broadcast_to(np.arange(window.width), window.tokens.shape))
    accepted = Acceptance(path=path, tokens=window.tokens, num_tokens=num)
    return commit(decoder, state, verdict.pending, accepted)


def ingest(decoder: Decoder, texts: list[list[int]], widths: list[int]) -> Any:
    """All but the last token of each text, in windows of these widths."""
    state, start = decoder.init(len(texts), T), 0
    stop = [len(text) - 1 for text in texts]
    for width in widths:
        window = stretch(texts, start, width, stop)
        state = take_all(decoder, state, window, verify(decoder, state, window))
        start += width
    assert state.lengths.tolist() == stop
    return state


@pytest.fixture(scope="module")
def committed(toy: Toy) -> Any:
    with jax.enable_x64(True):
        return ingest(toy.decoder, TEXTS, [T - 2])


@pytest.mark.parametrize("widths", [[7, 7, 7], [1] * 20, [3, 10, 1, 7]], ids=str)
def test_chunks_leave_what_one_window_leaves(toy, committed, widths):
    with jax.enable_x64(True):
        state = ingest(toy.decoder, TEXTS, widths)
        for a, b in zip(
            jax.tree.leaves(toy.decoder.canonical(state)),
            jax.tree.leaves(toy.decoder.canonical(committed)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, **EXACT)


def test_a_window_over_a_text_has_the_references_logits(toy):
    with jax.enable_x64(True):
        state = toy.decoder.init(2, T)
        window = stretch(TEXTS, 0, T - 2, [len(text) for text in TEXTS])
        verdict = verify(toy.decoder, state, window)
        assert verdict.logits is not None and verdict.logits.dtype == jnp.float64
        for row, text in enumerate(TEXTS):
            wanted = reference_logits(toy.tensors, toy.config, text)
            np.testing.assert_allclose(
                verdict.logits[row, : len(text)], wanted, **EXACT
            )
        assert not verdict.bad.any()


def tree_window(tokens: np.ndarray, num_nodes: Any = (8, 8)) -> Window:
    return draft_window(
        int32([text[-1] for text in TEXTS]),
        int32([len(text) for text in TEXTS]),
        int32([99, 99]),
        Proposal(int32(tokens), int32([TREE] * 2), int32(num_nodes)),
        61,
    )


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(TREE[node]), node]


def test_every_row_of_a_tree_has_the_logits_of_its_own_path(toy, committed):
    tokens = np.random.default_rng(1).integers(0, 61, (2, 8))
    with jax.enable_x64(True):
        verdict = verify(toy.decoder, committed, tree_window(tokens))
        for row, text in enumerate(TEXTS):
            for node in range(-1, 8):
                line = text + tokens[row, path_to(node)].tolist()
                wanted = reference_logits(toy.tensors, toy.config, line, last=1)[0]
                np.testing.assert_allclose(
                    verdict.logits[row, node + 1], wanted, **EXACT
                )


def test_committing_a_path_of_a_tree_is_taking_in_its_tokens(toy, committed):
    tokens = np.random.default_rng(2).integers(0, 61, (2, 8))
    paths = [path_to(7), path_to(4)]
    with jax.enable_x64(True):
        verdict = verify(toy.decoder, committed, tree_window(tokens))
        rows = np.zeros((2, 5), np.int32)
        for row, path in enumerate(paths):
            rows[row, 1 : 1 + len(path)] = [node + 1 for node in path]
        accepted = Acceptance(
            path=int32(rows),
            tokens=int32(rows),
            num_tokens=int32([len(path) + 1 for path in paths]),
        )
        got = commit(toy.decoder, committed, verdict.pending, accepted)
        # the last token of a text is not taken in, so any will do
        whole = [
            text + tokens[row, paths[row]].tolist() + [0]
            for row, text in enumerate(TEXTS)
        ]
        wanted = ingest(toy.decoder, whole, [T - 2])
        for a, b in zip(
            jax.tree.leaves(toy.decoder.canonical(got)),
            jax.tree.leaves(toy.decoder.canonical(wanted)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, **EXACT)


def test_taps_are_the_residual_stream_after_so_many_blocks(toy):
    text, blocks = TEXTS[0], len(toy.decoder.blocks)
    taps = (0, 1, blocks, FINAL)
    with jax.enable_x64(True):
        window = stretch([text], 0, len(text), [len(text)])
        state = toy.decoder.init(1, T)
        verdict = verify(toy.decoder, state, window, taps=taps)
        assert set(verdict.features) == set(taps)
        for tap in (0, 1, blocks):
            short = toy.config | {"num_hidden_layers": tap}
            if "layer_types" in short:
                short["layer_types"] = short["layer_types"][:tap]
            wanted = residual(toy.tensors, short, text)
            np.testing.assert_allclose(verdict.features[tap][0], wanted, **EXACT)
        last = residual(toy.tensors, toy.config, text)
        final = rms_norm(last, toy.tensors["model.norm.weight"], toy.config)
        np.testing.assert_allclose(verdict.features[FINAL][0], final, **EXACT)
        head = toy.tensors["lm_head.weight"].astype(np.float64)
        np.testing.assert_allclose(verdict.logits[0], final @ head.T, **EXACT)


def test_without_logits_the_rest_is_the_same(toy, committed):
    tokens = np.random.default_rng(3).integers(0, 61, (2, 8))
    with jax.enable_x64(True):
        window = tree_window(tokens)
        full = verify(toy.decoder, committed, window, taps=(1,))
        none = verify(toy.decoder, committed, window, taps=(1,), logits="none")
        assert none.logits is None
        without = full.replace(logits=None)
        for a, b in zip(jax.tree.leaves(none), jax.tree.leaves(without), strict=True):
            np.testing.assert_allclose(a, b, **EXACT)
        assert verify(toy.decoder, committed, window).features == {}


# -- in float32 and narrower ----------------------------------------------------------


def test_ids_that_do_not_exist_read_some_row_of_the_embedding():
    decoder = toy_llama().decoder
    window = stretch([[3, 5, 7]], 0, 3, [3])
    wild = window.replace(tokens=int32([[3, 10**6, -5]]))
    verdict = verify(decoder, decoder.init(1, T), wild, taps=(0,))
    rows = np.asarray(decoder.embedding)
    for got in np.asarray(verdict.features[0][0]):
        assert (got == rows).all(axis=1).any()
    assert np.isfinite(np.asarray(verdict.logits)).all()


@pytest.mark.parametrize("kind", [toy_llama, toy_hybrid])
def test_a_row_of_nan_flags_itself_and_its_descendants(kind):
    decoder = kind().decoder
    broken = decoder.replace(embedding=decoder.embedding.at[60].set(jnp.nan))
    texts = [[token % 60 for token in text] for text in TEXTS]
    tokens = np.full((2, 8), 3)
    tokens[0, 2] = 60  # node 2: below it stand 5, 6 and 7
    state = ingest(decoder, texts, [T - 2])
    verdict = verify(broken, state, tree_window(tokens))
    clean = verify(decoder, state, tree_window(tokens))
    bad = [0, 0, 0, 1, 0, 0, 1, 1, 1]
    assert verdict.bad[0].astype(int).tolist() == bad
    assert not verdict.bad[1].any()
    sound = ~np.asarray(verdict.bad)
    np.testing.assert_array_equal(
        np.asarray(verdict.logits)[sound], np.asarray(clean.logits)[sound]
    )


@pytest.mark.parametrize(
    "kind", [toy_llama, pytest.param(toy_hybrid, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("weights", [WeightType.BFLOAT16, WeightType.INT8])
def test_rows_added_for_the_fast_products_change_no_bit(kind, weights):
    decoder = kind(weights=weights).decoder
    text = TEXTS[0]
    window = stretch([text], 0, len(text), [len(text)])
    state = decoder.init(1, T)
    state = take_all(decoder, state, window, verify(decoder, state, window))
    one = stretch([[*text, 4, 5, 6]], len(text), 1, [T])
    padded = stretch([[*text, 4, 5, 6]], len(text), 3, [len(text) + 1])
    full = stretch([[*text, 4, 5, 6]], len(text), 3, [T])
    assert full.valid.all() and padded.valid.tolist() == [[True, False, False]]
    alone = verify(decoder, state, one, taps=(1, FINAL))
    assert alone.logits.shape == (1, 1, 61) and alone.bad.shape == (1, 1)
    beside = verify(decoder, state, padded, taps=(1, FINAL))
    among = verify(decoder, state, full, taps=(1, FINAL))
    leaves = [jax.tree.leaves(verdict) for verdict in (alone, beside, among)]
    for a, b, c in zip(*leaves, strict=True):
        assert a.shape[1] == 1
        if weights == WeightType.BFLOAT16:
            # three rows in all three cases: the same products
            np.testing.assert_array_equal(a, b[:, :1])
            np.testing.assert_array_equal(a, c[:, :1])
        else:
            for other in (b, c):
                np.testing.assert_allclose(
                    np.asarray(a, np.float32),
                    np.asarray(other[:, :1], np.float32),
                    rtol=0,
                    atol=0.02 * float(jnp.max(jnp.abs(a.astype(jnp.float32)))),
                )


def test_padding_rows_see_themselves_and_are_seen_by_nobody():
    window = stretch([[3, 5, 7]], 0, 2, [2])
    wide = pad_rows(window, 4)
    assert wide.valid.tolist() == [[True, True, False, False]]
    assert wide.positions.tolist() == [[0, 1, 1, 1]]
    mask = np.eye(4, dtype=bool)
    mask[1, 0] = True
    np.testing.assert_array_equal(wide.ancestors[0], mask)
    assert pad_rows(window, 2) is window and pad_rows(window, 1) is window
