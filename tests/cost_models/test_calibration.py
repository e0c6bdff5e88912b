"""Fitted efficiencies recover those of a known device, and the fit states its error."""

import random
import statistics

import msgspec
import pytest

from autopar.base.errors import InputError
from autopar.cost_models import (
    Cluster,
    OpCall,
    RooflineModel,
    TensorSpec,
    calibrate,
)
from autopar.cost_models.efficiency import CPU, EfficiencyTable, FamilyEfficiency
from autopar.cost_models.store import OpTime
from autopar.cost_models.work import Family

DEVICE = msgspec.structs.replace(Cluster.preset("cpu").device, cache_bytes=0)
TRUTH = EfficiencyTable(
    default=CPU.default,
    families={
        Family.MATMUL: FamilyEfficiency(
            compute=0.4, memory=0.3, half_k=16, half_side=4, kernel_s=6e-6
        ),
        Family.POINTWISE: FamilyEfficiency(compute=0.02, memory=0.9),
    },
)


def _calls(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        m, n, k = (2 ** rng.randint(3, 10) for _ in range(3))
        yield OpCall("aten.mm.default", (TensorSpec((m, k)), TensorSpec((k, n))))
        yield OpCall(rng.choice(["aten.tanh.default", "aten.neg.default"]), (TensorSpec((m, n)),))


def _measured(seed, count, noise):
    rng = random.Random(seed)
    true = RooflineModel(DEVICE, TRUTH)
    for call in _calls(seed, count):
        forward_s = true.estimate(call).forward_s * rng.uniform(1 - noise, 1 + noise)
        times = OpTime(
            forward_s=forward_s, input_grad_s=0.0, weight_grad_s=0.0, spread=0.0, num_samples=5
        )
        yield call, times


def _median_error(model, seed):
    true = RooflineModel(DEVICE, TRUTH)
    ratios = [
        model.estimate(call).forward_s / true.estimate(call).forward_s for call in _calls(seed, 40)
    ]
    return statistics.median(max(ratio, 1 / ratio) for ratio in ratios)


def test_a_fitted_roofline_predicts_calls_that_it_never_saw():
    fitted = calibrate(DEVICE, _measured(1, 40, noise=0.05))
    before = _median_error(RooflineModel(DEVICE), seed=2)
    after = _median_error(RooflineModel(DEVICE, fitted.table), seed=2)
    assert before > 1.2
    assert after < 1.06


def test_the_stated_uncertainty_grows_with_the_noise():
    fitted = calibrate(DEVICE, _measured(3, 40, noise=0.02))
    quiet, noisy = fitted.uncertainty, calibrate(DEVICE, _measured(3, 40, 0.5)).uncertainty
    for family in (Family.MATMUL, Family.POINTWISE):
        assert 1 <= quiet[family].median_factor < noisy[family].median_factor
        assert noisy[family].median_factor <= noisy[family].p90_factor
        assert quiet[family].num_samples == 40
        assert fitted.table.of(family).error_factor == quiet[family].median_factor


def test_families_measured_too_seldom_keep_what_they_had():
    fitted = calibrate(DEVICE, list(_measured(4, 2, noise=0.0)))
    assert fitted.uncertainty == {}
    assert fitted.table == CPU


def test_operations_that_are_not_known_here_are_left_out():
    measured = list(_measured(4, 40, noise=0.0))
    foreign = (OpCall("mylib.foo.default", (TensorSpec((4,)),)), measured[0][1])
    assert calibrate(DEVICE, [foreign, *measured]).table == calibrate(DEVICE, measured).table


def test_a_fitted_roofline_never_promises_more_than_the_peaks():
    fast = [(call, _scaled(times, 1e-3)) for call, times in _measured(5, 20, noise=0.0)]
    for curve in calibrate(DEVICE, fast).table.families.values():
        assert 0 < curve.compute <= 1
        assert 0 < curve.memory <= 1


def _scaled(times, factor):
    return OpTime(
        forward_s=times.forward_s * factor,
        input_grad_s=0.0,
        weight_grad_s=0.0,
        spread=0.0,
        num_samples=1,
    )


def test_what_is_no_measured_call_is_refused() -> None:
    pair = next(iter(_measured(1, 1, noise=0.0)))
    for wrong in ([1], [(pair[0],)], [pair[::-1]], [None], 3, "x"):
        with pytest.raises(InputError, match="pass pairs of OpCall and OpTime"):
            calibrate(DEVICE, wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="device is None; pass a DeviceSpec"):
        calibrate(None, [pair])  # type: ignore[arg-type]
    assert calibrate(DEVICE, iter([pair])) == calibrate(DEVICE, [pair])
