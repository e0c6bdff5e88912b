"""Under memory budgets every exact method equals brute force, and bounds always hold."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import Problem, Status, budget, ilp, solve
from autopar.search.reduction import Reduction
from autopar.search.solver import Options, OutOfTimeError, Progress
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


@pytest.mark.parametrize("arguments", [{"method": "ilp"}, {"table_cap_bytes": 1}, {}])
def test_a_byte_more_or_less_is_seen_beside_terabytes(arguments):
    """Two groups that each differ by a few bytes in 2**40, and two nodes that must agree."""
    base = 2.0**40
    memory = [base + np.array([0.0, 2.0, 4.0])] * 2 + [base + np.array([1.0, 0.0, 3.0])]
    equal = np.where(np.eye(3, dtype=bool), 0.0, np.inf)
    costs = [np.array([9.0, 4.0, 0.0])] * 3

    def found(spare, *groups):
        return solve(
            Problem(costs, {(0, 1): equal}, memory, 2 * base + spare, memory_groups=groups),
            **arguments,
        )

    assert found(4.0, 0, 0, 1).cost == 8.0
    assert found(3.0, 0, 0, 1).cost == 18.0
    assert found(-1.0, 0, 0, 1).status is Status.INFEASIBLE
    assert found(-1.0, 0, 0, 1).least_feasible_budget == 2 * base


@pytest.mark.parametrize("method", ["auto", "elimination", "ilp", "brute_force", "mcmc"])
def test_a_problem_without_nodes_costs_nothing(method):
    for problem in (Problem([], {}), Problem([], {}, [], 0.0)):
        solution = solve(problem, method=method)
        assert (solution.assignment, solution.cost) == ((), 0.0)
        assert solution.status is (Status.FEASIBLE if method == "mcmc" else Status.OPTIMAL)


def test_nothing_is_called_infeasible_without_a_proof(monkeypatch):
    """Too large for tables and for the ILP, and the one frugal assignment is forbidden."""
    monkeypatch.setattr(ilp, "_MAX_VARIABLES", 0)
    equal = np.where(np.eye(3, dtype=bool), 0.0, np.inf)
    costs, memory = [np.array([5.0, 5.0, 0.0])] * 2, [[0.0, 2.0, 9.0], [2.0, 0.0, 9.0]]
    kept = solve(Problem(costs, {(0, 1): equal}, memory, 2.0), table_cap_bytes=1, max_steps=0)
    assert kept.status is not Status.INFEASIBLE
    assert kept.bound <= 10.0


def test_the_ilp_runs_when_the_first_branches_run_out_of_their_share_of_time(monkeypatch):
    ran = []

    def branch(*args, max_branches=None):
        ran.append(max_branches)
        if max_branches is not None:
            raise OutOfTimeError  # from an elimination, which checks the limit inside

    dual = SimpleNamespace(
        maximise=lambda: SimpleNamespace(prices=(0.0,)), mix=lambda: None, fix=lambda best: None
    )
    monkeypatch.setattr(budget, "Lagrangian", lambda reduction, progress: dual)
    monkeypatch.setattr(budget, "_is_feasible", lambda dual, progress: True)
    monkeypatch.setattr(budget, "_by_pool", lambda dual, best, progress: None)
    monkeypatch.setattr(budget, "_by_ilp", lambda left, progress: ran.append("ilp"))
    monkeypatch.setattr(budget, "branch_and_bound", branch)
    problem = Problem([np.zeros(1)], {})
    progress = Progress(problem, Options(time_limit_s=1000.0))
    budget.solve_with_budget(Reduction(problem=problem, keep=()), progress, use_ilp=True)
    assert ran == [budget._FIRST_BRANCHES, "ilp", None]
