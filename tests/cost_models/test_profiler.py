"""Measured costs: real measurements are stored, interpolated, and never repeated."""

import itertools
import mmap
import multiprocessing
import os
import signal
import time
import warnings
from dataclasses import replace

import msgspec
import pytest
import torch
from op_samples import samples

from autopar.base.errors import ClusterError
from autopar.cost_models import (
    Cluster,
    CostError,
    OpCall,
    OpEstimate,
    Profiler,
    ProfileStore,
    RooflineModel,
    Source,
    StoreWarning,
    TensorSpec,
    measure,
)
from autopar.cost_models.detect import cpu_name
from autopar.cost_models.estimate import NotNowError
from autopar.cost_models.inputs import RealCall, normal_like
from autopar.cost_models.measure import (
    MeasureLimits,
    _num_sets,
    _one_sample,
    _sample,
    measure_call,
)
from autopar.cost_models.op_work import work
from autopar.cost_models.store import OpTime

HERE = msgspec.structs.replace(Cluster.preset("cpu").device, name=cpu_name())
QUICK = MeasureLimits(max_direction_s=0.005, max_samples=3, max_repeats=0, max_sets=2)
CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")


def _linear(rows, width=32):
    return OpCall(
        "aten.linear.default",
        (
            TensorSpec((rows, width), requires_grad=True),
            TensorSpec((width, width), requires_grad=True, is_parameter=True),
        ),
    )


def _profiler(path=None, **options):
    options = {"limits": QUICK} | options
    return Profiler(ProfileStore(path, HERE), HERE, **options)


@pytest.mark.parametrize("case", samples(), ids=lambda case: str(case[0]))
def test_every_call_runs_on_the_inputs_made_for_it(case):
    call = OpCall.of(*case)
    for seed in range(3):
        result = RealCall(call, CPU, seed)()
        leaves = result if isinstance(result, (tuple, list)) else (result,)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
                assert torch.isfinite(leaf).all()


def test_groups_of_experts_end_where_the_rows_do():
    rows, experts = TensorSpec((50, 8)), TensorSpec((4, 8, 6))
    ends = TensorSpec((4,), torch.int32)
    made = RealCall(OpCall("aten._grouped_mm.default", (rows, experts, ends)), CPU).args[2]
    assert made.tolist() == [12, 25, 37, 50]


def test_runs_in_turn_do_not_write_to_the_same_memory():
    written = []

    def run():
        made = torch.empty(1 << 20)
        written.append(made.data_ptr())
        return made

    _one_sample([run] * 4, 8, CPU, QUICK)
    assert len(written) >= 24
    assert all(len(set(written[i : i + 4])) == 4 for i in range(len(written) - 3))


def test_a_small_call_runs_on_as_many_sets_as_fill_the_cache():
    """No more than fit in the budget, and a single one where nothing is cached."""
    call, limits = _linear(256, 256), MeasureLimits()
    one_bytes = 3 * 256 * 256 * 4
    caching = {
        size: _num_sets(call, msgspec.structs.replace(HERE, cache_bytes=size), limits)
        for size in (0, 8 << 20, 16 << 20, 1 << 30)
    }
    assert caching[0] == 1
    assert caching[8 << 20] * one_bytes > 8 << 20
    assert caching[8 << 20] < caching[16 << 20] < caching[1 << 30] <= limits.max_sets
    assert caching[1 << 30] * one_bytes <= limits.sets_bytes


def test_samples_in_which_memory_was_found_do_not_count():
    """Every second run touches pages that the operating system has yet to map, and is slow."""
    turns = itertools.count()

    def run() -> None:
        if next(turns) % 2:
            with mmap.mmap(-1, 1 << 20) as memory:
                memory.write(bytes(1 << 20))
            time.sleep(0.02)
        else:
            time.sleep(0.002)

    limits = MeasureLimits(max_direction_s=0.01, max_samples=9)
    sampled = _one_sample([run], 1, CPU, limits)
    assert sampled.num_samples >= 3
    assert sampled.median_s < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (300, 500), (0, 3)])
def test_gradients_have_the_layout_of_what_they_are_for(shape, dtype):
    straight = torch.empty(shape, dtype=dtype)
    for tensor in (straight, straight.permute([*reversed(range(straight.dim()))])):
        made = normal_like(tensor)
        assert (made.shape, made.dtype) == (tensor.shape, dtype)
        assert made.stride() == torch.empty_like(tensor).stride()
        assert made.isfinite().all()
    if made.numel() > 1000:
        assert made.float().std() == pytest.approx(1, rel=0.05)
        assert abs(made.float().mean()) < 0.02


def test_inputs_have_the_layout_that_was_asked_for():
    specs = (
        TensorSpec((4, 3), torch.float32, (1, 4), requires_grad=True),
        TensorSpec((4, 1), torch.float32, (0, 1)),
    )
    real = RealCall(OpCall("aten.add.Tensor", specs), CPU)
    assert [tuple(t.stride()) for t in real.args] == [(1, 4), (0, 1)]
    assert len(real.inputs) == 1
    assert real.parameters == []


def test_indices_reach_the_whole_table_and_no_further():
    call = OpCall("aten.embedding.default", (TensorSpec((5, 2)), TensorSpec((400,), torch.int64)))
    assert set(RealCall(call, CPU).args[1].tolist()) == set(range(5))


def test_operators_see_operands_that_want_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tracing: torch folds a transposed operand of a linear layer only with gradients."""
    seen = set()
    plain = RealCall.__call__

    def watched(self: RealCall) -> object:
        seen.update(tensor.requires_grad for tensor in (*self.inputs, *self.parameters))
        return plain(self)

    monkeypatch.setattr(RealCall, "__call__", watched)
    x = TensorSpec((8, 64, 256), torch.float32, (256, 2048, 1), True)
    weight = TensorSpec((512, 256), torch.float32, None, True, True)
    times = measure_call(
        OpCall("aten.linear.default", (x, weight)), Cluster.detect(1).device, MeasureLimits()
    )
    assert seen == {True}
    assert min(times.forward_s, times.input_grad_s, times.weight_grad_s) > 0


@pytest.mark.parametrize("case", samples(), ids=lambda case: str(case[0]))
def test_each_direction_with_work_is_measured_and_each_without_is_zero(case):
    call = OpCall.of(*case)
    todo = work(call)
    profiler = _profiler()
    found = profiler.estimate(call)
    assert profiler.store.failure(call) is None
    if found.source == Source.ANALYTICAL:
        # Only calls that launch nothing are left to the roofline.
        assert todo.forward.num_kernels == 0
        assert todo.input_grad.num_kernels == 0
        return
    assert found.source == Source.MEASURED
    assert found.forward_s > 0
    specs = [s for s in call.tensors() if s.requires_grad and s.dtype.is_floating_point]
    if not any(s.is_parameter for s in specs):
        assert found.weight_grad_s == 0
    if all(s.is_parameter for s in specs):
        assert found.input_grad_s == 0


def test_a_large_product_takes_the_time_that_torch_takes():
    a = torch.randn(700, 700)
    w = torch.randn(700, 700)
    threads = torch.get_num_threads()
    torch.set_num_threads(HERE.num_threads)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        torch.nn.functional.linear(a, w)
        times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    found = _profiler(limits=MeasureLimits()).estimate(_linear(700, 700))
    # Generous, since other processes may run: what is refused is a wrong unit or a wrong count.
    assert min(times) / 4 < found.forward_s < 20 * max(times)
    assert found.input_grad_s > min(times) / 4
    assert found.weight_grad_s > min(times) / 4
    assert torch.get_num_threads() == threads


def test_a_second_run_launches_no_measurement(tmp_path):
    path = tmp_path / "store.sqlite3"
    calls = [OpCall.of(*case) for case in samples()]
    first = _profiler(path)
    summary = first.profile(calls, progress=False)
    assert summary.num_measured == first.num_measurements > 20
    assert summary.failed == ()
    second = _profiler(path)
    again = second.profile(calls, progress=False)
    assert (again.num_measured, again.num_known) == (0, summary.num_measured)
    assert [second.estimate(c) for c in calls] == [first.estimate(c) for c in calls]
    assert second.num_measurements == 0


def test_a_noisy_time_is_flagged_and_not_measured_again():
    profiler = _profiler()
    quiet, noisy = _linear(8), _linear(16)
    for call, spread in ((quiet, 0.1), (noisy, 0.5)):
        profiler.store.put(call, replace(_off_by(3.0, call), spread=spread))
    summary = profiler.profile([quiet, noisy], progress=False)
    assert (summary.num_measured, summary.noisy) == (0, (noisy,))
    found = {call: profiler.estimate(call) for call in (quiet, noisy)}
    assert [estimate.is_noisy for estimate in found.values()] == [False, True]
    assert found[noisy].source == Source.MEASURED
    assert (found[quiet] + found[noisy]).times(2).is_noisy
    assert not (found[quiet] + found[quiet]).is_noisy


def test_the_runs_of_a_long_call_have_a_spread():
    seconds = iter([0.4, 0.1, 0.1, 0.1])
    found = _sample([lambda: time.sleep(next(seconds))], CPU, MeasureLimits(long_s=0.01))
    assert found.spread > 0
    assert len(list(seconds)) < 2  # the second run was far from the first: another was made


def test_a_run_that_is_out_of_time_says_what_is_left():
    calls = [_linear(rows) for rows in range(1, 6)]
    profiler = _profiler()
    summary = profiler.profile(calls, progress=False, max_s=-1.0)
    assert (summary.num_measured, summary.num_left) == (0, 5)
    assert profiler.profile(calls, progress=False).num_left == 0


def test_what_cannot_be_run_is_priced_by_the_roofline_and_listed():
    huge = OpCall("aten.relu.default", (TensorSpec((1 << 40,)),))
    flags = TensorSpec((4, 4), torch.bool)
    product = OpCall("aten.mm.default", (flags, flags))
    hidden = OpCall("aten.nonzero.default", (flags,))
    profiler = _profiler()
    with pytest.warns(UserWarning, match="priced by the roofline"):
        assert profiler.estimate(huge) == RooflineModel(HERE).estimate(huge)
    assert "too many" in profiler.store.failure(huge)
    with pytest.warns(UserWarning, match="roofline"):
        summary = profiler.profile([product, hidden], progress=False)
    assert [call for call, _ in summary.failed] == [hidden, product]
    assert profiler.estimate(product) == RooflineModel(HERE).estimate(product)
    with pytest.raises(CostError, match="depend on its data"):
        profiler.estimate(hidden)


def test_what_found_no_memory_is_tried_again_by_a_later_run(tmp_path):
    def no_memory(call):
        raise NotNowError(f"{call.target} does not fit the memory")

    path, call = tmp_path / "store.sqlite3", _linear(4)
    first = _profiler(path, measure=no_memory)
    with pytest.warns(UserWarning, match="does not fit the memory"):
        assert len(first.profile([call], progress=False).failed) == 1
    assert first.missing([call]) == []
    assert _profiler(path).profile([call], progress=False).num_measured == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError(), "DefaultCPUAllocator: not enough memory"]
)
def test_a_lack_of_memory_is_told_from_other_failures(monkeypatch, error):
    def fail(*_):
        raise RuntimeError(error) if isinstance(error, str) else error

    monkeypatch.setattr(measure, "_sample", fail)
    with pytest.raises(NotNowError, match="does not fit the memory"):
        measure_call(_linear(4), HERE, MeasureLimits())


def test_stored_calls_that_have_no_price_here_do_not_stand_in_for_others():
    profiler = _profiler(measuring=False)
    profiler.store.put(OpCall("aten.linear.default", ()), _off_by(1.0, _linear(4)))
    assert profiler.estimate(_linear(8)) == RooflineModel(HERE).estimate(_linear(8))


def test_what_could_not_be_run_is_not_tried_again(tmp_path):
    flags = TensorSpec((4, 4), torch.bool)
    product = OpCall("aten.mm.default", (flags, flags))
    calls = [product, _linear(4)]
    with pytest.warns(UserWarning, match="priced by the roofline"):
        first = _profiler(tmp_path / "store.sqlite3").profile(calls, progress=False)
    tried = []
    second = _profiler(tmp_path / "store.sqlite3", measure=tried.append)
    assert second.missing(calls) == []
    again = second.profile(calls, progress=False)
    assert again.failed == first.failed != ()
    assert (first.num_measured, first.num_known) == (1, 0)
    assert (again.num_measured, again.num_known) == (0, 1)
    assert second.estimate(product) == RooflineModel(HERE).estimate(product)
    assert tried == []


def _off_by(factor, call):
    base = RooflineModel(HERE).estimate(call)
    return OpTime(
        forward_s=factor * base.forward_s,
        input_grad_s=factor * base.input_grad_s,
        weight_grad_s=2 * factor * base.weight_grad_s,
        spread=0.0,
        num_samples=5,
    )


def test_between_measured_shapes_the_rooflines_error_is_carried_over():
    profiler = _profiler(measuring=False)
    for rows in (64, 256, 1024):
        profiler.store.put(_linear(rows), _off_by(3.0, _linear(rows)))
    base = RooflineModel(HERE).estimate(_linear(500))
    found = profiler.estimate(_linear(500))
    assert found.source == Source.INTERPOLATED
    assert found.forward_s == pytest.approx(3 * base.forward_s)
    assert found.weight_grad_s == pytest.approx(6 * base.weight_grad_s)
    assert profiler.estimate(_linear(256)).source == Source.MEASURED
    assert profiler.num_measurements == 0


def test_far_from_every_measured_shape_the_roofline_alone_answers():
    profiler = _profiler(measuring=False)
    profiler.store.put(_linear(64), _off_by(3.0, _linear(64)))
    for stranger in (
        _linear(100_000),
        OpCall("aten.relu.default", (TensorSpec((64, 32)),)),
        OpCall("aten.linear.default", tuple(TensorSpec((64, 64), torch.float64) for _ in "xw")),
    ):
        assert profiler.estimate(stranger) == RooflineModel(HERE).estimate(stranger)


def test_away_from_measured_shapes_their_ratio_fades_without_a_jump():
    """Up to 4 times the measured rows the ratio holds; from 16 times on, the roofline alone."""
    profiler = _profiler(measuring=False)
    profiler.store.put(_linear(4096), _off_by(3.0, _linear(4096)))

    def ratio(rows):
        base = RooflineModel(HERE).estimate(_linear(rows)).forward_s
        return profiler.estimate(_linear(rows)).forward_s / base

    ratios = [ratio(round(4096 * 1.1**power)) for power in range(36)]
    assert ratios[:14] == pytest.approx([3.0] * 14)
    assert ratios[-1] == pytest.approx(1.0)
    assert all(0.9 * one <= two <= one * (1 + 1e-9) for one, two in itertools.pairwise(ratios))
    assert any(1.2 < found < 2.8 for found in ratios)


def test_a_price_between_noisy_measurements_is_flagged():
    profiler = _profiler(measuring=False)
    for rows, spread in ((64, 0.1), (128, 0.1), (1 << 14, 0.5), (1 << 15, 0.1)):
        times = replace(_off_by(3.0, _linear(rows)), spread=spread)
        profiler.store.put(_linear(rows), times)
    assert profiler.estimate(_linear(9000)).is_noisy
    for rows in (64, 128, 1 << 14):
        profiler.store.put(_linear(rows), _off_by(3.0, _linear(rows)))
    quiet = Profiler(profiler.store, HERE, measuring=False).estimate(_linear(9000))
    assert (quiet.source, quiet.is_noisy) == (Source.INTERPOLATED, False)


def test_interpolation_errs_less_than_the_roofline_on_a_curved_truth():
    """A device with slow small products: the measured ends show it, the roofline does not."""

    def truth(call):
        return RooflineModel(HERE).estimate(call).forward_s * (1 + 500 / call.tensors()[0].shape[0])

    profiler = _profiler(measuring=False)
    for rows in (32, 128, 512, 2048):
        call = _linear(rows)
        profiler.store.put(call, _off_by(1 + 500 / rows, call))
    for rows in (48, 64, 200, 300, 800, 1500):
        found = profiler.estimate(_linear(rows)).forward_s
        exact = truth(_linear(rows))
        rough = RooflineModel(HERE).estimate(_linear(rows)).forward_s
        assert abs(found - exact) < abs(rough - exact)


def test_only_the_device_at_hand_is_measured():
    h100 = Cluster.preset("h100-sxm").device
    with pytest.raises(ClusterError, match=r"measuring=False"):
        Profiler(ProfileStore(None, h100), h100)
    absent = Profiler(ProfileStore(None, h100), h100, measuring=False)
    assert absent.estimate(_linear(8)).source == Source.ANALYTICAL


@pytest.mark.parametrize("device", [HERE, Cluster.preset("h100-sxm").device], ids=["cpu", "h100"])
def test_nothing_is_run_or_stored_where_measuring_is_off(device):
    ran = []
    store = ProfileStore(None, device)
    profiler = Profiler(store, device, measuring=False, measure=ran.append)
    calls = [_linear(4), OpCall("aten.mm.default", (TensorSpec((4, 4), torch.bool),) * 2)]
    summary = profiler.profile(calls, progress=False)
    assert (summary.num_measured, summary.num_left, summary.failed) == (0, 2, ())
    assert profiler.missing(calls) == calls
    assert ran == list(store.everything()) == []
    assert [store.failure(call) for call in calls] == [None, None]


def test_profiling_leaves_torchs_random_numbers_as_they_were():
    dropout = OpCall("aten.native_dropout.default", (TensorSpec((64, 64)), 0.5, True))
    torch.manual_seed(3)
    want = torch.randn(8)
    torch.manual_seed(3)
    assert _profiler().profile([dropout, _linear(8)], progress=False).num_measured == 2
    assert torch.equal(torch.randn(8), want)


def test_a_users_operator_is_tried_again_by_a_later_run_once_it_was_mended(tmp_path):
    works = False

    @torch.library.custom_op("autopar_tests::mended", mutates_args=())
    def mended(x: torch.Tensor) -> torch.Tensor:
        if not works:
            raise ValueError("not yet")
        return x.clone()

    mended.register_fake(torch.empty_like)
    call = OpCall("autopar_tests.mended.default", (TensorSpec((64, 8)),))
    path = tmp_path / "store.sqlite3"
    first = _profiler(path)
    with pytest.warns(UserWarning, match="not yet"):
        first.profile([call], progress=False)
    works = True
    assert first.profile([call], progress=False).num_measured == 0
    assert _profiler(path).profile([call], progress=False).num_measured == 1


def _profile_in_a_process(path, calls, go, progress):
    warnings.simplefilter("error", StoreWarning)
    go.wait(30)
    profiler = _profiler(path)
    for call in calls:
        profiler.profile([call], progress=False)
        progress.value += 1
    os._exit(0)


def _start(path, calls):
    go, progress = FORK.Event(), FORK.Value("q", 0)
    process = FORK.Process(target=_profile_in_a_process, args=(path, calls, go, progress))
    process.start()
    return process, go, progress


def test_two_processes_profiling_into_one_store_both_finish(tmp_path):
    path = tmp_path / "store.sqlite3"
    calls = [_linear(rows) for rows in range(1, 25)]
    one, two = _start(path, calls), _start(path, calls[::-1])
    one[1].set()
    two[1].set()
    for process, _, progress in (one, two):
        process.join(120)
        assert process.exitcode == 0
        assert progress.value == len(calls)
    assert _profiler(path).profile(calls, progress=False).num_measured == 0


def test_a_killed_profiler_goes_on_where_it_was(tmp_path):
    path = tmp_path / "store.sqlite3"
    calls = [_linear(rows) for rows in range(1, 200)]
    process, go, progress = _start(path, calls)
    go.set()
    deadline = time.monotonic() + 60
    while progress.value < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    done = progress.value
    assert 3 <= done < len(calls)
    summary = _profiler(path, limits=QUICK).profile(calls[: done + 2], progress=False)
    assert summary.num_known >= done
    assert summary.num_measured <= 2


def test_estimates_add_up_to_their_weakest_source():
    measured = OpEstimate(1.0, 2.0, 3.0, Source.MEASURED)
    guessed = OpEstimate(10.0, 20.0, 30.0, Source.ANALYTICAL)
    assert measured + guessed == OpEstimate(11.0, 22.0, 33.0, Source.ANALYTICAL)
    assert (measured.backward_s, measured.total_s) == (5.0, 6.0)
