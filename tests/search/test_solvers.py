"""Common to all solvers: one interface, warm starts, seeds, time limits, relabelling."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import Method, Problem, SearchError, Status, solve
from autopar.search.api import SOLVERS
from tests.search.search_problems import authors_problem, dense, layered, problems


def test_every_method_has_a_solver_of_its_name():
    assert set(SOLVERS) == set(Method)
    assert all(solver.method is method for method, solver in SOLVERS.items())


@pytest.mark.parametrize("method", list(Method))
@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_each_solver_keeps_what_its_capability_promises(method, problem):
    expected = solve(problem, method="brute_force")
    found = solve(problem, method=method)
    capability = SOLVERS[method].capability
    assert capability.memory
    assert found.bound <= expected.cost
    assert found.cost >= expected.cost
    if found.assignment:
        assert problem.fits(found.assignment)
        assert problem.cost(found.assignment) == found.cost
    if capability.proves:
        assert (found.status, found.cost) == (expected.status, expected.cost)
    else:
        assert found.status in (Status.FEASIBLE, Status.UNKNOWN)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_relabelling_nodes_changes_nothing(problem, seed):
    new = np.random.default_rng(seed).permutation(problem.num_nodes)
    old = np.argsort(new)
    relabelled = Problem(
        [problem.node_costs[node] for node in old],
        {(int(new[i]), int(new[j])): table for (i, j), table in problem.edge_costs.items()},
        None if problem.node_memory is None else [problem.node_memory[node] for node in old],
        problem.memory_budget,
        memory_groups=None
        if problem.memory_groups is None
        else [problem.memory_groups[node] for node in old],
    )
    first, second = solve(problem), solve(relabelled)
    assert (first.status, first.cost) == (second.status, second.cost)
    assert first.least_feasible_budget == second.least_feasible_budget


def test_equal_calls_give_equal_answers():
    free = solve(layered(2))
    problem = layered(2, budget=0.7 * free.memory[0])
    for arguments in ({"gap": 1e-3}, {"method": "mcmc", "seed": 3}, {"method": "ilp"}):
        first, second = solve(problem, **arguments), solve(problem, **arguments)
        assert first.assignment == second.assignment


def test_a_warm_start_is_never_made_worse():
    problem, optimum = authors_problem("alexnet_p8")
    best = solve(problem).assignment
    for method in ("mcmc", "ilp", "auto"):
        assert solve(problem, method=method, warm_start=best).cost == pytest.approx(optimum)


def test_the_chain_finds_good_assignments_of_a_small_network():
    problem, optimum = authors_problem("rnnlm_p16")
    solution = solve(problem, method="mcmc", seed=1)
    assert optimum * (1 - 1e-9) <= solution.cost <= 1.2 * optimum
    assert solution.status is Status.FEASIBLE
    assert solution.bound == -np.inf


def test_brute_force_refuses_what_it_cannot_enumerate():
    with pytest.raises(SearchError, match="assignments, over"):
        solve(dense(30, 5), method="brute_force")


def test_no_time_still_gives_an_answer_in_no_time():
    problem = dense(40, 12)
    start = time.perf_counter()
    solution = solve(problem, time_limit_s=0.5, table_cap_bytes=1 << 20)
    assert time.perf_counter() - start < 5
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert solution.bound <= solution.cost


def test_two_thousand_nodes_with_skips_take_seconds():
    solution = solve(layered(340, num_choices=40))
    assert solution.status is Status.OPTIMAL
    assert solution.time_s < 10


class Clock:
    """A clock that advances only when it is read."""

    def __init__(self, step_s):
        self.now_s, self.step_s = 0.0, step_s

    def process_time(self):
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.parametrize("method", ["elimination", "auto"])
def test_the_time_limit_ends_one_large_step_with_the_best_so_far(method, monkeypatch):
    # Five nodes, all joined: the first of five steps is all the work, in many pieces.
    rng = np.random.default_rng(0)
    pairs = [(i, j) for j in range(5) for i in range(j)]
    tables = {pair: rng.random((36, 36)) for pair in pairs}
    problem = Problem([rng.random(36) for _ in range(5)], tables)
    optimum = solve(problem)
    assert optimum.status is Status.OPTIMAL
    clock = Clock(1e-2)
    monkeypatch.setattr("autopar.search.solver.time", clock)
    early = solve(problem, method=method, time_limit_s=0.3)
    assert clock.now_s < 0.4  # read a few dozen times, not once a piece of every step
    assert early.status is Status.FEASIBLE
    assert "time limit" in early.message
    assert early.bound <= optimum.cost <= early.cost
    assert problem.cost(early.assignment) == early.cost


def test_a_limit_of_no_time_still_gives_an_assignment():
    problem = layered(2, budget=1e9)
    early = solve(problem, time_limit_s=0.0)
    assert problem.fits(early.assignment)
    assert early.status is Status.FEASIBLE


def test_a_chain_takes_no_more_steps_than_it_is_given():
    problem = layered(4)
    short, long = (solve(problem, method="mcmc", max_steps=steps) for steps in (0, 20_000))
    cheapest = tuple(int(cost.argmin()) for cost in problem.node_costs)
    assert short.assignment == cheapest
    assert long.cost < short.cost


@settings(max_examples=60, deadline=None)
@given(problem=problems(), part=st.floats(0.0, 1.5))
def test_a_cutoff_ends_the_search_with_a_bound_that_reaches_it(problem, part):
    optimum = solve(problem)
    cutoff = part * optimum.cost if optimum.assignment else 1.0
    found = solve(problem, cutoff=cutoff)
    assert found.bound <= optimum.cost
    if found.status is not Status.INFEASIBLE:
        reached = min(cutoff, optimum.cost)
        assert found.bound >= reached or found.bound == pytest.approx(reached, rel=1e-12)
