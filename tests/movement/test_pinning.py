"""Pinning and least traffic: dynamic program, integer program and brute force agree."""

from __future__ import annotations

import random

import pytest

from autopar.base.errors import MovementError
from autopar.movement.gaps import gaps_by_tensor, gaps_of, movement_plan, transfer_bytes
from autopar.movement.pinning.dynamic import pin_by_dynamic_program
from autopar.movement.pinning.greedy import pin_greedily
from autopar.movement.pinning.integer import least_capacity, pin_by_program
from autopar.movement.pinning.problem import (
    Pinning,
    PinningProblem,
    Window,
    adjacent,
    twice_largest,
)
from autopar.movement.residency import held_bytes, least_traffic
from autopar.movement.residency import least_capacity as least_to_run
from autopar.movement.verify import verify
from tests.movement.drawn import drawn_problem, drawn_step, subsets


def by_brute_force(problem: PinningProblem) -> tuple[int | None, int]:
    """The best saving, None if nothing fits, and the least capacity."""
    needs = [(problem.needed_bytes(s), problem.saved_bytes(s)) for s in subsets(problem.num_items)]
    fitting = [saved for needed, saved in needs if needed <= problem.capacity_bytes]
    return max(fitting, default=None), min(needed for needed, _ in needs)


@pytest.mark.parametrize("solve", [pin_by_dynamic_program, pin_by_program])
def test_program_and_brute_force_agree(solve):
    draw = random.Random(1)
    num_infeasible = 0
    for _ in range(60):
        problem = drawn_problem(draw)
        best, least = by_brute_force(problem)
        if best is None:
            num_infeasible += 1
            with pytest.raises(MovementError, match=f"at least {least} bytes") as caught:
                solve(problem)
            assert caught.value.least_bytes == least == least_capacity(problem)
        else:
            found: Pinning = solve(problem)
            assert problem.fits(found.pinned)
            assert found.saved_bytes == problem.saved_bytes(found.pinned) == best
            assert found.is_optimal
    assert 15 < num_infeasible < 45


@pytest.mark.parametrize("solve", [pin_by_dynamic_program, pin_by_program])
def test_a_capacity_that_suffices_by_less_than_the_solvers_tolerance_is_not_refused(solve):
    """The integer program accepts a set that is a few bytes over, then none with slack."""
    sizes = (35630780113, 64397850948, 14786650925, 58508790925, 277)
    problem = PinningProblem(
        sizes=sizes,
        savings=sizes,
        windows=tuple(Window(items=items) for items in [(0, 3, 4), (0, 2), (1,), (1, 4)]),
        num_held=2,
        capacity_bytes=164426482287,
    )
    _, least = by_brute_force(problem)
    assert problem.capacity_bytes == least + 1
    assert problem.fits(solve(problem).pinned)


def test_a_tolerance_costs_no_more_than_it_says():
    draw = random.Random(2)
    for _ in range(40):
        problem = drawn_problem(draw)
        best, _ = by_brute_force(problem)
        if best is not None:
            found = pin_by_dynamic_program(problem, tolerance=0.05)
            assert problem.fits(found.pinned)
            assert found.saved_bytes >= (1 - 0.1) * best


def test_the_best_set_so_far_is_returned_at_a_time_limit():
    draw = random.Random(5)
    num_worse = 0
    for _ in range(200):
        problem = drawn_problem(draw)
        best, _ = by_brute_force(problem)
        if best is not None:
            found = pin_by_dynamic_program(problem, time_limit_s=0.0)
            assert problem.fits(found.pinned)
            assert found.saved_bytes == problem.saved_bytes(found.pinned) <= best
            assert best <= found.bound_bytes
            num_worse += found.saved_bytes < best
    assert num_worse


def test_geeps_pins_no_more_than_the_best_and_refuses_where_others_do_not():
    draw = random.Random(3)
    num_refused = num_worse = 0
    for _ in range(200):
        problem = drawn_problem(draw)
        best, _ = by_brute_force(problem)
        if problem.num_held * max(problem.full_loads) > problem.capacity_bytes:
            with pytest.raises(MovementError, match="GeePS needs room"):
                pin_greedily(problem)
            num_refused += best is not None
            continue
        found = pin_greedily(problem)
        assert best is not None
        assert problem.fits(found.pinned)
        assert found.saved_bytes <= best
        num_worse += found.saved_bytes < best
    assert num_refused
    assert num_worse


def partition(numbers: list[int]) -> PinningProblem:
    """The instance of the module's docstring."""
    largest = max(numbers)
    own = [Window(items=(i,)) for i in range(len(numbers))]
    return PinningProblem(
        sizes=tuple(numbers),
        savings=tuple(numbers),
        windows=(*own, Window(items=(), reserved_bytes=largest)),
        num_held=2,
        capacity_bytes=sum(numbers) // 2 + 2 * largest,
    )


@pytest.mark.parametrize(
    ("numbers", "divides"),
    [
        ([771, 121, 281, 854, 885, 734, 486, 1003, 83, 62], True),
        ([3, 5, 8, 2], False),
        ([8, 9, 4, 1, 30], False),
        ([7, 7, 7, 7, 7, 7, 5, 5], True),
        ([20, 20, 20, 1, 1, 2], False),
    ],
)
@pytest.mark.parametrize("solve", [pin_by_dynamic_program, pin_by_program])
def test_pinning_solves_partition(solve, numbers: list[int], divides: bool):
    found = solve(partition(numbers))
    half = sum(numbers) / 2
    assert (found.saved_bytes == half) == divides
    if divides:
        assert sum(numbers[i] for i in found.pinned) == half


def test_what_meets_the_condition_of_geeps_meets_the_tighter_one():
    draw = random.Random(4)
    for _ in range(150):
        step = drawn_step(draw)
        loose, tight = twice_largest(step, 0), adjacent(step, 0)
        assert loose.savings == tight.savings
        for pinned in subsets(loose.num_items):
            assert tight.needed_bytes(pinned) <= loose.needed_bytes(pinned)


def test_the_plan_of_a_pinned_set_keeps_within_the_capacity_of_its_condition():
    """Every other tensor moves in all of its gaps, and what is copied is what is not saved."""
    draw = random.Random(5)
    for _ in range(150):
        step = drawn_step(draw)
        problem = adjacent(step, 0)
        sizes = {tensor.name: tensor.size_bytes for tensor in step.tensors}
        for pinned in subsets(problem.num_items):
            moved = [gap for gap in gaps_of(step) if gap.tensor not in pinned]
            plan = movement_plan(step, moved)
            verify(plan, step, problem.needed_bytes(pinned))
            assert plan.moved_bytes(sizes) == sum(problem.savings) - problem.saved_bytes(pinned)


def test_least_traffic_is_that_of_brute_force():
    draw = random.Random(6)
    num_solved = num_infeasible = 0
    while num_solved < 60:
        step = drawn_step(draw)
        gaps, by_tensor = gaps_of(step), gaps_by_tensor(step)
        if not 0 < len(gaps) < 8:
            continue
        capacity = draw.randint(step.peak_bytes // 3, step.peak_bytes)
        costs = [
            sum(transfer_bytes(t, of, moved) for t, of in zip(step.tensors, by_tensor))
            for moved in ({gaps[i] for i in chosen} for chosen in subsets(len(gaps)))
            if max(map(max, held_bytes(step, moved))) <= capacity
        ]
        if not costs:
            num_infeasible += 1
            with pytest.raises(MovementError) as caught:
                least_traffic(step, capacity)
            assert caught.value.least_bytes == least_to_run(step) > capacity
            least = least_to_run(step)
            verify(least_traffic(step, least).plan(step), step, least)
            continue
        num_solved += 1
        found = least_traffic(step, capacity)
        assert found.moved_bytes == found.bound_bytes == min(costs)
        verify(found.plan(step), step, capacity)
        hurried = least_traffic(step, capacity, time_limit_s=1e-9)
        assert hurried.bound_bytes <= min(costs) <= hurried.moved_bytes
        verify(hurried.plan(step), step, capacity)
    assert num_infeasible > 8
