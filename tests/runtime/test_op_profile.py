"""Ops of measured steps beside their predictions, and the clock that times them."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import traceback

import autopar
from autopar.base.units import format_seconds
from autopar.cost_models.work import Family
from autopar.lowering.differentiate import trace_joint
from autopar.lowering.op_marks import (
    Gradient,
    gradient_of,
    mark_gradient,
    marking,
    op_place,
)
from autopar.lowering.types import Role, TensorMeta
from autopar.runtime.machine.moments import HostMoment, moments_of
from autopar.runtime.machine.op_clock import OpClock, OpSeconds, timed_graphs
from autopar.runtime.machine.protocols import Phase
from autopar.runtime.measure.op_prices import op_prices
from autopar.runtime.op_profile import BETWEEN, OpProfile, Pass, op_profiles
from autopar.runtime.op_tables import REST, worst_groups
from autopar.runtime.profile import Profile
from autopar.runtime.step.timing import Timing
from tests.models.zoo import build

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


def by_name(profile: Profile, direction: Pass) -> dict[str, OpProfile]:
    """The ops of a pass by name."""
    found = [o for o in profile.ops if o.direction is direction and o.operator != BETWEEN]
    named = {op.name: op for op in found}
    assert len(named) == len(found)
    return named


def test_every_op_that_computes_is_timed_in_both_directions(
    profiled: tuple[Any, Profile],
) -> None:
    compiled, profile = profiled
    forward, backward = by_name(profile, Pass.FORWARD), by_name(profile, Pass.BACKWARD)
    planned = [op for module in compiled.plan.modules for op in module.ops]
    assert set(forward) | set(backward) <= set(planned)
    timed = ("addmm", "layer_norm", "embedding", "scaled_dot_product_attention", "tanh")
    wanted = {name for name in planned if name.startswith(timed)}
    assert wanted >= {"addmm", "tanh"}
    for found in (forward, backward):
        assert wanted <= set(found)
        assert all(op.measured_s > 0 for op in found.values())
    sums = {name for name, op in forward.items() if op.block == "batch sums"}
    assert sums
    assert not sums & set(backward)


def test_predictions_add_up_to_those_of_the_plan(profiled: tuple[Any, Profile]) -> None:
    """By module and by block: the sums of its ops' prices, without the communication in them."""
    compiled, profile = profiled
    forward, backward = by_name(profile, Pass.FORWARD), by_name(profile, Pass.BACKWARD)
    checked = 0
    for module in compiled.plan.modules:
        if set(module.ops) <= set(forward):  # views need no call of their own in some forms
            checked += 1
            found = sum(forward[op].predicted_s for op in module.ops)
            assert found == pytest.approx(module.forward_s, rel=1e-6)
            found = sum(backward[op].predicted_s for op in module.ops if op in backward)
            assert found == pytest.approx(module.backward_s, rel=1e-6)
    assert checked > 3
    assert all(op.predicted_s == 0 for op in profile.ops if op.operator == BETWEEN)


def test_the_worst_predictions_are_named_with_the_numbers_of_the_ops(
    profiled: tuple[Any, Profile],
) -> None:
    _, profile = profiled
    groups = worst_groups(profile.timed, most=10**6)
    assert sorted(o.name for g in groups for o in g.ops) == sorted(o.name for o in profile.timed)
    off = [abs(group.measured_s - group.predicted_s) for group in groups]
    assert off == sorted(off, reverse=True)
    text = "".join(str(profile).split())
    first = profile.worst_ops(1)[0]
    assert first == groups[0]
    assert format_seconds(first.measured_s).replace(" ", "") in text
    assert first.ratio is None or f"{first.ratio:.2f}" in text
    total_s = sum(op.measured_s for op in profile.ops)
    assert f"opbyop:{format_seconds(total_s)}".replace(" ", "") in text
    assert max(map(len, str(profile).splitlines())) <= 100
    data = profile.ops_data()
    assert data.series[1].values[0] == pytest.approx(first.measured_s)
    _, axes = profile.figure("ops")
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[axes.get_xlabel()]
    drawn = [patch.get_width() * scale for patch in axes.patches]
    assert drawn == pytest.approx([v for s in data.series for v in s.values if v is not None])


def test_ops_are_within_the_passes_that_they_are_part_of(profiled: tuple[Any, Profile]) -> None:
    compiled, profile = profiled
    forward = [op for op in profile.ops if op.direction is Pass.FORWARD]
    backward = [op for op in profile.ops if op.direction in (Pass.BACKWARD, Pass.RECOMPUTED)]
    staged = {b.name for b in compiled.program.blocks if b.role is Role.EVERY}
    for direction, ops in ((Pass.FORWARD, forward), (Pass.BACKWARD, backward)):
        passes = [each for each in profile.passes if each.direction is direction]
        assert len(passes) == compiled.plan.schedule.num_devices
        for is_between in (False, True):
            spent = [
                op.measured_s
                for op in ops
                if op.block in staged and (op.operator == BETWEEN) == is_between
            ]
            found = sum(each.between_s if is_between else each.ops_s for each in passes)
            assert found == pytest.approx(sum(spent))
        for each in passes:
            assert 0 < each.ops_s <= each.ops_s + each.between_s <= each.measured_s
            cells = each.measured_s, each.ops_s, each.between_s, each.outside_s
            assert sum(cells[1:]) == pytest.approx(cells[0])
            text = "  ".join(map(format_seconds, cells)).replace(" ", "")
            assert text in str(profile).replace(" ", "")


def test_updates_and_the_rest_are_among_the_predictions(profiled: tuple[Any, Profile]) -> None:
    compiled, profile = profiled
    rest = profile.timed[-1]
    assert profile.timed[:-1] == profile.ops
    assert (rest.name, rest.direction) == (REST, Pass.UPDATE)
    assert rest.measured_s == max(rank.rest_s for rank in profile.ranks)
    assert rest.predicted_s == compiled.plan.prediction.update_s > 0
    longest = dataclasses.replace(profile, step_times_s=(100.0,))
    assert [group.label for group in longest.worst_ops(1)] == [REST]
    assert longest.sections()[-1].rows[0][0] == REST
    assert REST in longest.ops_data().rows


def test_the_same_numbers_feed_the_calibration(profiled: tuple[Any, Profile]) -> None:
    compiled, profile = profiled
    num = compiled.plan.schedule.num_microbatches
    calls = [op.measured_call for op in profile.ops if op.measured_call is not None]
    assert calls
    for op in profile.ops:
        if op.measured_call is not None:
            assert op.measured_call[1].forward_s * num == pytest.approx(op.measured_s)
            assert op.measured_call[1].is_sane()
    wanted = autopar.calibrate(compiled.plan.cluster.device, calls)
    assert profile.calibration() == wanted
    assert wanted.uncertainty
    for name, op in by_name(profile, Pass.BACKWARD).items():
        if name.startswith(("addmm", "layer_norm", "tanh")):
            times = by_name(profile, Pass.FORWARD)[name].times
            assert times is not None
            backward_s = times.input_grad_s + times.weight_grad_s
            assert backward_s * num == pytest.approx(op.measured_s)
            assert times.input_grad_s > 0
            assert (times.weight_grad_s > 0) is not name.startswith("tanh")
    forward_only = [
        (call, dataclasses.replace(times, input_grad_s=0.0, weight_grad_s=0.0))
        for call, times in calls
    ]
    less = autopar.calibrate(compiled.plan.cluster.device, forward_only)
    for family, error in less.uncertainty.items():
        assert wanted.uncertainty[family].num_samples >= error.num_samples
    assert wanted.uncertainty[Family.MATMUL].num_samples > 2 * sum(
        call.target == "aten.addmm.default" for call, _ in calls
    )


EXECUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {}),
    "mlp whose weights are updated early": ("mlp", {"update": "early"}),
    "gpt2 that recomputes": ("gpt2", {"recompute": "full", "num_microbatches": 2}),
}


@pytest.mark.parametrize("name", EXECUTED)
def test_the_rows_of_a_block_add_up_to_the_time_of_its_graphs(name: str) -> None:
    kind, options = EXECUTED[name]
    model, make_batch = build(kind)
    with autopar.compile(
        model, 1, make_batch(0), optimizer=ADAM, profile_limit_s=0.0, **options
    ) as compiled:
        compiled.train_step(**make_batch(1))
        with compiled._measurement((), make_batch(1), local=False) as measurement:
            (step,) = measurement.steps(1, Timing.OPS)
        raw = [[rank.ops for rank in step.ranks]]
        prices = op_prices(compiled.plan, compiled._captured)
        program, device = compiled.program, compiled.plan.cluster.device
        rows, num = op_profiles(prices, program, raw, device), compiled.plan.schedule
    spent, found = defaultdict[str, float](float), defaultdict[str, float](float)
    for each in raw[0][0]:
        spent[program.blocks[each.block].name] += each.time_s
    for op in rows:
        found[op.block] += op.measured_s
        assert (op.operator == BETWEEN) == (op.name == op.block) == (op.source is None)
    assert found == pytest.approx(spent)
    assert {(each.block, each.graph) for each in raw[0][0]} == {
        (place, graph)
        for place, block in enumerate(program.blocks)
        for graph, module in enumerate(timed_graphs(program.kernels[block.kernel]))
        if module is not None
        and block.role is not Role.FIXED  # it ran in the first step
        and (graph != Phase.WEIGHT or not program.kernels[block.kernel].weight_steps)
        and any(node.op == "call_function" for node in module.graph.nodes)
    }
    backward = {op.name for op in rows if op.direction is Pass.BACKWARD}
    trained = [module for module in compiled.plan.modules if module.weight_grad_s]
    assert trained
    assert all(backward & set(module.ops) for module in trained)
    recomputed_s = {
        block: group.time_s for group in compiled.plan.recomputation for block in group.blocks
    }
    for block, time_s in recomputed_s.items():
        again = [op for op in rows if op.block == block and op.direction is Pass.RECOMPUTED]
        predicted_s = sum(op.predicted_s for op in again)
        assert predicted_s == pytest.approx(time_s * num.num_microbatches, rel=1e-6)
    assert bool(recomputed_s) == ("recompute" in options)


def test_gradients_of_inputs_and_of_parameters_are_told_apart() -> None:
    """Those of parameters are what no gradient of an earlier layer is computed from."""
    num_layers = 3
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    compiled = autopar.compile(
        model, 1, (torch.ones(4, 8), torch.ones(4, 8)), loss_fn=nn.functional.mse_loss,
        optimizer=ADAM, profile_limit_s=0.0,
    )  # fmt: skip
    with compiled:
        program = compiled.program
    products = [
        gradient_of(node)
        for block in program.blocks
        for module in timed_graphs(program.kernels[block.kernel])[1:3]
        if module is not None
        for node in module.graph.nodes
        if node.target is torch.ops.aten.mm.default
    ]
    assert products.count(Gradient.WEIGHT) == num_layers
    assert products.count(Gradient.INPUT) == num_layers - 1
    assert len(products) == 2 * num_layers - 1


def test_a_gradient_that_cannot_be_traced_leaves_no_mark() -> None:
    """Neither behind it nor when its error, and with it autograd's graph, is forgotten."""

    def function(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        made = torch.igamma(operands[0], operands[0].detach())
        mark_gradient(0, [made], operands)
        return (made,)

    meta = TensorMeta(shape=(4,), stride=(1,), dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="igamma") as raised:
        trace_joint(function, [meta], [True], [False], torch.device("cpu"))
    with marking(1):
        del raised
        gc.collect()
        assert traceback.get_current_meta()["custom"] == {"op_place": 1}
    assert "custom" not in traceback.get_current_meta()


def test_training_goes_on_untimed(profiled: tuple[Any, Profile]) -> None:
    compiled, _ = profiled
    assert all(not rank.ops and not rank.waits for rank in compiled._runner.step_times())


class Ticks:
    """Moments of a clock that moves on by one at each."""

    now = 0

    def __init__(self) -> None:
        Ticks.now += 1
        self.at = Ticks.now

    def elapsed_time(self, later: Ticks) -> float:
        return 1e3 * (later.at - self.at)


def test_spans_are_summed_over_micro_batches_and_read_once() -> None:
    clock = OpClock(Ticks)
    for _ in range(3):
        clock.note(4, Phase.WEIGHT, 7, Ticks(), Ticks())
    clock.note(4, Phase.WEIGHT, 8, Ticks(), Ticks())
    cpu = torch.device("cpu")
    assert clock.seconds(cpu) == [(4, Phase.WEIGHT, 7, 3.0), (4, Phase.WEIGHT, 8, 1.0)]
    assert clock.seconds(cpu) == []
    assert moments_of(cpu) is HostMoment


def test_the_mean_step_of_the_slowest_rank_of_each_stage_counts(
    profiled: tuple[Any, Profile],
) -> None:
    """As if both stages of the pipeline ran the block, for half of the micro-batches each."""
    compiled, program = profiled[0], profiled[0].program
    staged = {b.name for b in program.blocks if b.role is Role.EVERY}
    prices = op_prices(compiled.plan, compiled._captured)
    price = [each for each in prices if each.block in staged and each.estimate.forward_s][4]
    block = [each.name for each in program.blocks].index(price.block)
    nodes = program.kernels[program.blocks[block].kernel].forward.graph.nodes
    node = next(n for n, each in enumerate(nodes) if op_place(each) == price.place)
    at = block, Phase.FORWARD, node
    steps = [
        [[(*at, 1.0)], [(*at, 4.0)]],
        [[(*at, 2.0)], [(*at, 6.0)]],
        [[(*at, 9.0)], [(*at, 5.0)]],
    ]
    made = [[[OpSeconds(*each) for each in rank] for rank in step] for step in steps]
    (op,) = op_profiles([price], program, made, compiled.plan.cluster.device)
    assert (op.name, op.measured_s) == (price.name, 4.0 + 5.0 if compiled.plan.is_pipeline else 5.0)
    assert op.predicted_s == price.estimate.forward_s


@pytest.mark.gpu
def test_events_time_kernels_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    moment = moments_of(device)
    clock = OpClock(moment)
    x = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        x @ x
    start = moment()
    for _ in range(10):
        y = x @ x
    clock.note(0, Phase.FORWARD, 0, start, moment())
    ((_, _, _, time_s),) = clock.seconds(device)
    assert y.isfinite().all()
    assert 10 * 2 * 4096**3 / time_s < 2e15  # no faster than any device is


@pytest.mark.gpu
def test_ops_are_timed_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model, make_batch = build("gpt2")
    with autopar.compile(model, "cuda:0", make_batch(0), optimizer=ADAM) as compiled:
        profile = compiled.profile(num_steps=2, **make_batch(1))
    assert profile.ops
    assert all(op.measured_s > 0 for op in profile.ops)
    assert {op.direction for op in profile.ops} >= {Pass.FORWARD, Pass.BACKWARD}
