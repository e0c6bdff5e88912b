"""Exact choices of what is kept equal the best of all choices by enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.search.problem import SearchError
from autopar.search.recompute import (
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
        kept = draw(st.integers(0, 9))
        return Option(
            kept_bytes=kept,
            own_bytes=(kept + draw(st.integers(0, 9)), draw(st.integers(0, 9))),
            time_s=float(draw(st.integers(0, 9))),
        )

    return [
        [option() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 5)))
    ]


@given(chains(), st.data(), st.integers(0, 60))
def test_no_other_options_of_the_blocks_are_faster(
    blocks: list[list[Option]], data: st.DataObject, limit: int
) -> None:
    others = [(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))) for _ in blocks]

    def fits(picked: tuple[Option, ...]) -> bool:
        held = itertools.accumulate((o.kept_bytes for o in picked), initial=0)
        return all(
            h + own + other <= limit
            for h, option, block in zip(held, picked, others)
            for own, other in zip(option.own_bytes, block)
        )

    times = [sum(o.time_s for o in p) for p in itertools.product(*blocks) if fits(p)]
    picks = choose(blocks, others, limit)
    if not times:
        assert picks is None
        return
    assert picks is not None
    picked = tuple(options[i] for options, i in zip(blocks, picks))
    assert fits(picked)
    assert sum(o.time_s for o in picked) == min(times)


def test_many_blocks_are_chosen_within_the_limit_and_near_the_optimum() -> None:
    """A fractional knapsack bounds it: with unlike options, far more totals than are kept."""
    blocks = [
        [
            Option(kept_bytes=size, own_bytes=(size,), time_s=0.0),
            Option(kept_bytes=size // 3, own_bytes=(size // 3,), time_s=time_s),
            Option(kept_bytes=0, own_bytes=(0,), time_s=4 * time_s),
        ]
        for size, time_s in ((10_007 + 97 * i * i, 1.0 + (i * 37 % 11) / 7) for i in range(40))
    ]
    total = sum(options[0].kept_bytes for options in blocks)
    for share in (0.1, 0.4, 0.8):
        picks = choose(blocks, [(0.0,)] * len(blocks), share * total)
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
    assert choose(blocks, [(0.0,)] * len(blocks), -1.0) is None
