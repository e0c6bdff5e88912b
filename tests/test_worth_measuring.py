"""What is measured before a search suffices for its decision."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from autopar.cost_models import (
    Cluster,
    Collective,
    CommunicationModel,
    CostError,
    Estimate,
    OpCall,
    Profiler,
    ProfileStore,
    RooflineModel,
)
from autopar.cost_models.store import OpTime
from autopar.frontend.capture import capture
from autopar.passes.prepare import Prepared, prepare
from autopar.planning.planner import make_planned
from autopar.planning.space import Space, space_of
from autopar.planning.worth_measuring import (
    NEGLIGIBLE,
    calls_worth_measuring,
    collectives_worth_measuring,
)
from autopar.pricing.local_calls import calls_of
from tests.models.zoo import build

CLUSTER = Cluster.preset("cpu", nodes=1, devices_per_node=2)
MODELS = ("mlp", "gpt2", "resnet")


def prepared_of(name: str) -> Prepared:
    model, make_batch = build(name)
    return prepare(capture(model, make_batch(0)))


def measured(calls: Sequence[OpCall], seed: int) -> Profiler:
    """Times that differ from the analytical ones by a factor of up to two, drawn for each call."""
    roofline = RooflineModel(CLUSTER.device)
    store = ProfileStore(None, CLUSTER.device)
    for call in calls:
        generator = random.Random(f"{seed} {call}")
        try:
            base = roofline.estimate(call)
        except CostError:
            continue
        forward, input_grad, weight_grad = (
            2 ** generator.uniform(-1, 1) * part
            for part in (base.forward_s, base.input_grad_s, base.weight_grad_s)
        )
        times = OpTime(
            forward_s=forward, input_grad_s=input_grad, weight_grad_s=weight_grad, spread=0.0,
            num_samples=9,
        )  # fmt: skip
        store.put(call, times)
    return Profiler(store, CLUSTER.device, measuring=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_best_step_is_that_of_all_calls_measured(name: str) -> None:
    prepared = prepared_of(name)
    every = [*calls_of(prepared.analysis, Space().meshes(CLUSTER))]
    worth = calls_worth_measuring(prepared, CLUSTER, Space())
    assert set(worth) <= set(every)
    assert len(worth) < len(every) or name == "mlp"  # so small that every call matters
    for seed in range(3):
        best_s, found_s = (
            make_planned(
                prepared, CLUSTER, compute=measured(calls, seed)
            ).plan.prediction.step_time_s
            for calls in (every, worth)
        )
        # A negligible call's price is wrong by at most three of its analytical one.
        assert found_s == pytest.approx(best_s, rel=3 * NEGLIGIBLE)


class Asked(CommunicationModel):
    """Notes the collectives that are priced."""

    def __init__(self) -> None:
        super().__init__(CLUSTER)
        self.asked: set[tuple[str, int, int]] = set()

    def estimate(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> Estimate:
        if size_bytes and len(ranks) > 1:
            self.asked.add((kind, size_bytes, len(ranks)))
        return super().estimate(kind, size_bytes, ranks)


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_every_collective_of_a_search_is_measured(name: str, schedule: str | None) -> None:
    prepared, communication = prepared_of(name), Asked()
    space = space_of(2, schedule=schedule)
    make_planned(prepared, CLUSTER, space, communication=communication)
    grid = collectives_worth_measuring(prepared, CLUSTER, space)
    assert communication.asked
    for kind, size_bytes, num_ranks in communication.asked:
        assert kind in grid.kinds
        assert size_bytes <= grid.sizes_bytes[-1]
        assert num_ranks in grid.sizes_of(2)
    assert (Collective.SEND_RECV in grid.kinds) is (schedule == "auto")
