"""A drafter of the user's own, from a file."""

import pytest

STUTTER = """
import jax.numpy as jnp
from flax import struct
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.types import Proposal


class Stutter(struct.PyTreeNode):
    k: int = struct.field(pytree_node=False, default=2)
    name = "stutter"
    law = ProposalLaw.DETERMINISTIC
    taps = ()
    max_nodes = property(lambda self: self.k)
    max_depth = property(lambda self: self.k)

    def init(self, batch, capacity):
        return None

    def propose(self, state, context):
        shape = (context.lengths.shape[0], self.k)
        tokens = jnp.broadcast_to(context.anchor[:, None], shape)
        parents = jnp.broadcast_to(jnp.arange(self.k, dtype=jnp.int32) - 1, shape)
        return Proposal(tokens, parents, jnp.full(shape[:1], self.k, jnp.int32)), None

    def observe(self, state, pending, window, verdict, acceptance):
        return None


class Nothing:
    pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(STUTTER)
    return path


def test_it_drafts_with_its_k_and_changes_no_token(run, model, file):
    options = ("--max-tokens", 24, "--ignore-eos", "--json", "--prompt", "abab")
    plain = run("generate", "--model", model, "--drafter", "none", *options).json
    name = f"{file}:Stutter"
    mine = run("generate", "--model", model, "--drafter", name, "--k", 3, *options).json
    assert mine["ids"] == plain["ids"]
    assert mine["stats"]["drafter"] == name
    assert mine["stats"]["drafted"] > 2 * mine["stats"]["rounds"]


def test_one_that_is_never_right_is_remarked_on(run, model, file):
    file.write_text(STUTTER.replace("context.anchor[:, None]", "jnp.int32(254)"))
    options = ("--max-tokens", 24, "--ignore-eos", "--prompt", "abab")
    name = f"{file}:Stutter"
    result = run("generate", "--model", model, "--drafter", name, "--k", 3, *options)
    assert result.status == 0 and "no draft was accepted" in result.err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("{file}:Stuter", "has no class 'Stuter': give {file}:CLASS, of Stutter, No"),
        ("{file}", "may hold several classes: give {file}:CLASS, of Stutter, Nothing"),
        ("{file}:Nothing", "is no drafter: it lacks taps"),
        ("{file}x.py:Stutter", "there is no file"),
        ("ngramm", "FILE.py:CLASS; did you mean"),
        ("cascade:suffix,ngram", "combinations are written in Python"),
    ],
)
def test_what_is_no_drafter_is_refused_with_what_is_missing(
    run, model, file, name, told
):
    name = name.format(file=file)
    result = run("generate", "--model", model, "--drafter", name, "--prompt", "a")
    assert result.status == 2 and told.format(file=file) in result.err, result.err


def test_what_a_drafter_cannot_hold_is_told_in_a_line(run, model):
    given = ("generate", "--model", model, "--prompt", "abab", "--max-tokens", 4)
    result = run(*given, "--drafter", "suffix-tree", "--k", 100000)
    assert result.status == 2 and "lower k, places or the capacity" in result.err
    result = run(*given, "--drafter", "suffix", "--k", 2 * 10**9, "--json")
    # behind a match of one token a suffix tree leaves so many
    assert len(result.json["stats"]["accepted_by_position"]) == 23
    tree = (f"dynamic-tree:{model}", "--draft-top-k", 300, "--k", 1)
    result = run(*given, "--drafter", *tree)
    assert result.status == 2 and "a vocabulary of 256 has 1 to 256" in result.err


def test_the_version(run):
    result = run("--version")
    assert result.status == 0 and result.out.startswith("specjax 0.")
