"""Stages by dynamic programming equal the best of all cuts by enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.problem import SearchError
from autopar.search.stages import cut_chain

times = st.integers(0, 20).map(float)


def stage_times(starts: tuple[int, ...], block_s: list[float], message_s: list[float]):
    ends = [0.0, *message_s, 0.0]
    edges = [*starts, len(block_s)]
    return [max(sum(block_s[a:b]), ends[a], ends[b]) for a, b in itertools.pairwise(edges)]


def slowest_work(cut: tuple[int, ...], rows: list[list[float]]) -> float:
    edges = itertools.pairwise([*cut, len(rows[0])])
    return max(sum(row[a:b]) for row, (a, b) in zip(rows, edges))


@given(st.data(), st.lists(times, min_size=1, max_size=7))
def test_no_other_cut_is_better(data, block_s):
    message_s = [data.draw(times) for _ in block_s[1:]]
    num_stages = data.draw(st.integers(1, len(block_s)))
    starts = cut_chain(block_s, message_s, num_stages)
    assert starts[0] == 0
    assert len(starts) == num_stages
    assert list(starts) == sorted(set(starts))

    def price(cut):
        slowest = max(stage_times(cut, block_s, message_s))
        sent_s = sum(message_s[i - 1] for i in cut[1:])
        return slowest, sent_s, slowest_work(cut, [block_s] * num_stages)

    every = [(0, *rest) for rest in itertools.combinations(range(1, len(block_s)), num_stages - 1)]
    assert price(starts) == min(map(price, every))


@given(st.data(), st.integers(1, 6))
def test_no_other_cut_over_unequal_devices_and_links_is_better(data, num_blocks):
    num_stages = data.draw(st.integers(1, num_blocks))
    rows = [[data.draw(times) for _ in range(num_blocks)] for _ in range(num_stages)]
    links = [[data.draw(times) for _ in range(num_blocks - 1)] for _ in range(num_stages - 1)]

    def price(cut):
        crossed = [row[i - 1] for row, i in zip(links, cut[1:])]
        slowest = slowest_work(cut, rows)
        return max(slowest, *crossed, 0.0), sum(crossed), slowest

    starts = cut_chain(rows, links or [0.0] * (num_blocks - 1), num_stages)
    every = [(0, *rest) for rest in itertools.combinations(range(1, num_blocks), num_stages - 1)]
    assert price(starts) == min(map(price, every))


def test_a_device_of_twice_the_speed_takes_twice_the_blocks():
    assert cut_chain([[1.0] * 9, [2.0] * 9], [0.0] * 8, 2) == (0, 6)


def test_messages_that_computation_hides_unbalance_no_stages():
    assert cut_chain([3.0] * 12, [2.0] * 11, 4) == (0, 3, 6, 9)
    assert cut_chain([3.0] * 12, [99.0] * 11, 4) == (0, 3, 6, 9)


def test_equal_blocks_are_dealt_evenly():
    assert cut_chain([1.0] * 8, [0.0] * 7, 4) == (0, 2, 4, 6)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_blocks_are_refused(num_stages):
    with pytest.raises(SearchError, match=r"3 blocks cannot be cut .* use 1 to 3 stages"):
        cut_chain([1.0] * 3, [0.0] * 2, num_stages)


def test_a_cut_has_one_message():
    with pytest.raises(SearchError, match="give one less"):
        cut_chain([1.0] * 3, [0.0] * 3, 2)
