"""MTP heads: their reference outputs, what a wrong wire does to them, and the loop."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance import Greedy
from specjax.checkpoints import load
from specjax.checkpoints.mtp import load_mtp
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.generate import generate
from specjax.decoding.interfaces import FINAL
from specjax.decoding.requests import Request
from specjax.decoding.types import Acceptance, Context, Sampling, Verdict
from specjax.decoding.windows import chunk_window
from specjax.drafters import NullDrafter
from specjax.drafters.drawing import Pick
from specjax.drafters.head_chain import HeadChain
from specjax.drafters.mtp import MTPHead
from specjax.drafters.mtp_modules import mtp_drafter
from specjax.drafters.mtp_shared_choice import SharedChoiceHead, without_indexer
from specjax.models.memory import with_recurrence
from specjax.models.mixers.base import Aids, Chosen
from specjax.models.recurrence import Ring, Snapshot
from specjax.models.stack import rope_of, rotary_tables
from specjax.testing.conformance import check_drafter
from specjax.testing.parity_mtp import Listener
from specjax.testing.toy_mtp import toy_mtp
from specjax.testing.toys import toy_llama

ORACLES = Path(__file__).resolve().parents[1] / "data/oracles"
NAMES = [
    path.name
    for path in sorted(ORACLES.iterdir())
    if (config := json.loads((path / "config.json").read_text()))["model_type"]
    and "mtp_logits" in np.load(path / "oracle.npz").files
]
QUICK = ("qwen3_5", "deepseek_v3_fp8")
PAIRS, DRAFTS, WIDTH, CAPACITY = 40, 4, 8, 64
TOLD: list[np.ndarray] = []


@functools.cache
def target_of(name: str):
    return load(ORACLES / name, tokenizer=False)


@functools.cache
def head_of(name: str) -> MTPHead:
    head = load_mtp(target_of(name))
    assert isinstance(head, MTPHead)
    return head


@functools.cache
def oracle_of(name: str) -> dict[str, np.ndarray]:
    with np.load(ORACLES / name / "oracle.npz") as arrays:
        return dict(arrays)


def tell(logits: np.ndarray) -> None:
    TOLD.append(logits)


def scene(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompt 0's hidden states, and the text up to the first token that follows."""
    oracle = oracle_of(name)
    text = np.concatenate([oracle["input_ids"][0], oracle["greedy_ids"][0, :1]])
    return oracle["hidden_states"][-1], text


@jax.jit
def observe(drafter, state, hidden, tokens):
    width = tokens.shape[1]
    window = chunk_window(tokens, state.lengths * 0, state.lengths * 0 + width, width)
    verdict = Verdict(
        logits=None, features={FINAL: hidden}, pending=None, bad=~window.valid
    )
    taken = Acceptance(
        path=jnp.arange(width, dtype=jnp.int32)[None],
        tokens=tokens,
        num_tokens=jnp.full((1,), width, jnp.int32),
    )
    return drafter.observe(state, None, window, verdict, taken)


@jax.jit
def propose(drafter, state, text):
    length = state.lengths + 1
    context = Context(
        tokens=text,
        lengths=length,
        room=jnp.full((1,), DRAFTS + 1, jnp.int32),
        done=jnp.zeros((1,), bool),
        seeds=jnp.zeros((1,), jnp.uint32),
        sampling=Sampling(),
        counts=None,
    )
    return drafter.propose(state, context)[0]


class Heard:
    """What a head says of the scene: through a drafter's two functions."""

    def __init__(self, head: MTPHead, hidden: np.ndarray, text: np.ndarray):
        with jax.default_matmul_precision("highest"):
            drafter = HeadChain(Listener(head, tell), DRAFTS, pick=Pick.BEST)
            self.state = drafter.init(1, CAPACITY)
            for start in range(0, len(hidden), WIDTH):
                rows = jnp.asarray(hidden[None, start : start + WIDTH])
                ids = jnp.asarray(text[None, start + 1 : start + WIDTH + 1], jnp.int32)
                self.state = observe(drafter, self.state, rows, ids)
            self.hidden = np.asarray(self.state.own.outs[0, : len(hidden)])
            self.logits = np.asarray(head.logits(jnp.asarray(self.hidden)[None])[0])
            padded = np.zeros((1, CAPACITY), np.int32)
            padded[0, : len(text)] = text
            TOLD.clear()
            self.ids = np.asarray(propose(drafter, self.state, padded).tokens[0])
            jax.effects_barrier()
            self.draft_logits = np.concatenate(TOLD, axis=1)[0]


def heard(name: str, head: MTPHead, hidden: np.ndarray | None = None) -> Heard:
    known, text = scene(name)
    return Heard(head, known if hidden is None else hidden, text)


def off(name: str, said: Heard) -> tuple[float, np.ndarray, bool]:
    """How far the prompt's logits are off and each draft's; if the drafts are right."""
    oracle = oracle_of(name)
    prompt = np.abs(said.logits[: PAIRS - 1] - oracle["mtp_logits"][0]).max()
    drafts = np.abs(said.draft_logits - oracle["mtp_draft_logits"][0]).max(axis=1)
    same = np.array_equal(said.ids, oracle["mtp_draft_ids"][0])
    return float(prompt), drafts, same


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in NAMES],
)
def test_a_head_says_what_the_reference_does(name):
    said = heard(name, head_of(name))
    atol = 1e-3 if name.startswith("qwen3") else 5e-4
    prompt, drafts, same = off(name, said)
    assert prompt < atol and drafts.max() < atol and same
    wanted = oracle_of(name)["mtp_hidden"][0]
    np.testing.assert_allclose(said.hidden[: PAIRS - 1], wanted, atol=atol)


def test_every_family_that_has_heads_is_compared():
    assert len(NAMES) == 9


@pytest.mark.full
def test_a_head_without_the_first_embedding():
    head = head_of("glm4_moe").replace(mask_first=True)
    wanted = oracle_of("glm4_moe")["mtp_logits_vllm_pos0mask"][0]
    said = heard("glm4_moe", head).logits
    np.testing.assert_allclose(said[: len(wanted)], wanted, atol=5e-4)


NAME = "qwen3_5"


def swapped(head: MTPHead) -> MTPHead:
    join = head.module.join
    weight = jnp.roll(join.weight, join.weight.shape[1] // 2, axis=1)
    return with_module(head, join=join.replace(weight=weight))


def with_module(head: MTPHead, **changes) -> MTPHead:
    return head.replace(module=head.module.replace(**changes))


def uncentred(part: str):
    """The norm as if its weight were stored whole."""

    def cut(head: MTPHead) -> MTPHead:
        norm = getattr(head.module, part)
        return with_module(head, **{part: norm.replace(weight=norm.weight - 1)})

    return cut


class TestWires:
    """Each is cut, and shows far beyond the tolerance."""

    @pytest.mark.parametrize(
        "cut",
        [swapped, *map(uncentred, ("embed_norm", "hidden_norm", "norm"))],
        ids=["halves swapped", "embedding's norm", "hidden state's norm", "last norm"],
    )
    def test_weights(self, cut):
        prompt, drafts, same = off(NAME, heard(NAME, cut(head_of(NAME))))
        assert prompt > 1 and drafts.max() > 1 and not same

    def test_hidden_states_before_the_last_norm(self):
        hidden, _ = scene(NAME)
        # but for a factor a row, which the head's own norm takes out
        before = hidden / np.asarray(target_of(NAME).decoder.norm.weight)
        prompt, _, same = off(NAME, heard(NAME, head_of(NAME), before))
        assert prompt > 1 and not same

    def test_pairs_shifted_by_one(self):
        hidden, _ = scene(NAME)
        prompt, _, _ = off(NAME, heard(NAME, head_of(NAME), np.roll(hidden, 1, axis=0)))
        assert prompt > 1

    def test_recycled_before_the_last_norm(self):
        """Only the drafts behind the first read what was handed on."""
        prompt, drafts, _ = off(NAME, heard(NAME, before_norm(head_of(NAME))))
        assert prompt < 1e-3 and drafts[0] < 1e-3 and (drafts[1:] > 0.1).all()

    def test_rows_of_guesses_kept(self):
        """Drafts that were accepted are taken in with the target's hidden states."""
        hidden, text = scene(NAME)
        head, first = head_of(NAME), PAIRS - WIDTH
        true = Heard(head, hidden, text)
        # as if the last rows' hidden states were those that the head had guessed
        guessed = hidden.copy()
        guessed[first:] = true.hidden[first - 1 : -1]
        stale = Heard(head, guessed, text)
        assert np.abs(stale.draft_logits - true.draft_logits).max() > 0.1
        # the state holds what was taken in, and not what was drafted in between
        drafter = HeadChain(Listener(head, tell), DRAFTS, pick=Pick.BEST)
        padded = jnp.zeros((1, CAPACITY), jnp.int32).at[0, : len(text)].set(text)
        again = np.asarray(propose(drafter, true.state, padded).tokens[0])
        np.testing.assert_array_equal(again, true.ids)


class BeforeNorm(MTPHead):
    """Hands on what its norm has not seen yet."""

    def run(self, hidden, window, state):
        weight = jnp.ones_like(self.module.norm.weight)
        norm = Unnormed(weight=weight, eps=self.module.norm.eps)
        bare = self.module.replace(norm=norm)
        return bare.run(self.joined(hidden, window), window, state)

    def logits(self, out):
        return self.ends.logits(self.module.norm(out))


class Unnormed(type(toy_llama().decoder.norm)):
    """No norm."""

    def __call__(self, x):
        return x


def before_norm(head: MTPHead) -> MTPHead:
    return BeforeNorm(ends=head.ends, module=head.module)


@pytest.mark.parametrize(
    "strategy",
    [
        None,
        pytest.param(Snapshot(), marks=pytest.mark.full),
        pytest.param(Ring(slots=4), marks=pytest.mark.full),
    ],
    ids=["replay", "snapshot", "ring"],
)
def test_a_hybrid_target_decodes_the_same_tokens(strategy):
    decoder, oracle = target_of(NAME).decoder, oracle_of(NAME)
    if strategy is not None:
        decoder = with_recurrence(decoder, strategy)
    drafter = HeadChain(head_of(NAME), 3)
    options = EngineOptions(prefill_width=13, widths=(4,), rounds_per_call=32)
    wanted = oracle["greedy_ids"].tolist()
    requests = [
        Request(prompt_ids=ids, max_tokens=len(wanted[0]))
        for ids in oracle["input_ids"].tolist()
    ]
    with jax.default_matmul_precision("highest"):
        got = generate(Engine(decoder, drafter, Greedy(), options), requests)
    assert [list(c.ids) for c in got] == wanted
    assert all(c.rounds[0].drafted == 3 for c in got)


def bigrams():
    """A target whose blocks add nothing, and a head that says what it says."""
    decoder = toy_llama().decoder
    silent = tuple(map(without_effect, decoder.blocks))
    head = toy_mtp(toy_llama())[0]
    size, module = head.hidden_size, head.module
    join = jnp.concatenate([jnp.eye(size), jnp.zeros((size, size))], axis=1)
    ones = module.embed_norm.replace(weight=jnp.ones((size,)))
    head = with_module(
        head,
        embed_norm=ones,
        join=module.join.replace(weight=join),
        blocks=tuple(map(without_effect, module.blocks)),
        norm=decoder.norm,
    )
    return decoder.replace(blocks=silent), head


def without_effect(block):
    def silent(sublayer, part):
        linear = getattr(sublayer.body, part)
        linear = linear.replace(weight=jnp.zeros_like(linear.weight))
        return sublayer.replace(body=sublayer.body.replace(**{part: linear}))

    return block.replace(
        mixer=silent(block.mixer, "out"), feedforward=silent(block.feedforward, "down")
    )


def test_a_head_that_is_right_is_accepted_to_the_last_token():
    """One token in a prompt, a long one, and no room in the end."""
    decoder, head = bigrams()
    options = EngineOptions(
        prefill_width=4, widths=(4,), rounds_per_call=8, max_capacity=24
    )
    prompts = ((5, 17, 40, 3, 22, 9, 1), (8,), (30, 2))
    requests = [Request(prompt_ids=ids, max_tokens=None) for ids in prompts]
    got = generate(Engine(decoder, mtp_drafter(head, 3), Greedy(), options), requests)
    plain = dataclasses.replace(options, widths=(1,), rounds_per_call=24)
    wanted = generate(Engine(decoder, NullDrafter(), Greedy(), plain), requests)
    assert [c.ids for c in got] == [c.ids for c in wanted]
    for row, completion in enumerate(got):
        assert completion.drafted == completion.accepted > 8
        assert len(completion.ids) == 24 - len(prompts[row])
        first = completion.rounds[0].drafted
        # a prompt of one token is no pair
        assert first == (0 if len(prompts[row]) == 1 else 3)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_contracts():
    toy = toy_llama()
    check_drafter(HeadChain(toy_mtp(toy)[0], k=3), toy).assert_ok()


class TestSharedChoice:
    """GLM-5: all drafts of a round attend to what was chosen for the last true row."""

    NAME = "glm_moe_dsa"

    def shared(self) -> SharedChoiceHead:
        head = head_of(self.NAME)
        assert not isinstance(head, SharedChoiceHead)
        return SharedChoiceHead(ends=head.ends, module=head.module)

    @pytest.mark.full
    def test_against_a_recomputation(self):
        said = heard(self.NAME, self.shared())
        alone = heard(self.NAME, head_of(self.NAME))
        np.testing.assert_allclose(
            said.draft_logits[0], alone.draft_logits[0], atol=1e-5
        )
        assert np.abs(said.draft_logits[1:] - alone.draft_logits[1:]).max() > 0.05
        np.testing.assert_allclose(said.draft_logits, self.recomputed(said), atol=2e-4)

    def recomputed(self, said: Heard) -> np.ndarray:
        """All rows in one window on an empty state, told by masks what to see."""
        head = head_of(self.NAME)
        hidden, text = scene(self.NAME)
        width = PAIRS + DRAFTS - 1
        tokens = jnp.asarray([[*text[1:], *said.ids[: DRAFTS - 1]]], jnp.int32)
        zero = jnp.zeros((1,), jnp.int32)
        window = chunk_window(tokens, zero, zero + width, width)
        state = head.init(1, CAPACITY)
        block = head.module.blocks[0]
        bare = head.module.replace(blocks=(without_indexer(block),))
        assert block.mixer is not None
        norm, mixer = block.mixer.norm, block.mixer.body
        tables = rotary_tables([mixer], window.positions, jnp.dtype("float32"))
        aids = Aids(rotary=tables[rope_of(mixer)])
        rows = jnp.zeros((1, width, hidden.shape[1])).at[0, :PAIRS].set(hidden)
        with jax.default_matmul_precision("highest"):
            for step in range(DRAFTS):
                joined = head.joined(rows, window)
                chosen = mixer.choose(norm(joined), window, state.blocks[0], zero, aids)
                seen = chosen.window.at[:, PAIRS:].set(
                    chosen.window[:, PAIRS - 1, None]
                )
                assert int(seen[0, PAIRS - 1].sum()) == 16
                chosen = Chosen(committed=chosen.committed, window=seen)
                out, _ = bare.run(joined, window, state, chosen=chosen)
                if step < DRAFTS - 1:
                    at = PAIRS + step
                    rows = rows.at[:, at].set(out[:, at - 1])
            return np.asarray(head.logits(out)[0, PAIRS - 1 :])
