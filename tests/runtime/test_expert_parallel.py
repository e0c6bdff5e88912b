"""Expert parallelism on real processes: each has its experts, rows travel to them and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from tests.equality.case import TOLERANCE
from tests.models.zoo import build, optimizer_of
from tests.oracles import NUM_STEPS, Trained, assert_same, reference_steps

EXCHANGED = autopar.Pin("grouped_mm*", choice="rows_and_experts")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 2, "recompute": "full"}, {"kernels": "compiled"}],
    ids=["plain", "micro-batches, recomputed", "compiled"],
)
def test_trains_as_eager(options: dict[str, Any]) -> None:
    model, make_batch = build("mixtral")
    batches, make_optimizer = (
        [make_batch(step) for step in range(NUM_STEPS)],
        optimizer_of("mixtral"),
    )
    expected = reference_steps(model, batches, make_optimizer)
    with autopar.compile(
        model,
        2,
        example_inputs=batches[0],
        optimizer=make_optimizer,
        mesh={"ep": 2},
        constraints=EXCHANGED,
        **options,
    ) as compiled:
        assert "EP" in compiled.plan.report()
        losses = [compiled.train_step(**batch).item() for batch in batches]
        state = compiled.full_state_dict()
    weights = {name: state[name] for name in expected.weights}
    got = Trained(losses=losses, gradients={}, weights=weights, buffers={})
    assert_same(got, replace(expected, gradients={}), tolerance=TOLERANCE["mixtral"])
