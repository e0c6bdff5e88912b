"""Exact choices of what is kept equal the best of all choices by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.search.problem import SearchError
from autopar.search.recompute import (
    GAP,
    Moments,
    Option,
    Value,
    cheapest,
    choose,
    frontier,
    kept_of,
)


@st.composite
def graphs(draw: st.DrawFn) -> list[Value]:
    """Up to eight values in order; the first one, an operand, can always be kept."""
    values = [Value(size_bytes=draw(st.integers(0, 9)), time_s=0.0, can_repeat=False)]
    for i in range(1, draw(st.integers(2, 8))):
        can_repeat = draw(st.booleans()) or draw(st.booleans())
        values.append(
            Value(
                size_bytes=draw(st.integers(0, 20)),
                time_s=float(draw(st.integers(0, 9))),
                inputs=tuple(sorted(draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=3)))),
                is_needed=draw(st.booleans()),
                can_keep=not can_repeat or draw(st.booleans()),
                can_repeat=can_repeat,
            )
        )
    return values


def all_choices(values: list[Value]) -> list[tuple[int, float]]:
    """Bytes and seconds of every set of kept values that the derivative can work with."""
    found = []
    keepable = [i for i, value in enumerate(values) if value.can_keep]
    for number in range(len(keepable) + 1):
        for kept in itertools.combinations(keepable, number):
            again: set[int] = set()
            stack = [i for i, v in enumerate(values) if v.is_needed and i not in kept]
            while stack:
                i = stack.pop()
                again.add(i)
                stack += [j for j in values[i].inputs if j not in kept and j not in again]
            if all(values[i].can_repeat for i in again):
                size = sum(values[i].size_bytes for i in kept)
                found.append((size, sum(values[i].time_s for i in again)))
    return found


@settings(deadline=None, max_examples=40)
@given(graphs(), st.integers(0, 60))
def test_no_other_choice_is_faster_within_the_limit(values: list[Value], limit: int) -> None:
    possible = [time_s for size, time_s in all_choices(values) if size <= limit]
    got = cheapest(values, limit)
    if not possible:
        assert got is None
        return
    assert got is not None
    assert got.size_bytes <= limit
    assert got.time_s == pytest.approx(min(possible))
    assert (got.size_bytes, got.time_s) in all_choices(values)


@settings(deadline=None, max_examples=40)
@given(graphs())
@example(  # the fastest choice is not unique, and one of nine bytes dominates one of ten
    [
        Value(size_bytes=2, time_s=0.0, can_repeat=False),
        Value(size_bytes=7, time_s=1.0, inputs=(0,)),
        Value(size_bytes=0, time_s=0.0, inputs=(0, 1), is_needed=True, can_keep=False),
        Value(size_bytes=1, time_s=0.0, inputs=(0,), is_needed=True),
    ]
)
def test_the_frontier_is_that_of_all_choices(values: list[Value]) -> None:
    every = all_choices(values)
    best = {
        (size, time_s)
        for size, time_s in every
        if not any(s <= size and t <= time_s and (s, t) != (size, time_s) for s, t in every)
    }
    points = [(p.size_bytes, p.time_s) for p in frontier(values, max_points=10_000)]
    assert points == sorted(best, reverse=True)
    few = [(p.size_bytes, p.time_s) for p in frontier(values, max_points=2)]
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert set(few) <= best
    assert len(few) <= 4


def test_cheap_values_are_recomputed_before_dear_ones() -> None:
    """A product and a cheap function of it, both needed and of one size."""
    values = [
        Value(size_bytes=1, time_s=0.0, is_needed=True, can_repeat=False),
        Value(size_bytes=10, time_s=5.0, inputs=(0,), is_needed=True),
        Value(size_bytes=10, time_s=1.0, inputs=(1,), is_needed=True),
    ]
    assert [sorted(point.values) for point in frontier(values)] == [[0, 1, 2], [0, 1], [0]]


def test_a_needed_value_that_can_neither_be_kept_nor_recomputed_is_refused() -> None:
    values = [Value(size_bytes=1, time_s=0.0, is_needed=True, can_keep=False, can_repeat=False)]
    with pytest.raises(SearchError, match="neither"):
        frontier(values)
    with pytest.raises(SearchError, match="value 0 is needed"):
        kept_of(values, frozenset())


@st.composite
def chains(draw: st.DrawFn) -> list[list[Option]]:
    def option() -> Option:
        return Option(
            kept_bytes=draw(st.integers(0, 9)),
            late_bytes=draw(st.integers(0, 9)),
            own_bytes=(draw(st.integers(0, 9)), draw(st.integers(0, 9))),
            time_s=float(draw(st.integers(0, 9))),
        )

    return [
        [option() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 5)))
    ]


def in_order(num: int, others: Sequence[tuple[float, float]]) -> Moments:
    """Each block runs a first graph before it keeps anything, and a second one after that."""
    before = np.tril(np.ones((num, num), dtype=int), -1)
    own = np.eye(num, dtype=int)
    running = np.arange(num)
    return Moments(
        kept=np.concatenate([before, before]),
        late=np.concatenate([0 * own, own]),
        running=np.concatenate([running, running]),
        phase=np.repeat([0, 1], num),
        others_bytes=np.array(others, dtype=float).T.reshape(-1),
    )


@st.composite
def any_moments(draw: st.DrawFn, num: int) -> Moments:
    num_moments = draw(st.integers(1, 6))
    counts = st.lists(st.integers(0, 3), min_size=num * num_moments, max_size=num * num_moments)
    each = st.lists(st.integers(-1, num - 1), min_size=num_moments, max_size=num_moments)
    others = st.lists(st.integers(0, 9), min_size=num_moments, max_size=num_moments)
    shape = (num_moments, num)
    return Moments(
        kept=np.array(draw(counts)).reshape(shape),
        late=np.array(draw(counts)).reshape(shape),
        running=np.array(draw(each)),
        phase=np.array(draw(each)) % 2,
        others_bytes=np.array(draw(others), dtype=float),
    )


def bytes_at(moments: Moments, row: int, picked: Sequence[Option]) -> float:
    """The bytes of one moment, by the definition of `Moments`."""
    total = float(moments.others_bytes[row])
    for block, option in enumerate(picked):
        total += moments.kept[row, block] * option.kept_bytes
        total += moments.late[row, block] * option.late_bytes
        if moments.running[row] == block:
            total += option.own_bytes[moments.phase[row]]
    return total


def check_choice(
    blocks: list[list[Option]], moments: Moments, limit: float, *, gap: float = 0.0
) -> None:
    def fits(picked: tuple[Option, ...]) -> bool:
        rows = range(len(moments.running))
        return all(bytes_at(moments, row, picked) <= limit for row in rows)

    times = [sum(o.time_s for o in p) for p in itertools.product(*blocks) if fits(p)]
    picks = choose(blocks, moments, limit)
    if not times:
        assert picks is None
        return
    assert picks is not None
    picked = tuple(options[i] for options, i in zip(blocks, picks))
    assert fits(picked)
    assert sum(o.time_s for o in picked) <= min(times) * (1 + gap)


@pytest.mark.parametrize("limit", range(43, 54))
def test_options_that_fill_the_memory_to_the_last_byte_are_found(limit: int) -> None:
    times = (1.0, 0.0), (0.0, 0.0, 1.0)
    kept = (0, 7), (7, 6, 0)
    late = (0, 0), (1, 3, 0)
    blocks = [
        [Option(kept_bytes=k, late_bytes=n, own_bytes=(k,), time_s=t) for k, n, t in zip(*each)]
        for each in zip(kept, late, times)
    ]
    moments = Moments(  # not in order: three micro-batches are held
        kept=np.array([[3, 3]]), late=np.array([[0, 1]]), running=np.array([0]),
        phase=np.array([0]), others_bytes=np.array([2.0]),
    )  # fmt: skip
    check_choice(blocks, moments, limit)


@given(chains(), st.data(), st.integers(0, 60))
def test_no_other_options_of_blocks_in_order_are_faster(
    blocks: list[list[Option]], data: st.DataObject, limit: int
) -> None:
    others = [(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))) for _ in blocks]
    check_choice(blocks, in_order(len(blocks), others), limit)


@given(chains(), st.data(), st.integers(0, 90))
def test_no_other_options_are_faster_at_any_moments(
    blocks: list[list[Option]], data: st.DataObject, limit: int
) -> None:
    check_choice(blocks, data.draw(any_moments(len(blocks))), limit, gap=GAP)


def test_many_blocks_are_chosen_within_the_limit_and_near_the_optimum() -> None:
    """A fractional knapsack bounds it: with unlike options, far more totals than are kept."""
    blocks = [
        [
            Option(kept_bytes=size, time_s=0.0),
            Option(kept_bytes=size // 3, time_s=time_s),
            Option(kept_bytes=0, time_s=4 * time_s),
        ]
        for size, time_s in ((10_007 + 97 * i * i, 1.0 + (i * 37 % 11) / 7) for i in range(40))
    ]
    none = np.zeros(1, dtype=int)

    def with_flights(num: int) -> Moments:
        once = np.full((1, len(blocks)), num)
        return Moments(
            kept=once, late=0 * once, running=none - 1, phase=none, others_bytes=np.zeros(1)
        )

    total = sum(options[0].kept_bytes for options in blocks)
    for share, flights in itertools.product((0.1, 0.4, 0.8), (1, 2)):
        picks = choose(blocks, with_flights(flights), flights * share * total)
        assert picks is not None
        picked = [options[i] for options, i in zip(blocks, picks)]
        assert sum(o.kept_bytes for o in picked) <= share * total
        steps = sorted(
            ((b.time_s - a.time_s) / (a.kept_bytes - b.kept_bytes), a.kept_bytes - b.kept_bytes)
            for options in blocks
            for a, b in itertools.pairwise(options)
        )
        bound, missing = 0.0, (1 - share) * total
        for rate, size in steps:
            taken = min(size, missing)
            bound, missing = bound + rate * taken, missing - taken
        assert bound <= sum(o.time_s for o in picked) * (1 + 1e-9)
        assert sum(o.time_s for o in picked) <= 1.02 * bound + 2 * max(o[2].time_s for o in blocks)
    for flights in (1, 2):
        assert choose(blocks, with_flights(flights), -1.0) is None
