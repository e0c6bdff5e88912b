"""Nearest measured calls equal those found by brute force, in any order."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import OpCall, TensorSpec
from autopar.cost_models.patterns import Thinned, pattern, position_of


def _product(m, k, n):
    return OpCall("aten.mm.default", (TensorSpec((m, k)), TensorSpec((k, n))))


def _relu(rows):
    return OpCall("aten.relu.default", (TensorSpec((rows, 64)),))


sizes = st.integers(1, 4096)
calls = st.lists(st.one_of(st.builds(_product, sizes, sizes, sizes), st.builds(_relu, sizes)))


def _are_near(a, b, factor):
    if pattern(a) != pattern(b):
        return False
    pairs = zip(position_of(a), position_of(b))
    return all(math.exp(abs(x - y)) < factor for x, y in pairs)


@given(calls, st.sampled_from([1.0, 1.1, 2.0]))
def test_none_taken_are_near_and_all_others_are_near_one(found, factor):
    taken = Thinned(factor).take(found)
    assert not any(_are_near(a, b, factor * 0.999) for a, b in itertools.combinations(taken, 2))
    assert all(any(_are_near(c, t, factor * 1.001) or c == t for t in taken) for c in found)


def test_sizes_and_not_kinds_make_calls_near():
    assert Thinned(2.0).take([_relu(64), _relu(100), _relu(128), _product(64, 64, 64)]) == [
        _relu(64), _relu(128), _product(64, 64, 64),
    ]  # fmt: skip
    with_gradient = OpCall("aten.relu.default", (TensorSpec((64, 64), requires_grad=True),))
    assert len(Thinned(2.0).take([_relu(64), with_gradient])) == 2
    assert len(Thinned(1.0).take([_product(64, 32, 16), _product(16, 32, 64)])) == 2


def test_the_position_is_operations_and_bytes():
    flops, size_bytes = position_of(_product(8, 16, 32))
    assert math.exp(flops) == pytest.approx(2 * 8 * 16 * 32)
    assert math.exp(size_bytes) == pytest.approx(4 * (8 * 16 + 16 * 32 + 8 * 32))
