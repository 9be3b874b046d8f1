"""The same tokens however many devices the batch is spread over (C4)."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.acceptance import Block, Coupled
from specjax.decoding.engine import Engine, EngineOptions
from specjax.decoding.requests import Request
from specjax.drafters import DraftModel
from specjax.drafters.drawing import Pick
from specjax.testing.markov import markov

ROWS = 8


@pytest.mark.parametrize(
    ("rule", "pick"), [(Coupled(), Pick.COUPLED), (Block(), Pick.DRAWN)]
)
def test_tokens_do_not_depend_on_the_number_of_devices(cpu_devices, rule, pick):
    drafter = DraftModel(markov(1, 12), 3, pick=pick)
    engine = Engine(markov(0, 12), drafter, rule, EngineOptions(prefill_width=4))
    requests = [
        Request(
            prompt_ids=(1, 2, row + 1), max_tokens=12 + row, temperature=0.9, seed=row
        )
        for row in range(ROWS)
    ]
    outputs = []
    for devices in (1, 8):
        mesh = Mesh(np.array(cpu_devices[:devices]), ("batch",))
        spread = NamedSharding(mesh, PartitionSpec("batch"))
        state = jax.tree.map(
            lambda x, to=spread: jax.device_put(x, to), engine.start(requests)
        )
        state = engine.prefill(state)
        while not bool(np.asarray(state.done).all()):
            state, _ = engine.rounds(state)
        assert len(state.tokens.sharding.device_set) == devices
        outputs.append([np.asarray(x) for x in jax.tree.leaves(state)])
    for other in outputs[1:]:
        for ours, theirs in zip(outputs[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)
