"""What a round moves to and from a TPU's memory, read from its compiled program."""

from typing import Any

import jax
import pytest

from pallas_kernels import compat
from pallas_kernels.aot import tpu
from pallas_kernels.aot.case import nbytes
from pallas_kernels.aot.traffic import moves
from specjax.acceptance import RULES
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.drafters.ngram import NGram
from specjax.models.build import WeightType
from specjax.models.memory import with_recurrence
from specjax.models.recurrence import Replay, Ring
from specjax.testing.toys import toy_hybrid, toy_llama

PROGRAM = """\
HloModule m

%fused (p0: f32[4,1024], p1: s32[]) -> f32[1024] {
  %p0 = f32[4,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %flat = f32[4096]{0} bitcast(%p0)
  ROOT %row = f32[1024]{0} dynamic-slice(%flat, %p1), dynamic_slice_sizes={1024}
}

%update (q0: f32[4,1024], q1: f32[1,1024], q2: s32[]) -> f32[4,1024] {
  %q0 = f32[4,1024]{1,0} parameter(0)
  %q1 = f32[1,1024]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %new = f32[4,1024]{1,0} dynamic-update-slice(%q0, %q1, %q2, %q2)
}

%body (s: (f32[4,1024], f32[8], s32[])) -> (f32[4,1024], f32[8], s32[]) {
  %s = (f32[4,1024]{1,0}, f32[8]{0}, s32[]) parameter(0)
  %cache = f32[4,1024]{1,0} get-tuple-element(%s), index=0
  %small = f32[8]{0} get-tuple-element(%s), index=1
  %at = s32[] get-tuple-element(%s), index=2
  %near = f32[8]{0:S(1)} negate(%small)
  %mine = f32[8]{0:S(1)} negate(%near)
  %picked = f32[1024]{0} fusion(%cache, %at), kind=kLoop, calls=%fused
  %rows = f32[1,1024]{1,0:S(1)} bitcast(%picked)
  %there = f32[4,1024]{1,0} fusion(%cache, %rows, %at), kind=kLoop, calls=%update
  %brought = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%small)
  ROOT %t = (f32[4,1024]{1,0}, f32[8]{0}, s32[]) tuple(%there, %small, %at)
}

ENTRY %main (a: (f32[4,1024], f32[8], s32[])) -> (f32[4,1024], f32[8], s32[]) {
  %a = (f32[4,1024]{1,0}, f32[8]{0}, s32[]) parameter(0)
  ROOT %w = (f32[4,1024]{1,0}, f32[8]{0}, s32[]) while(%a), condition=%c, body=%body
}
"""


def test_each_instruction_moves_what_it_must():
    found = {move.name: move.bytes for move in moves(PROGRAM)}
    assert found == {
        "picked": 4096 + 4096 + 4,  # a row is read and written, by a number
        "there": 4096 + 4,  # a row is written; it comes from the core's own memory
        "near": 32,  # only what is read lies in the device's
        "mine": 0,
        "brought": 32,
    }


def test_a_whole_copy_counts_twice():
    line = "  %there = f32[4,1024]{1,0} fusion(%cache, %rows, %at), kind=kLoop"
    copied = PROGRAM.replace(
        line, "  %copied = f32[4,1024]{1,0} copy(%cache)\n" + line, 1
    )
    assert moves(copied)[0].name == "copied"
    assert moves(copied)[0].bytes == 2 * 4 * 1024 * 4


def test_a_program_without_a_loop_is_refused():
    with pytest.raises(ValueError, match="no loop"):
        moves(PROGRAM.replace("while(", "call("))


SIZES = {
    "weights": WeightType.BFLOAT16,
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def dense() -> Any:
    return toy_llama(**SIZES).decoder


def hybrid(strategy: Any) -> Any:
    return with_recurrence(toy_hybrid(**SIZES, **LINEAR).decoder, strategy)


def moved_and_needed(rounds: Any, decoder: Any) -> tuple[float, float]:
    """Bytes of a round on a v5e: weights, caches read, states read and written."""
    rule = RULES["coupled"].build()
    options = EngineOptions(prefill_width=64, widths=(8,))
    engine = Engine(decoder, NGram(k=7, min_n=1), rule, options)
    prompt = [3, 4, 5] * 50
    state = engine.start(
        [Request(prompt_ids=prompt, max_tokens=3900) for _ in range(4)]
    )
    program = rounds.compile_for(tpu.device("v5e"), engine, state).as_text()
    kept = jax.tree.leaves(state.target)
    # of the embeddings a window's rows are read; matrices of states are written too
    written = [x for x in kept if x.ndim == 4 and x.shape[-2:] == (128, 128)]
    needed = nbytes(engine.target) - nbytes(decoder.embedding)
    needed += nbytes(kept) + nbytes(written)
    return sum(move.bytes for move in moves(program)), needed


needs_tpu = pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))


@pytest.mark.full
@needs_tpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make",
    [dense, lambda: hybrid(Replay()), lambda: hybrid(Ring())],
    ids=["dense", "replay", "ring"],
)
def test_a_round_moves_its_weights_and_its_state_and_little_else(rounds, make):
    moved, needed = moved_and_needed(rounds, make())
    assert 0.9 < moved / needed < 1.05


@pytest.mark.full
@needs_tpu
@pytest.mark.timeout(600)
def test_caches_that_xla_may_move_are_written_back_whole(monkeypatch, rounds):
    """What ``left_in_hbm`` is for; and that the count would show it."""
    monkeypatch.setattr(compat, "left_in_hbm", lambda x: x)
    jax.clear_caches()
    moved, needed = moved_and_needed(rounds, dense())
    assert moved / needed > 1.1
