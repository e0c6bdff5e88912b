"""Stages by dynamic programming equal the best of all cuts by enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.problem import SearchError
from autopar.search.stages import cut_chain

times = st.integers(0, 20).map(float)


def stage_times(starts: tuple[int, ...], block_s: list[float], traffic_s: list[float]):
    ends = [0.0, *traffic_s, 0.0]
    edges = [*starts, len(block_s)]
    return [sum(block_s[a:b]) + ends[a] + ends[b] for a, b in itertools.pairwise(edges)]


@given(st.data(), st.lists(times, min_size=1, max_size=7))
def test_no_other_cut_is_better(data, block_s):
    traffic_s = [data.draw(times) for _ in block_s[1:]]
    num_stages = data.draw(st.integers(1, len(block_s)))
    starts = cut_chain(block_s, traffic_s, num_stages)
    assert starts[0] == 0
    assert len(starts) == num_stages
    assert list(starts) == sorted(set(starts))

    def price(cut):
        return max(stage_times(cut, block_s, traffic_s)), sum(traffic_s[i - 1] for i in cut[1:])

    every = [(0, *rest) for rest in itertools.combinations(range(1, len(block_s)), num_stages - 1)]
    assert price(starts) == min(map(price, every))


def test_equal_blocks_are_dealt_evenly():
    assert cut_chain([1.0] * 8, [0.0] * 7, 4) == (0, 2, 4, 6)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_blocks_are_refused(num_stages):
    with pytest.raises(SearchError, match=r"3 blocks cannot be cut .* use 1 to 3 stages"):
        cut_chain([1.0] * 3, [0.0] * 2, num_stages)


def test_a_cut_has_one_traffic():
    with pytest.raises(SearchError, match="give one less"):
        cut_chain([1.0] * 3, [0.0] * 3, 2)
