"""Every family against its reference outputs, and the comparison against faults."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.checkpoints import load
from specjax.decoding.types import Acceptance
from specjax.models.decoder import Decoder
from specjax.models.families import FAMILIES
from specjax.models.recurrence import Ring, Snapshot, Strategy
from specjax.testing import parity
from specjax.testing.parity import check_parity, compare, planned_drafts, run
from specjax.testing.parity_arrays import OUTPUTS, Oracle, OracleError, read_oracle

ORACLES = Path(__file__).resolve().parents[1] / "data/oracles"
NAMES = sorted(path.name for path in ORACLES.iterdir())


def drafts_of(checkpoint, oracle, decoder=None):
    """The run that reads a few rows at a time and decodes with drafts."""
    decoder = decoder or checkpoint.decoder
    planned = planned_drafts(oracle, decoder.vocab_size)
    with jax.default_matmul_precision("highest"):
        return run(decoder, oracle, planned, width=parity.FEW)


def statuses(report) -> dict[str, str]:
    return {check.array: check.status for check in report.checks}


def all_pass(report) -> None:
    assert report.passed and report.note == ""
    found = statuses(report)
    assert [found[name] for name in OUTPUTS] == ["pass"] * 6
    # trees and chains were there, and of all that was decoded half were drafts
    assert report.drafted > 100 and report.accepted >= 30


def test_every_family_has_an_oracle():
    """A family without one is not shown to be right."""
    configs = [json.loads((ORACLES / n / "config.json").read_text()) for n in NAMES]
    found = {c["model_type"] for c in configs}
    text_only = {"qwen3_5_text", "qwen3_5_moe_text", "gemma3"}
    assert found | text_only >= set(FAMILIES)


QUICK = (
    "deepseek_v3_fp8",
    "kimi_linear",
)
"""The rest is in the full matrix, and in one window in `test_families`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in NAMES],
)
def test_a_family_with_drafts(name):
    """Logits, hidden states and greedy tokens, through windows, trees and rollback."""
    checkpoint = load(ORACLES / name, tokenizer=False)
    oracle = read_oracle(ORACLES / name, checkpoint.config)
    drafts = drafts_of(checkpoint, oracle)
    all_pass(compare(oracle, drafts, drafts, checkpoint))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_family(name):
    report = check_parity(ORACLES / name)
    all_pass(report)
    assert set(statuses(report).values()) <= {"pass"}


def with_recurrence(decoder: Decoder, strategy: Strategy) -> Decoder:
    """The same parameters, with another way for accepted inputs to reach states."""

    def changed(block):
        config = block.mixer and block.mixer.body.config
        if not hasattr(config, "recurrence"):
            return block
        config = dataclasses.replace(config, recurrence=strategy)
        body = block.mixer.body.replace(config=config)
        return block.replace(mixer=block.mixer.replace(body=body))

    return decoder.replace(blocks=tuple(map(changed, decoder.blocks)))


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", [Snapshot(), Ring(slots=4)], ids=["snapshot", "ring"]
)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "kimi_linear", "nemotron_h"])
def test_a_family_with_other_rollback(name, strategy):
    checkpoint = load(ORACLES / name, tokenizer=False)
    oracle = read_oracle(ORACLES / name, checkpoint.config)
    decoder = with_recurrence(checkpoint.decoder, strategy)
    assert decoder.mixers[0].config.recurrence == strategy
    drafts = drafts_of(checkpoint, oracle, decoder)
    all_pass(compare(oracle, drafts, drafts, checkpoint))


class Llama:
    """A checkpoint, its oracle and a run, made once for all that is compared."""

    def __init__(self):
        self.checkpoint = load(ORACLES / "llama", tokenizer=False)
        self.oracle = read_oracle(ORACLES / "llama", self.checkpoint.config)
        self.run = drafts_of(self.checkpoint, self.oracle)

    def against(self, **changed: np.ndarray):
        """The report on an oracle with other arrays."""
        oracle = Oracle({**self.oracle.arrays, **changed}, ())
        return compare(oracle, self.run, self.run, self.checkpoint)


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("logits", (1, 0, 17)),
        ("logits", (0, 39, 255)),
        ("hidden_states", (0, 0, 0)),
        ("hidden_states", (3, 20, 63)),
        ("hidden_states", (4, 39, 1)),
        ("greedy_logits", (0, 0, 3)),
        ("greedy_logits", (1, 31, 200)),
        ("long_logits_last8", (0, 7, 99)),
    ],
)
@pytest.mark.parametrize("by", [6e-4, -6e-4])
def test_one_wrong_number_is_seen(llama, name, place, by):
    array = llama.oracle[name].copy()
    array[place] += by
    report = llama.against(**{name: array})
    assert [n for n, s in statuses(report).items() if s == "FAIL"] == [name]
    assert not report.passed
    assert report.worst.array == name and 5e-4 < report.worst.error < 7e-4


def test_a_wrong_greedy_id_is_seen(llama):
    ids = llama.oracle["greedy_ids"].copy()
    ids[1, 7] = (ids[1, 7] + 1) % 256
    report = llama.against(greedy_ids=ids)
    assert statuses(report)["greedy_ids"] == "FAIL"
    check = next(c for c in report.checks if c.array == "greedy_ids")
    assert check.plain == check.drafts == 1 and report.worst is check
    assert "prompt 1 differs from token 8 on" in report.note


def test_what_a_head_says_is_compared(llama):
    """Two runs of an MTP head, of which one is wrong in one number."""
    arrays = {
        "mtp_hidden": np.zeros((1, 39, 64), np.float32),
        "mtp_logits": np.zeros((1, 39, 256), np.float32),
        "mtp_draft_ids": np.ones((2, 4), np.int32),
    }
    right = {"mtp_draft_logits": np.zeros((2, 4, 256), np.float32)} | arrays
    oracle = dataclasses.replace(llama.oracle, arrays=llama.oracle.arrays | arrays)

    def against(run):
        pair = None if run is None else (right, run)
        report = compare(oracle, llama.run, llama.run, llama.checkpoint, pair)
        return {n: s for n, s in statuses(report).items() if n.startswith("mtp_")}

    assert against(right) == dict.fromkeys(arrays, "pass")
    assert against(None) == dict.fromkeys(arrays, "not built")
    for name, by in (
        ("mtp_hidden", 6e-4),
        ("mtp_logits", np.nan),
        ("mtp_draft_ids", 1),
    ):
        wrong = arrays[name].copy()
        wrong[0, 3] += np.asarray(by, wrong.dtype)
        told = against(right | {name: wrong})
        assert [n for n, status in told.items() if status == "FAIL"] == [name]


def test_a_wrong_argmax_is_seen(llama):
    ids = llama.oracle["long_argmax"].copy()
    ids[0, 50] = (ids[0, 50] + 1) % 256
    report = llama.against(long_argmax=ids)
    assert [n for n, s in statuses(report).items() if s == "FAIL"] == ["long_argmax"]


def test_logits_after_a_wrong_id_are_not_compared(llama):
    """They continue another text; those that led to it are."""
    ids, logits = (llama.oracle[f"greedy_{n}"].copy() for n in ("ids", "logits"))
    ids[0, 5] = (ids[0, 5] + 1) % 256
    logits[0, 6:] = 100
    report = llama.against(greedy_ids=ids, greedy_logits=logits)
    assert statuses(report)["greedy_logits"] == "pass"
    logits[0, 5] += 1
    report = llama.against(greedy_ids=ids, greedy_logits=logits)
    assert statuses(report)["greedy_logits"] == "FAIL"


def spoiled(tmp_path: Path, name: str, spoil) -> Path:
    """A copy of a checkpoint with one tensor changed."""
    path = tmp_path / name
    shutil.copytree(ORACLES / name, path)
    tensors = load_file(path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_perturbed_tensor_fails(llama, tmp_path):
    def spoil(tensors):
        tensors["model.layers.2.mlp.up_proj.weight"][5] *= 1.05

    checkpoint = load(spoiled(tmp_path, "llama", spoil), tokenizer=False)
    wrong = drafts_of(checkpoint, llama.oracle)
    report = compare(llama.oracle, llama.run, wrong, checkpoint)
    failed = {c.array for c in report.checks if c.status == "FAIL"}
    assert failed >= {"logits", "hidden_states", "greedy_logits", "long_logits_last8"}
    hidden = next(c for c in report.checks if c.array == "hidden_states")
    assert hidden.plain < 5e-4 < hidden.drafts == hidden.error


def test_a_weight_that_is_not_a_number_fails(llama, tmp_path):
    def spoil(tensors):
        tensors["model.layers.3.self_attn.v_proj.weight"][:] = np.nan

    checkpoint = load(spoiled(tmp_path, "llama", spoil), tokenizer=False)
    wrong = drafts_of(checkpoint, llama.oracle)
    report = compare(llama.oracle, wrong, llama.run, checkpoint)
    assert set(statuses(report).values()) == {"FAIL"}
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["passed"] is False


class Sloppy(Decoder):
    """Commits the first rows of a window, whichever were accepted."""

    def commit(self, state, pending, acceptance: Acceptance):
        rows = jnp.arange(acceptance.path.shape[1], dtype=jnp.int32)
        path = jnp.where(acceptance.taken, rows, 0)
        return super().commit(state, pending, acceptance.replace(path=path))


def test_a_fault_in_committing_is_seen_by_the_run_with_drafts(llama):
    """One pass over a prompt would never meet it."""
    decoder = llama.checkpoint.decoder
    fields = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)}
    wrong = drafts_of(llama.checkpoint, llama.oracle, Sloppy(**fields))
    report = compare(llama.oracle, llama.run, wrong, llama.checkpoint)
    assert statuses(report)["greedy_logits"] == "FAIL"
    # the prompts, which are chains, are read as they should be
    assert statuses(report)["logits"] == statuses(report)["hidden_states"] == "pass"


class TestArrays:
    """What ``oracle.npz`` may hold."""

    @pytest.fixture
    def refused(self, llama, tmp_path):
        def refused(arrays: dict, *said: str) -> None:
            np.savez(tmp_path / "oracle.npz", **arrays)
            with pytest.raises(OracleError) as caught:
                read_oracle(tmp_path, llama.checkpoint.config)
            for text in (str(tmp_path), *said):
                assert text in str(caught.value)

        return refused

    def test_nothing_to_compare(self, refused, llama):
        refused({}, "it is empty", "logits")
        refused({"input_ids": llama.oracle["input_ids"]}, "nothing to compare")
        refused({"mtp_logits": np.ones(3)}, "nothing to compare", "mtp_logits")

    @pytest.mark.parametrize(
        ("name", "change", "said"),
        [
            ("input_ids", lambda a: a[0], "[B, S]"),
            ("input_ids", lambda a: a[:, :0], "[B, S]"),
            ("input_ids", lambda a: a.astype(np.float32), "must hold integers"),
            ("input_ids", lambda a: a + 250, "outside the vocabulary of 256"),
            ("greedy_ids", lambda a: a - 300, "outside the vocabulary of 256"),
            ("long_argmax", lambda a: a[:, 1:], "Q = 99"),
            ("logits", lambda a: a[:1], "B = 1"),
            ("logits", lambda a: a[:, :39], "S = 39"),
            ("logits", lambda a: a[..., :255], "V = 255"),
            ("logits", lambda a: a.astype(np.int32), "finite floats"),
            ("logits", lambda a: a * np.inf, "finite floats"),
            ("hidden_states", lambda a: a[1:], "L+1 = 4"),
            ("hidden_states", lambda a: a[..., :60], "D = 60"),
            ("hidden_states", lambda a: a[:, :30], "S = 30"),
            ("greedy_logits", lambda a: a[:, :31], "G = 31"),
            ("long_logits_last8", lambda a: np.tile(a, (1, 13, 1)), "104 tokens"),
        ],
    )
    def test_arrays_that_do_not_fit(self, refused, llama, name, change, said):
        with np.errstate(invalid="ignore"):
            changed = change(llama.oracle[name])
        refused({**llama.oracle.arrays, name: changed}, f"{name!r}", said)

    @pytest.mark.parametrize(
        ("name", "needed"),
        [("logits", "input_ids"), ("greedy_logits", "greedy_ids")],
    )
    def test_outputs_of_nothing(self, refused, llama, name, needed):
        kept = {n: a for n, a in llama.oracle.arrays.items() if n != needed}
        refused({name: llama.oracle[name], "long_argmax": np.ones((1, 1), int)} | kept)

    @pytest.mark.parametrize(
        ("shape", "said"),
        [
            ((1, 38, 256), "S-1 = 38"),
            ((1, 39, 255), "V = 255"),
            ((3, 39, 256), "M = 3, of 2"),
        ],
    )
    def test_arrays_of_a_head(self, refused, llama, shape, said):
        logits = np.zeros(shape, np.float32)
        refused(llama.oracle.arrays | {"mtp_logits": logits}, "'mtp_logits'", said)

    def test_no_file_and_a_broken_one(self, llama, tmp_path):
        config = llama.checkpoint.config
        with pytest.raises(OracleError, match=r"has no oracle\.npz"):
            read_oracle(tmp_path, config)
        (tmp_path / "oracle.npz").write_bytes(b"PK\x03\x04 and then nothing")
        with pytest.raises(OracleError, match="cannot be read"):
            read_oracle(tmp_path, config)
        with pytest.raises(OracleError, match="is no directory"):
            check_parity(tmp_path / "nowhere")
