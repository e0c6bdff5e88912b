"""A device's memory bounds all that a step uses; a user's budget bounds the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

import autopar
from autopar.base.errors import ConstraintError
from autopar.cost_models import Cluster
from autopar.cost_models.allocator import device_bytes
from autopar.plans.document import Plan


class Deep(nn.Module):
    """Layers that keep a quarter of a gigabyte of activations, which a CPU's heap retains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, device="meta") for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def cluster(kind: str, usable_bytes: int | None = None) -> Cluster:
    found = Cluster.preset(kind, nodes=1, devices_per_node=2)
    if usable_bytes is None:
        return found
    memory = found.memory_reserve_bytes + usable_bytes
    return structs.replace(found, device=structs.replace(found.device, memory_bytes=memory))


def planned(where: Cluster, **options: Any) -> Plan:
    return autopar.plan(Deep(), where, (torch.empty(1 << 16, 256, device="meta"),), **options)


def sizes(plan: Plan) -> tuple[int, int]:
    """Bytes of the tensors, and of the device."""
    memory = plan.prediction.memory_bytes
    return sum(memory.values()), device_bytes(memory, plan.cluster.device)


@pytest.mark.parametrize("kind", ["cpu", "a100-80"])
def test_all_that_a_step_takes_fits_the_device(kind: str) -> None:
    tensors, taken = sizes(planned(cluster(kind)))
    assert taken > 1.04 * tensors
    exact = planned(cluster(kind, taken))
    assert sizes(exact)[1] <= taken
    usable = (tensors + taken) // 2
    with pytest.raises(ConstraintError, match=f"fits {usable:,} bytes per device"):
        planned(cluster(kind, usable), num_microbatches=1, offload=False)
    in_parts = planned(cluster(kind, usable))
    assert in_parts.schedule.num_microbatches > 1
    assert sizes(in_parts)[1] <= usable


@pytest.mark.parametrize("kind", ["cpu", "a100-80"])
def test_a_budget_is_for_tensors(kind: str) -> None:
    free = planned(cluster(kind))
    tensors, _ = sizes(free)
    kept = planned(cluster(kind), constraints=[autopar.MemoryBudget(tensors)])
    assert kept.ops == free.ops
    with pytest.raises(ConstraintError, match=f"fits {tensors // 2:,} bytes per device"):
        planned(
            cluster(kind), constraints=[autopar.MemoryBudget(tensors // 2)], num_microbatches=1,
            offload=False,
        )  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(m, n, device="meta") for m, n in ((256, 512), (512, 256)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_a_plan_that_recomputes_is_compared_with_no_strategy_that_cannot_run() -> None:
    model = nn.Sequential(*(Block() for _ in range(8)), Loss())
    options: dict[str, Any] = {
        "example_inputs": (torch.empty(1 << 16, 256, device="meta"),),
        "num_microbatches": 1, "offload": False,
    }  # fmt: skip
    free = autopar.plan(model, cluster("a100-80"), **options)
    tight = cluster("a100-80", int(0.9 * sizes(free)[1]))
    plan = autopar.plan(model, tight, **options)
    assert plan.recomputation
    known = plan.search.baselines["data parallel"]
    assert known.time_s < plan.prediction.step_time_s
    assert known.memory_bytes < tight.usable_memory_bytes  # by its estimate it fits
    with pytest.raises(ConstraintError, match="bytes per device"):
        autopar.plan(
            model, tight, constraints=[autopar.Force("data_parallel")], recompute="none", **options
        )
    first, *others = str(plan.report()).splitlines()
    assert first.endswith("no known strategy fits")
    assert any("DDP" in line and "does not fit" in line for line in others)


def test_a_report_holds_what_the_device_has_against_what_a_step_takes() -> None:
    for kind, name in (("cpu", "process grows by"), ("a100-80", "with fragmentation")):
        plan = planned(cluster(kind))
        (line,) = [line for line in str(plan).splitlines() if name in line]
        assert " of " in line
