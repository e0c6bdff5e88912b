"""Gathered parameters on real processes: kept from first use to last, or released after forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autopar
from autopar import Forbid, Force
from autopar.base.errors import InputError, PlanError
from autopar.frontend.capture import capture
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from tests.runtime.conftest import Groups
from tests.runtime.processes import counted_bytes, steps_on_shards
from tests.runtime.test_counted_memory import Deep, Tower, rows
from tests.runtime.test_precision import Net, batch, model_of, state

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
AdamW = functools.partial(torch.optim.AdamW, lr=1e-3)
CLUSTER = autopar.Cluster.preset("cpu", nodes=1, devices_per_node=2)
H100 = autopar.Cluster.preset("h100-sxm", nodes=1, devices_per_node=8)


@pytest.fixture
def on_workers(reused_workers: None) -> Callable[..., Any]:
    """``autopar.compile`` onto the workers of the tests."""
    return functools.partial(autopar.compile, profile_limit_s=0, check_gradients=False)


def eager_steps() -> tuple[list[float], dict[str, Tensor]]:
    model, losses = model_of(), []
    optimizer = SGD(model.parameters())
    for seed in range(5):
        optimizer.zero_grad()
        x, y = batch(seed)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state(model)


FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (2, {"constraints": Force("zero3")}),
    "ZeRO-3, micro-batches": (2, {"constraints": Force("zero3"), "num_microbatches": 2}),
    "hybrid": (
        4,
        {
            "mesh": {"replicate": 2, "shard": 2},
            "constraints": [Force("data_parallel", "replicate"), Force("zero3", "shard")],
        },
    ),
    "pipeline": (
        4, {"constraints": Force("zero3"), "num_stages": 2, "num_microbatches": 4, "mesh": {"x": 2}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_five_steps_are_those_of_eager_and_of_fsdp(
    on_workers: Any, groups: Groups, form: str, released: bool
) -> None:
    num, options = FORMS[form]
    compiled = on_workers(
        model_of(), num, example_inputs=batch(0), loss_fn=F.mse_loss, optimizer=SGD,
        reshard_after_forward=released, **options,
    )  # fmt: skip
    assert any(p.released for p in compiled.program.parameters) == released
    losses = [compiled.train_step(*batch(seed)).item() for seed in range(5)]
    weights = compiled.full_state_dict()
    references = [eager_steps()]
    if form == "ZeRO-3":
        given = [batch(seed) for seed in range(5)], released
        references.append(groups(2).call("resharded_fsdp_steps", *given)[0])
    for expected_losses, expected in references:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def resharded_fsdp_steps(rank: int, batches: list[tuple[Tensor, Tensor]], released: bool) -> Any:
    """Losses and whole weights of training under ``fully_shard``, on one of two ranks."""
    model = model_of()
    mesh = init_device_mesh("cpu", (2,))
    for block in [*model.layers, model]:
        fully_shard(block, mesh=mesh, reshard_after_forward=released)
    return steps_on_shards(model, SGD(model.parameters()), rank, batches)


@pytest.mark.parametrize(
    ("make_model", "options"), [(Deep, {}), (Deep, {"num_microbatches": 2}), (Tower, {})]
)
def test_what_is_held_is_counted_and_less(on_workers: Any, make_model: Any, options: Any) -> None:
    held = []
    for released in (False, True):
        compiled = on_workers(
            make_model(), 2, example_inputs=rows(), constraints=Force("zero3"), optimizer=AdamW,
            reshard_after_forward=released, **options,
        )  # fmt: skip
        held.append(max(compiled.peak_tensor_bytes(**rows())))
        assert counted_bytes(compiled) == pytest.approx(held[-1], rel=0.01)
    assert held[1] < held[0]


class Blocks(nn.Module):
    """Layers whose weights are large and whose activations are small."""

    def __init__(self, num: int = 16, width: int = 8192) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x.square().mean()


def planned(size: str, **options: Any) -> Any:
    with torch.device("meta"):
        model, example = Blocks(), torch.empty(64, 8192)
    return autopar.plan(
        model, H100, example, constraints=[Force("zero3"), autopar.MemoryBudget(size)],
        mesh={"dp": 8}, num_microbatches=1, **options,
    )  # fmt: skip


def test_the_memory_decides_how_many_are_released() -> None:
    """All are kept if they fit; else only the first blocks are released, no more than needed."""
    ample, tight, tighter = planned("40GiB"), planned("5GiB"), planned("4GiB")
    assert ample.released == ()
    assert 0 < len(tight.released) < len(tighter.released) <= 32
    assert "layers.0.weight" in tight.released
    assert "layers.15.weight" not in tight.released
    times = [each.prediction.step_time_s for each in (ample, tight, tighter)]
    assert times == sorted(times)
    assert sum(tight.prediction.memory_bytes.values()) <= 5 * 2**30
    text = f"{len(tight.released)}, gathered for each forward and each backward pass"
    assert text in " ".join(tight.report("full").split())
    assert "released after forward" not in " ".join(ample.report("full").split())
    with pytest.raises(autopar.ConstraintError, match="no strategy found that fits"):
        planned("5GiB", reshard_after_forward=False, offload=False)


def test_a_plan_says_what_is_released_and_is_replayed_with_it(
    on_workers: Any, tmp_path: Path
) -> None:
    example: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": SGD}
    plan = autopar.plan(
        model_of(), CLUSTER, batch(0), constraints=Force("zero3"), reshard_after_forward=True,
        **example,
    )  # fmt: skip
    assert set(plan.released) == {name for name, _ in Net().named_parameters()}
    plan.to_json(tmp_path / "plan.json")
    compiled = on_workers(
        model_of(), 2, example_inputs=batch(0), plan=tmp_path / "plan.json", **example
    )
    assert compiled.plan.to_json() == plan.to_json()
    released = {p.name for p in compiled.program.parameters if p.released}
    assert released == set(plan.released)
    wrong = plan.to_json().replace('"head.bias"\n', '"head.bais"\n')
    with pytest.raises(PlanError, match=r"'head.bais' is released, but.*head.bias"):
        on_workers(
            model_of(), 2, example_inputs=batch(0), plan=autopar.Plan.from_json(wrong), **example
        )


def test_only_what_the_backward_pass_reads_is_gathered_again() -> None:
    """Weights of linear layers, but not their biases; and nothing that is kept."""
    captured = capture(model_of(), batch(0), loss_fn=F.mse_loss)
    found = {}
    for released in (True, False):
        space = Space(reshard_after_forward=released)
        made = make_planned(captured, CLUSTER, space, constraints=[Force("zero3")])
        calls = made.program.collectives()
        found[released] = {
            (c.where, c.kind) for c in calls if c.phase == "I" and c.kind == "all_gather"
        }
    weights = {(f"{name}.weight", "all_gather") for name in ("layers.1", "layers.2", "head")}
    assert weights <= found[True]
    assert not any(name.endswith("bias") for name, _ in found[True] if "norm" not in name)
    assert not found[False]


@pytest.mark.parametrize("constraint", [Force("data_parallel"), Forbid("zero3")])
def test_parameters_that_are_stored_whole_cannot_be_released(constraint: Any) -> None:
    with pytest.raises(InputError, match="reshard_after_forward=True, but constraints forbid"):
        autopar.plan(
            model_of(), CLUSTER, batch(0), loss_fn=F.mse_loss, constraints=constraint,
            reshard_after_forward=True,
        )  # fmt: skip


def test_what_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(InputError, match="reshard_after_forward is 'yes'; it must be True, False"):
        autopar.plan(model_of(), CLUSTER, batch(0), reshard_after_forward="yes")  # type: ignore[arg-type]
