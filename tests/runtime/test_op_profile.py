"""Ops of measured steps beside their predictions, and the clock that times them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopar
from autopar.base.units import format_seconds
from autopar.lowering.joint import op_place
from autopar.runtime.machine.op_clock import HostMoment, OpClock, OpSeconds, moments_of
from autopar.runtime.machine.protocols import Phase
from autopar.runtime.measure.op_prices import op_prices
from autopar.runtime.op_profile import BACKWARD, op_profiles, worst_groups
from autopar.runtime.profile import Profile
from tests.models.zoo import build

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


def test_every_op_that_computes_and_every_backward_pass_is_timed(
    profiled: tuple[Any, Profile],
) -> None:
    compiled, profile = profiled
    forward = {op.name: op for op in profile.ops if op.operator != BACKWARD}
    backward = [op for op in profile.ops if op.operator == BACKWARD]
    assert len(forward) + len(backward) == len(profile.ops)
    planned = [op for module in compiled.plan.modules for op in module.ops]
    assert set(forward) <= set(planned)
    for name in planned:
        if name.startswith(("addmm", "linear", "native_layer_norm", "layer_norm", "embedding")):
            assert forward[name].measured_s > 0
    trained = {m.block for m in compiled.plan.modules if m.weight_grad_s}
    assert trained <= {op.block for op in backward}


def test_predictions_add_up_to_those_of_the_plan(profiled: tuple[Any, Profile]) -> None:
    """By module and by block: the sums of its ops' prices, without the communication in them."""
    compiled, profile = profiled
    forward = {op.name: op.predicted_s for op in profile.ops if op.operator != BACKWARD}
    backward = {op.name: op.predicted_s for op in profile.ops if op.operator == BACKWARD}
    checked = 0
    for module in compiled.plan.modules:
        if set(module.ops) <= set(forward):  # views need no call of their own in some forms
            checked += 1
            found = sum(forward[op] for op in module.ops)
            assert found == pytest.approx(module.forward_s, rel=1e-6)
    assert checked > 3
    for block, predicted_s in backward.items():
        modules = [m for m in compiled.plan.modules if m.block == block]
        assert predicted_s == pytest.approx(sum(m.backward_s for m in modules), rel=1e-6)


def test_the_worst_predictions_are_named_with_the_numbers_of_the_ops(
    profiled: tuple[Any, Profile],
) -> None:
    _, profile = profiled
    groups = worst_groups(profile.ops, most=10**6)
    assert sorted(o.name for g in groups for o in g.ops) == sorted(o.name for o in profile.ops)
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


def test_training_goes_on_untimed(profiled: tuple[Any, Profile]) -> None:
    compiled, _ = profiled
    assert compiled._runner.op_seconds() == [[], []]


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


def test_the_median_step_of_the_slowest_rank_counts(profiled: tuple[Any, Profile]) -> None:
    compiled, program = profiled[0], profiled[0].program
    price = op_prices(compiled.plan, compiled._captured)[20]
    block = [each.name for each in program.blocks].index(price.block)
    nodes = program.kernels[program.blocks[block].kernel].forward.graph.nodes
    node = next(n for n, each in enumerate(nodes) if op_place(each) == price.place)
    at = block, Phase.FORWARD, node
    steps = [[[(*at, 1.0)], [(*at, 4.0)]], [[(*at, 2.0)], [(*at, 6.0)]], [[(*at, 9.0)], []]]
    made = [[[OpSeconds(*each) for each in rank] for rank in step] for step in steps]
    (op,) = op_profiles([price], program, made)
    assert (op.name, op.measured_s) == (price.name, 5.0)
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
    assert any(op.operator == BACKWARD for op in profile.ops)
