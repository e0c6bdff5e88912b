"""Batch norm with local statistics equals batch norm applied shard by shard in eager PyTorch."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import InputError, PlanError
from autopar.cost_models import Cluster, CommunicationModel, RooflineModel
from autopar.frontend.capture import Captured, capture
from autopar.ir.graph import Op
from autopar.ir.mesh import Mesh
from autopar.lowering.training import lower_training
from autopar.passes.batch_norm import with_batch_norm
from autopar.planning.constraints import Force
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from autopar.plans.binding import strategy_of
from autopar.plans.document import Plan
from autopar.pricing.tables import Pricing
from autopar.sharding.strategy import Analysis, Strategy
from autopar.testing.lockstep import LockstepRun
from tests.oracles import (
    assert_same,
    lockstep_steps,
    random_assignment,
    reference_steps,
    state_of,
    to_double,
)
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

DATA_PARALLEL = [Force("data_parallel")]
MESHES: list[dict[str, int]] = [{"x": 2}, {"x": 2, "y": 2}]
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Convolutions with batch norms over images, then one over vectors, with another momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 4, 8)
        self.last = nn.BatchNorm1d(8, momentum=0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        images = F.avg_pool2d(self.norm(self.conv(x)).relu(), 4)
        return F.cross_entropy(self.head(self.last(self.hidden(images.flatten(1))).relu()), y)


class ShardByShard(nn.Module):
    """The batch norm of eager PyTorch on each shard of each micro-batch separately.

    Running statistics are the mean over the shards, and change micro-batch by micro-batch.
    """

    def __init__(self, norm: Any, num_shards: int, num_microbatches: int = 1) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.momentum, self.eps = norm.momentum, norm.eps
        self.num_shards, self.num_microbatches = num_shards, num_microbatches
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name).clone())

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for part in x.chunk(self.num_microbatches):
            means, variances = [], []
            for shard in part.chunk(self.num_shards):
                mean, variance = self.running_mean.clone(), self.running_var.clone()
                results.append(
                    F.batch_norm(
                        shard, mean, variance, self.weight, self.bias, True, self.momentum, self.eps
                    )
                )
                means.append(mean)
                variances.append(variance)
            self.running_mean = torch.stack(means).mean(0)
            self.running_var = torch.stack(variances).mean(0)
            self.num_batches_tracked += 1
        return torch.cat(results)


def make_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 3, 8, 8, generator=generator) * 3 + 1,
        "y": torch.randint(0, 4, (8,), generator=generator),
    }


BATCHES = [to_double(make_batch(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double().train()


@pytest.fixture(scope="module")
def captured(model: nn.Module) -> Captured:
    return with_batch_norm(capture(model, BATCHES[0]), "local")


def shard_by_shard(model: nn.Module, first: int, last: int, num_microbatches: int = 1) -> nn.Module:
    copied = copy.deepcopy(model)
    copied.norm = ShardByShard(copied.norm, first, num_microbatches)
    copied.last = ShardByShard(copied.last, last, num_microbatches)
    return copied


def norms(captured: Captured) -> list[Op]:
    return [op for op in captured.graph.ops if "batch_norm" in op.target_name]


def cluster_of(mesh: dict[str, int]) -> Cluster:
    num = functools.reduce(lambda a, b: a * b, mesh.values())
    return Cluster.preset("cpu", nodes=1, devices_per_node=num)


def num_shards(strategy: Strategy, op: Op) -> int:
    return strategy.mesh.size(strategy.assignment.choices[op.index].axes_of("n"))


@pytest.mark.parametrize("mesh", MESHES)
def test_data_parallel_training_equals_eager_on_each_shard(
    model: nn.Module, captured: Captured, mesh: dict[str, int], groups: Groups
) -> None:
    planned = make_planned(captured, cluster_of(mesh), Space(mesh=mesh), constraints=DATA_PARALLEL)
    num = planned.strategy.mesh.num_devices
    assert [num_shards(planned.strategy, op) for op in norms(captured)] == [num, num]
    expected = reference_steps(shard_by_shard(model, num, num), BATCHES, sgd)
    got = lockstep_steps(planned.strategy, captured, state_of(model), BATCHES, sgd)
    assert_same(got, expected, tolerance=1e-10)
    runner = runner_of(groups(num), captured, planned.program, model, optimizer=sgd)
    assert_same(process_steps(runner, captured, BATCHES), expected, tolerance=1e-10)
    assert set(got.buffers) >= {"norm.running_mean", "last.running_var"}


@pytest.mark.parametrize("seed", range(6))
def test_shards_are_those_of_the_plan(model: nn.Module, captured: Captured, seed: int) -> None:
    analysis = Analysis(captured.graph)
    strategy = Strategy(analysis, random_assignment(analysis, Mesh(("x", "y"), (2, 2)), seed))
    counts = [num_shards(strategy, op) for op in norms(captured)]
    expected = reference_steps(shard_by_shard(model, *counts), BATCHES, sgd)
    got = lockstep_steps(strategy, captured, state_of(model), BATCHES, sgd)
    assert_same(got, expected, tolerance=1e-10)


def test_replicas_hold_the_same_running_statistics(model: nn.Module, captured: Captured) -> None:
    mesh = MESHES[1]
    planned = make_planned(captured, cluster_of(mesh), Space(mesh=mesh), constraints=DATA_PARALLEL)
    run = LockstepRun(planned.program, captured.graph, state_of(model))
    run.step(captured.signature.flatten((), BATCHES[0]))
    for shards in run.buffers.values():
        assert all(torch.equal(shard, shards[0]) for shard in shards)


def test_micro_batches_are_normalised_one_by_one(model: nn.Module, captured: Captured) -> None:
    planned = make_planned(
        captured,
        cluster_of(MESHES[0]),
        Space(mesh=MESHES[0], num_microbatches=2),
        constraints=DATA_PARALLEL,
    )
    run = LockstepRun(lower_training(planned.strategy, 2), captured.graph, state_of(model))
    eager = shard_by_shard(model, 2, 2, num_microbatches=2)
    for batch in BATCHES:
        result = run.step(captured.signature.flatten((), batch))
        assert result.loss[0].item() == pytest.approx(eager(**batch).item(), rel=1e-10)
    named = dict(eager.named_buffers())
    for buffer in run.program.buffers:
        if "running" in buffer.name:
            torch.testing.assert_close(run.buffers[buffer.value][1], named[buffer.name])


class Scaled(nn.Module):
    """One batch norm of an input scaled by a parameter."""

    def __init__(self, *, affine: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, affine=affine)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.norm(self.scale * x) * y).mean()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("dtype", "offset", "tolerance"),
    [(torch.float64, 1000, 1e-10), (torch.float32, 100, 1e-4), (torch.bfloat16, 0, 1e-2)],
)
def test_statistics_of_the_whole_batch_are_those_of_one_device(
    affine: bool, dtype: torch.dtype, offset: int, tolerance: float
) -> None:
    """Also for means far from zero, and in lower precision."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4, 3, 3) + offset, "y": torch.randn(8, 4, 3, 3)}
    batches = [{name: tensor.to(dtype) for name, tensor in batch.items()}]
    model = Scaled(affine=affine).to(dtype).train()
    captured = capture(model, batches[0])
    planned = make_planned(
        captured, cluster_of(MESHES[0]), Space(mesh=MESHES[0]), constraints=DATA_PARALLEL
    )
    assert num_shards(planned.strategy, norms(captured)[0]) == 2
    expected = reference_steps(model, batches, sgd)
    got = lockstep_steps(planned.strategy, captured, state_of(model), batches, sgd)
    assert_same(got, expected, tolerance=tolerance)


def test_nothing_is_communicated_or_priced(model: nn.Module, captured: Captured) -> None:
    mesh = Mesh(("x",), (2,))
    plain = capture(model, BATCHES[0])
    cluster = cluster_of(MESHES[0])
    kinds = {}
    for name, graph in {"global": plain, "local": captured}.items():
        planned = make_planned(graph, cluster, Space(mesh=MESHES[0]), constraints=DATA_PARALLEL)
        kinds[name] = [c for c in planned.program.collectives() if c.phase != "G"]
        pricing = Pricing(
            Analysis(graph.graph), mesh, cluster, RooflineModel(cluster.device),
            CommunicationModel(cluster),
        )  # fmt: skip
        tables = [pricing.op_table(op) for op in norms(graph)]
        internal = sum(
            each.time_s for table in tables for each in table.collectives if each is not None
        )
        assert (internal > 0) == (name == "global")
    # What is left is the loss's own: how many targets there are.
    assert len(kinds["global"]) == len(kinds["local"]) + 2 * 2
    assert all(c.size_bytes <= 8 for c in kinds["local"])


@pytest.mark.usefixtures("reused_workers")
def test_an_option_of_plan_and_compile_that_travels_with_the_plan() -> None:
    torch.manual_seed(0)
    model = Net().double().train()
    expected = reference_steps(shard_by_shard(model, 2, 2), BATCHES[:1], sgd)
    options: dict[str, Any] = {"example_inputs": BATCHES[0], "optimizer": sgd}
    search: dict[str, Any] = {"mesh": {"x": 2}, "constraints": DATA_PARALLEL}
    plan = autopar.plan(model, cluster_of({"x": 2}), BATCHES[0], batch_norm="local", **search)
    how: list[dict[str, Any]] = [
        {"batch_norm": "local", "profile_limit_s": 0, **search},
        {"plan": Plan.from_json(plan.to_json())},
    ]
    for arguments in how:
        compiled = autopar.compile(model, 2, **options, **arguments)
        assert compiled.plan.graph.batch_norm == "local"
        assert "statistics of each shard" in compiled.plan.report("full")
        loss = compiled.train_step(**BATCHES[0])
        assert loss.item() == pytest.approx(expected.losses[0], rel=1e-10)
        state = compiled.full_state_dict()
        torch.testing.assert_close(state["last.running_var"], expected.buffers["last.running_var"])
        trained = copy.deepcopy(model)
        compiled.copy_to(trained)
        evaluated = compiled.eval()(**BATCHES[1])
        torch.testing.assert_close(evaluated, trained.eval()(**BATCHES[1]).detach())


def test_plans_with_the_other_kind_of_statistics(model: nn.Module, captured: Captured) -> None:
    plain = capture(model, BATCHES[0])
    whole = make_planned(plain, cluster_of(MESHES[0]), Space(mesh=MESHES[0])).plan
    assert whole.graph.batch_norm == "global"
    assert "statistics of each shard" not in whole.report("full")
    with pytest.raises(PlanError, match="batch_norm is 'local' here and 'global' in the plan"):
        strategy_of(whole, captured)
    document = json.loads(whole.to_json())
    document["graph"]["batch_norm"] = "other"
    with pytest.raises(PlanError, match="batch_norm"):
        Plan.from_json(json.dumps(document))
    document["graph"]["batch_norm"] = "local"
    with pytest.raises(PlanError, match="fingerprint"):
        strategy_of(Plan.from_json(json.dumps(document)), plain)


@pytest.mark.parametrize("wrong", ["sync", None, True])
def test_unknown_statistics_are_refused(model: nn.Module, wrong: Any) -> None:
    for call in (autopar.plan, autopar.compile):
        with pytest.raises(InputError, match=r"batch_norm='global' .* batch_norm='local'"):
            call(model, cluster_of({"x": 2}), example_inputs=BATCHES[0], batch_norm=wrong)


def test_a_model_without_batch_norm_has_the_same_plan_either_way() -> None:
    linear, x, y = nn.Linear(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    plans = [
        autopar.plan(
            linear, cluster_of({"x": 2}), (x, y), loss_fn=F.mse_loss, batch_norm=statistics
        )
        for statistics in ("global", "local")
    ]
    assert plans[0] == plans[1]
