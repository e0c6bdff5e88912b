"""Under memory budgets every exact method equals brute force, and bounds always hold."""

import math
from dataclasses import replace

import pytest
from autopar.search import Status, solve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search.search_problems import layered, problems


@pytest.mark.parametrize("method", ["auto", "elimination", "ilp"])
@settings(max_examples=100, deadline=None)
@given(problem=problems(memory=True))
def test_every_exact_method_equals_brute_force(method, problem):
    found, expected = solve(problem, method=method), solve(problem, method="brute_force")
    assert (found.status, found.cost) == (expected.status, expected.cost)
    assert found.least_feasible_budget == expected.least_feasible_budget
    if found.assignment:
        assert problem.fits(found.assignment)
        assert problem.cost(found.assignment) == found.cost
        assert found.memory == problem.memory(found.assignment)


@settings(max_examples=40, deadline=None)
@given(problem=problems(memory=True), factor=st.floats(1.0, 2.0))
def test_more_memory_never_costs_more(problem, factor):
    more = replace(problem, memory_budget=[budget * factor for budget in problem.budgets])
    assert solve(more).cost <= solve(problem).cost


@settings(max_examples=40, deadline=None)
@given(problem=problems(memory=True))
def test_the_least_feasible_budget_is_feasible_and_no_less_is(problem):
    least = solve(problem).least_feasible_budget
    if least is None:
        return
    assert solve(replace(problem, memory_budget=least)).status is Status.OPTIMAL
    if least > 0:
        below = math.nextafter(least, 0)
        assert solve(replace(problem, memory_budget=below)).status is Status.INFEASIBLE


@pytest.mark.parametrize("part", [0.9, 0.6, 0.4])
def test_repeated_layers_come_within_a_small_proved_gap(part):
    free = solve(layered(12))
    problem = layered(12, budget=part * free.memory[0])
    solution = solve(problem, gap=1e-2, time_limit_s=60)
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert problem.fits(solution.assignment)
    assert free.cost <= solution.bound <= solution.cost
    assert solution.gap <= 1e-2


@pytest.mark.parametrize("part", [0.8, 0.5])
def test_two_exact_methods_agree_on_repeated_layers(part):
    free = solve(layered(2))
    problem = layered(2, budget=part * free.memory[0])
    found = [solve(problem, method=method) for method in ("auto", "elimination", "ilp")]
    assert {each.status for each in found} == {Status.OPTIMAL}
    assert [each.cost for each in found] == pytest.approx([found[0].cost] * 3, rel=1e-9)


def test_bounds_of_an_early_stop_hold():
    free = solve(layered(3))
    problem = layered(3, budget=0.8 * free.memory[0])
    optimum = solve(problem, method="ilp").cost
    for time_limit_s in (0.0, 0.01, 0.05, 0.2):
        early = solve(problem, time_limit_s=time_limit_s)
        assert early.bound <= optimum * (1 + 1e-7)
        assert early.cost >= optimum * (1 - 1e-7)
