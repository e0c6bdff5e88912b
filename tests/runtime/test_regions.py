"""Blocks whose graphs Inductor compiles train as blocks that run op by op, and as eager PyTorch.

Every model under every strategy: ``make exhaustive``.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar.base.errors import InputError, NonFiniteError, PlanError, StepError
from autopar.comm.ops import RAW_OPS
from autopar.cost_models import Cluster, ProfileStore
from autopar.cost_models.store import RegionTime
from autopar.ir.random_ops import is_random
from autopar.lowering.program import lower
from autopar.lowering.regions import compilable, regions_of, with_compiled
from autopar.lowering.types import RankProgram, TensorMeta, graphs_of
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from autopar.plans.document import Plan
from autopar.runtime.machine.regions import MAX_VARIANTS, RegionFunction
from autopar.runtime.measure.kernel_choice import MARGIN, with_kernels
from autopar.runtime.measure.region_times import RegionCall, region_times
from tests.effort import EXHAUSTIVE
from tests.equality.test_known_strategies import STRATEGIES, case_of, divides, planned
from tests.models.zoo import MODELS, MORE_MODELS
from tests.runtime.conftest import Groups
from tests.runtime.processes import process_steps, runner_of

PAIRS = (
    [(n, s) for n in (*MODELS, *MORE_MODELS) for s in STRATEGIES if divides(n, s)]
    if EXHAUSTIVE
    else [("mlp", "zero3 x tensor on 2x2")]
)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def all_compiled(program: RankProgram) -> RankProgram:
    return with_compiled(program, compilable(program))


@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_compiled_blocks_equal_eager_pytorch(name: str, strategy: str, groups: Groups) -> None:
    case, program = case_of(name), all_compiled(lower(planned(name, strategy).strategy))
    assert any(kernel.compiled for kernel in program.kernels)
    group = groups(program.mesh.num_devices)
    runner = runner_of(group, case.captured, program, case.model, optimizer=case.optimizer)
    assert runner.not_compiled == []
    case.compare(process_steps(runner, case.captured, case.batches))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm", "mixtral", "dlrm"])
def test_regions_leave_out_what_must_run_as_it_is(name: str) -> None:
    """Each call is in at most one region, none of which has a collective, a random op other than a
    dropout, or an op that reads at indices; and what a region reads precedes it."""
    program = lower(planned(name, "searched on 2").strategy)
    for kernel in program.kernels:
        for _, module in graphs_of(kernel):
            regions = regions_of(module, on_cpu=True)
            inside = [node for region in regions for node in region.nodes]
            assert len(inside) == len(set(inside))
            for node in inside:
                assert node.target not in RAW_OPS
                assert not is_random(node) or "dropout" in str(node.target)
                assert not any(word in str(node.target) for word in ("embedding", "index"))
            check_order(module, regions)


def check_order(module: fx.GraphModule, regions: Any) -> None:
    """Run the graph's calls and regions in order by name: each has what it reads."""
    home = {node: region for region in regions for node in region.nodes}
    known: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node in home and node is home[node].last:
            assert known.issuperset(home[node].inputs)
            known.update(home[node].outputs)
        elif node not in home:
            assert known.issuperset(node.all_input_nodes)
            known.add(node)


class Dropped(nn.Module):
    """Dropout, layer norms and an embedding; its labels can be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(8))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x) * scale
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, (4, 6), generator=drawn)
    return ids, ids.roll(1), torch.ones((), dtype=torch.float64)


def compiled_model(kernels: str | None, num_devices: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return autopar.compile(
        Dropped().double(), num_devices, example_inputs=batch(0), optimizer=sgd, seed=3,
        profile_limit_s=0, kernels=kernels, **options,
    )  # fmt: skip


def graphs_compiled(compiled: Any) -> list[Any]:
    return [graph for kernel in compiled.program.kernels for graph in kernel.compiled]


DATA_PARALLEL: dict[str, Any] = {"constraints": [autopar.Force("data_parallel")]}


@pytest.mark.usefixtures("reused_workers")
def test_compiled_blocks_draw_fail_and_replay_as_others(tmp_path: Path) -> None:
    """Dropout draws the same numbers; an op that raises and a value that is not finite are found
    as in op-by-op execution, and training continues; the plan says what is compiled, and a replay
    compiles the same."""
    eager = compiled_model(None, **DATA_PARALLEL)
    expected = [eager.train_step(*batch(i)).item() for i in range(3)]
    compiled = compiled_model("compiled", **DATA_PARALLEL)
    assert "W compiled as requested" in " ".join(compiled.report("full").split())
    losses = [compiled.train_step(*batch(0)).item()]
    ids, labels, scale = batch(1)
    with pytest.raises(StepError, match="Target 99 is out of bounds"):
        compiled.train_step(ids, labels.where(labels != labels[0, 0], 99), scale)
    with pytest.raises(NonFiniteError, match="given to it: input 'args_2' has nan"):
        compiled.train_step(ids, labels, scale * torch.nan)
    losses += [compiled.train_step(*batch(i)).item() for i in (1, 2)]
    assert losses == pytest.approx(expected, rel=1e-12)
    compiled.plan.to_json(tmp_path / "plan.json")
    again = compiled_model(None, plan=tmp_path / "plan.json")
    assert again.plan == compiled.plan
    assert graphs_compiled(again) == graphs_compiled(compiled) != []
    assert again.train_step(*batch(0)).item() == losses[0]


def test_without_a_compiler_blocks_run_op_by_op_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = compiled_model(None)
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    said = (
        r"run op by op, because Inductor cannot .*: F of block 'table\+layers\.0', .*No working C"
    )
    with pytest.warns(UserWarning, match=said):
        compiled = compiled_model("compiled")
    assert re.search(said, " ".join(compiled.report("full").split()))
    with eager, compiled:
        assert compiled.train_step(*batch(0)).item() == eager.train_step(*batch(0)).item()


def region_function(
    function: Any, *operands: Tensor
) -> tuple[RegionFunction, list[tuple[TensorMeta, ...]]]:
    module = make_fx(function)(*operands)
    (region,) = regions_of(module, on_cpu=True)
    made = RegionFunction(region.module(), torch.device("cpu"), "a region")
    return made, [region.operands]


def test_results_of_a_region_share_no_memory_that_eager_ones_do_not() -> None:
    """Equal values, which a compiler computes once, are separate; copies are copies."""
    x = torch.randn(64, 64)
    function, [metas] = region_function(lambda x: (x.sin() + 1, x.sin() + 1, x.clone()), x)
    function.compile(metas)
    for _ in range(2):
        results = function.run(x)
        assert len({t.untyped_storage().data_ptr() for t in (x, *results)}) == 4
        for result, expected in zip(results, (x.sin() + 1, x.sin() + 1, x)):
            torch.testing.assert_close(result, expected)


def test_operands_in_another_layout_are_computed_right() -> None:
    x = torch.randn(6, 6, 6, 6)
    function, [metas] = region_function(lambda x: ((x * 2).cos() + 1,), x)
    function.compile(metas)
    layouts = [x, x.transpose(0, 1), x.transpose(1, 2), x.transpose(2, 3), x.transpose(0, 3)]
    for layout in layouts[:MAX_VARIANTS]:
        torch.testing.assert_close(function.run(layout)[0], (layout * 2).cos() + 1)
    with pytest.warns(UserWarning, match=f"a region runs op by op: .* {MAX_VARIANTS} layouts"):
        torch.testing.assert_close(function.run(layouts[-1])[0], (layouts[-1] * 2).cos() + 1)


def test_norms_keep_statistics_in_float32() -> None:
    """Inductor would round those of a batch norm in bfloat16."""
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
    x, labels = torch.randn(8, 16), torch.arange(8) % 4
    losses: dict[str, list[float]] = {}
    for kernels in ("eager", "compiled"):
        with autopar.compile(
            model, ["cpu"], example_inputs=(x, labels), kernels=kernels, precision="bf16",
            loss_fn=nn.functional.cross_entropy, optimizer=sgd, profile_limit_s=0,
        ) as compiled:  # fmt: skip
            losses[kernels] = [compiled.train_step(x, labels).item() for _ in range(3)]
            if kernels == "compiled":
                assert "rounds the statistics" in " ".join(compiled.report("full").split())
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-2)


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(InputError, match=r"kernels is 'compild'; .*did you mean 'compiled'"):
        compiled_model("compild")
    with pytest.raises(InputError, match="kernels='compiled' given with plan="):
        compiled_model("compiled", plan="plan.json")
    program = lower(planned("mlp", "searched on 2").strategy)
    with pytest.raises(PlanError, match=r"'layers\.9' is no block of the program"):
        with_compiled(program, {"layers.9": "F"})


def gelu_region() -> RegionCall:
    module = make_fx(lambda x: (torch.nn.functional.gelu(x * 2) + 1,))(torch.randn(64, 64))
    (region,) = regions_of(module, on_cpu=True)
    return RegionCall(module=region.module(), operands=region.operands)


def test_regions_are_measured_once_on_as_many_processes_as_train(tmp_path: Path) -> None:
    call, said = gelu_region(), list[str]()
    for _ in range(2):
        found = region_times(
            [call], Cluster.detect(2).device, tmp_path / "times.sqlite3", limit_s=60.0,
            start_timeout_s=120.0, progress=said.append,
        )  # fmt: skip
        times = found[str(call)]
        assert isinstance(times, RegionTime)
        assert times.is_sane()
    assert said == ["compile and measure up to 1 regions, at most 60 s"]
    assert str(call) == str(gelu_region())


def test_the_faster_way_of_each_graph_is_chosen(tmp_path: Path) -> None:
    """By stored times: compiled if it is faster by more than the margin, op by op if it is not or
    if a region of the graph has no time, whose reason the report gives."""
    cluster, path = Cluster.preset("cpu", nodes=1, devices_per_node=2), tmp_path / "times.sqlite3"
    planned = make_planned(case_of("mlp").captured, cluster, Space(mesh={"x": 2}))
    choose = functools.partial(
        with_kernels, planned.plan, planned.program, "auto", path, start_timeout_s=60.0,
        progress=lambda _: None,
    )  # fmt: skip
    unmeasured = choose(limit_s=0.0)
    assert not any(unmeasured.compiled.values())
    assert "F op by op: not measured" in " ".join(unmeasured.report("full").split())
    ratios = {"F": 0.5, "I": 1 - MARGIN / 2, "W": 2.0}
    with ProfileStore(path, cluster.device) as store:
        for kernel in planned.program.kernels:
            for phase, module in graphs_of(kernel):
                for region in regions_of(module, on_cpu=True):
                    call = RegionCall(module=region.module(), operands=region.operands)
                    store.put_region(
                        str(call),
                        RegionTime(
                            eager_s=1.0, compiled_s=ratios[phase], spread=0.0, num_samples=5
                        ),
                    )
    chosen = choose(limit_s=60.0)
    assert chosen.compiled
    assert {phase for phases in chosen.compiled.values() for phase in phases} == {"F"}
    assert "F compiled (1.00 s op by op, 500.00 ms compiled, measured)" in " ".join(
        chosen.report("full").split()
    )
    assert Plan.from_json(chosen.to_json()) == chosen


@pytest.mark.skipif(not EXHAUSTIVE, reason="compiles for half a minute: make exhaustive")
def test_compiled_arrays_of_models_equal_those_that_run_op_by_op() -> None:
    def losses(kernels: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).double()
            for _ in range(3)
        ]
        x, y = torch.randn(12, 8, dtype=torch.float64), torch.randint(4, (12,))
        with autopar.compile(
            models, 1, example_inputs=(x, y), loss_fn=nn.functional.cross_entropy,
            optimizer=[functools.partial(torch.optim.SGD, lr=lr) for lr in (0.1, 0.2, 0.3)],
            profile_limit_s=0, kernels=kernels,
        ) as array:  # fmt: skip
            return [array.train_step(x, y) for _ in range(3)]

    torch.testing.assert_close(losses("compiled"), losses(None), rtol=1e-12, atol=0)
