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
from autopar.plans.alternatives import alternatives
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


class Bank(nn.Module):
    """A layer beside a large buffer, and a parameter that nothing reads."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.layer, self.unused = (nn.Linear(1024, 1024, device="meta") for _ in range(2))
        self.register_buffer("bank", torch.empty(num_rows, 1024, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + self.bank[0]).square().mean()


def test_buffers_are_part_of_every_estimate_and_must_fit_alone() -> None:
    where, x = cluster("a100-80"), torch.empty(64, 1024, device="meta")
    usable, row_bytes = where.usable_memory_bytes, 4 * 1024
    plan = autopar.plan(Bank(int(0.8 * usable) // row_bytes), where, (x,))
    buffers = plan.prediction.memory_bytes["buffers"]
    assert buffers > 0.79 * usable
    estimates = [each.memory_bytes for each in alternatives(plan) if each.memory_bytes is not None]
    assert len(estimates) > 3
    for size in (plan.search.estimated_bytes, *estimates):
        assert buffers < size < 1.001 * buffers
    rows = int(1.01 * usable) // row_bytes
    words = rf"buffers take {rows * row_bytes:,} bytes, and every device holds all of them"
    with pytest.raises(ConstraintError, match=words):
        autopar.plan(Bank(rows), where, (x,))


def test_a_parameter_that_nothing_reads_has_no_state_and_no_strategy() -> None:
    plan = autopar.plan(Bank(1), cluster("a100-80"), (torch.empty(64, 1024, device="meta"),))
    used = 1024 * 1024 + 1024
    assert plan.graph.unused == ("unused.weight", "unused.bias")
    assert plan.prediction.memory_bytes["optimizer_state"] <= 4 * 2 * used + 4096
    blocks = str(plan).partition("strategy by block")[2].partition("memory of a device")[0]
    assert "TP" not in blocks
    explained = " ".join(str(plan.explain("unused")).split())
    assert "unused.weight unused" in explained
    assert "unused 2 parameters, which nothing reads" in explained
