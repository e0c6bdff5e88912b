"""Op calls are measured once, by as many concurrent processes as will train."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.cost_models import (
    Cluster,
    CommunicationModel,
    CostError,
    OpCall,
    ProfileStore,
    RooflineModel,
    Source,
    TensorSpec,
)
from autopar.cost_models.store import OpTime
from autopar.cost_models.update import FUSED_ADAMW, OptimizerSpec, update_call
from autopar.frontend.capture import capture
from autopar.ir.mesh import Mesh
from autopar.pricing.tables import Pricing
from autopar.runtime.measure import op_times as module
from autopar.runtime.measure.op_times import measure_again, op_times
from autopar.sharding.strategy import Analysis
from tests.models.zoo import build


def relu(rows: int) -> OpCall:
    return OpCall.of("aten.relu.default", [TensorSpec((rows, 64), requires_grad=True)])


def measured(calls: list[OpCall], path: Path, limit_s: float = 60.0) -> Any:
    return op_times(
        calls, Cluster.detect(2), path,
        limit_s=limit_s, start_timeout_s=60.0, progress=lambda _: None,
    )  # fmt: skip


def no_workers(*_: Any, **__: Any) -> None:
    raise AssertionError("workers were started")


def test_each_call_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [relu(4096), relu(8192), relu(4096), update_call(1000, torch.float32)]
    model = measured(calls, tmp_path / "times")
    found = [model.estimate(call) for call in calls]
    assert all(estimate.source is Source.MEASURED for estimate in found)
    assert all(estimate.forward_s > 0 for estimate in found)
    assert found[0].input_grad_s > 0 == found[3].input_grad_s
    monkeypatch.setattr(module, "WorkerGroup", no_workers)
    again = measured(calls, tmp_path / "times")
    assert [again.estimate(call) for call in calls] == found
    assert again.estimate(relu(6000)).source is Source.INTERPOLATED


def test_updates_of_other_optimizers_are_in_proportion_to_what_they_move(tmp_path: Path) -> None:
    model, make_batch = build("mlp")
    analysis, mesh = Analysis(capture(model, make_batch(0)).graph), Mesh(("x",), (2,))
    cluster = Cluster.detect(2)
    compute = measured([update_call(1000, torch.float32)], tmp_path / "times")
    (adamw, sgd) = (
        Pricing(
            analysis, mesh, cluster, compute, CommunicationModel(cluster),
            optimizer=OptimizerSpec(num_states=num_states, is_fused=True),
        ).update(4000, torch.float32)
        for num_states in (2, 0)
    )  # fmt: skip
    assert adamw.source is Source.MEASURED
    assert sgd.source is Source.INTERPOLATED
    assert sgd.time_s == pytest.approx(adamw.time_s * 3 / 7)


def test_near_sizes_share_a_measurement_where_time_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [relu(1000 + i) for i in range(100)]
    sources = Counter(measured(calls, tmp_path / "few", 3.0).estimate(c).source for c in calls)
    assert sources[Source.MEASURED] + sources[Source.INTERPOLATED] == len(calls)
    assert 0 < sources[Source.MEASURED] < 10
    monkeypatch.setattr(module, "WorkerGroup", no_workers)
    measured(calls, tmp_path / "few", 3.0)  # a second run has nothing to measure


def test_operators_that_are_not_torchs_own_are_measured(tmp_path: Path) -> None:
    import transformers.integrations.moe  # defines the operator here; workers must be told

    assert transformers.integrations.moe
    rows, weights = TensorSpec((32, 8)), TensorSpec((4, 8, 16))
    call = OpCall(
        "transformers.grouped_mm_fallback.default", (rows, weights, TensorSpec((4,), torch.int32))
    )
    assert measured([call], tmp_path / "times").estimate(call).source is Source.MEASURED


@torch.library.custom_op("optimestest::ranked", mutates_args=())
def ranked(x: torch.Tensor) -> torch.Tensor:
    if x.flatten().diff().min() < 0:
        raise ValueError("x must not fall")
    return x.clone()


ranked.register_fake(torch.empty_like)


def test_an_operator_that_refuses_the_inputs_leaves_the_others_measured(tmp_path: Path) -> None:
    refusing = OpCall("optimestest.ranked.default", (TensorSpec((1 << 20,)),))
    with pytest.warns(UserWarning, match=r"ranked.*x must not fall"):
        model = measured([refusing, relu(64), relu(128)], tmp_path / "times")
    for call in (relu(64), relu(128)):
        assert model.estimate(call).source is Source.MEASURED


@torch.library.custom_op("optimestest::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    return x.clone()


failing.register_fake(torch.empty_like)


def test_who_gives_a_call_up_holds_nobody_up(tmp_path: Path) -> None:
    """Samples are taken concurrently; one process takes none."""
    calls = [OpCall("optimestest.failing.default", (TensorSpec((1 << 20,)),)), relu(64)]
    with pytest.warns(UserWarning, match=r"failing.*rank 1 has had enough"):
        model = measured(calls, tmp_path / "times")
    assert model.estimate(relu(64)).source is Source.MEASURED


def test_what_was_measured_while_processors_were_slow_is_measured_again(tmp_path: Path) -> None:
    usual, costly, slow, slower, broken = (relu(rows) for rows in (16, 256, 32, 64, 128))
    paces_s = {usual: 1.0, costly: 1.0, slow: 1.5, slower: 1.4, broken: 2.0}
    later = {slow: iter([4.0]), slower: iter([9.0, 2.0])}  # seconds; the first of slower's: slow
    later |= {costly: iter([6.0]), usual: iter([5.5, 8.0])}
    asked = []

    def times(seconds: float, backward_s: float = 0.5) -> OpTime:
        return OpTime(
            forward_s=seconds, input_grad_s=backward_s, weight_grad_s=0.0, spread=seconds,
            num_samples=3,
        )  # fmt: skip

    def measure(call: OpCall) -> OpTime:
        asked.append(call)
        if call == broken:
            raise CostError("no memory")
        seconds = next(later[call])
        paces_s[call] = 1.6 if seconds == 9.0 else 1.05
        return times(seconds, backward_s=0.25 if seconds == 5.5 else 0.4 if call == usual else 0.5)

    store = ProfileStore(tmp_path / "times", Cluster.detect(1).device)
    for call in paces_s:
        store.put(call, times(7.0 if call == costly else 5.0))
    measure_again(measure, paces_s, store, time.monotonic() + 60)
    kept = [(found.forward_s, found.input_grad_s) for call in paces_s if (found := store.get(call))]
    # Of the costly one the mean of two that are alike, of the usual one the middle of three times.
    assert kept == [(5.5, 0.4), (6.5, 0.5), (4.0, 0.5), (2.0, 0.5), (5.0, 0.5)]
    found = store.get(usual)
    assert found is not None
    assert found.spread == 8.0
    assert [call for call in asked if call != broken] == [
        slow, slower, slower, costly, usual, usual,
    ]  # fmt: skip
    asked.clear()
    measure_again(measure, {usual: 1.0, slow: 2.0}, store, time.monotonic() - 1)
    assert not asked  # no time left


def test_times_of_processes_alone_and_side_by_side_are_kept_apart(tmp_path: Path) -> None:
    measured([relu(64)], tmp_path / "times")
    alone = op_times(
        [], Cluster.detect(1), tmp_path / "times",
        limit_s=1.0, start_timeout_s=60.0, progress=lambda _: None,
    )  # fmt: skip
    assert alone.estimate(relu(64)).source is Source.ANALYTICAL


def test_what_cannot_be_run_is_priced_by_the_roofline_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = TensorSpec((4, 4), torch.bool)
    wrong = OpCall.of("aten.mm.default", [flags, flags])
    with pytest.warns(UserWarning, match=r"mm.*priced by the roofline"):
        model = measured([wrong, relu(64)], tmp_path / "times")
    assert model.estimate(relu(64)).source is Source.MEASURED
    assert model.estimate(wrong).source is Source.ANALYTICAL
    monkeypatch.setattr(module, "WorkerGroup", no_workers)
    assert measured([wrong, relu(64)], tmp_path / "times").estimate(wrong) == model.estimate(wrong)


def test_a_call_that_would_use_up_the_limit_is_left(tmp_path: Path) -> None:
    huge = relu(1 << 22)
    model = measured([relu(64), huge], tmp_path / "times", limit_s=3.0)
    assert model.estimate(relu(64)).source is Source.MEASURED
    assert model.estimate(huge).source is Source.ANALYTICAL


def test_an_update_reads_and_writes_all_but_the_gradient() -> None:
    device = Cluster.preset("cpu").device
    small, large = (
        RooflineModel(device).estimate(update_call(n, torch.float32)).forward_s
        for n in (1 << 26, 1 << 27)
    )
    per_byte_s = (large - small) / (4 << 26)
    assert per_byte_s == pytest.approx(
        FUSED_ADAMW.num_passes / device.memory_bandwidth_bytes_per_s, rel=0.5
    )
