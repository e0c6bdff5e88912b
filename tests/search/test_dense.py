"""Graphs too dense to eliminate: bounds hold, and local search never increases the cost."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import Problem, SearchError, Status, solve
from autopar.search.local_search import descend, improve
from autopar.search.messages import Messages
from autopar.search.reduction import reduce_problem
from autopar.search.solver import Options, Progress
from tests.search.search_problems import dense, problems


@settings(max_examples=80, deadline=None)
@given(problem=problems(memory=False), sweeps=st.integers(0, 6))
def test_message_bounds_rise_and_never_pass_the_optimum(problem, sweeps):
    reduction = reduce_problem(problem, dominance=False)
    if reduction is None:
        return
    optimum = solve(problem, method="brute_force")
    messages = Messages(reduction.problem)
    last = messages.bound()
    for sweep in range(sweeps):
        messages.sweep(forward=sweep % 2 == 0)
        bound = messages.bound()
        assert bound >= last - 1e-9
        last = bound
    assert last <= optimum.cost + 1e-9
    if optimum.status is Status.OPTIMAL:
        masks = messages.possible(optimum.cost)
        best = reduction.lower(optimum.assignment)
        assert all(mask[choice] for mask, choice in zip(masks, best))


@settings(max_examples=50, deadline=None)
@given(problem=problems(memory=False, forbidden=False), seed=st.integers(0, 99))
def test_descent_ends_where_no_single_change_helps(problem, seed):
    rng = np.random.default_rng(seed)
    start = tuple(int(rng.integers(problem.num_choices(n))) for n in range(problem.num_nodes))
    end = descend(problem, start, Progress(problem, Options()))
    assert problem.cost(end) <= problem.cost(start)
    for node in range(problem.num_nodes):
        for choice in range(problem.num_choices(node)):
            changed = (*end[:node], choice, *end[node + 1 :])
            assert problem.cost(end) <= problem.cost(changed) + 1e-9


def test_neighbourhoods_solved_exactly_reach_a_small_optimum():
    problem = dense(7, 4)
    progress = Progress(problem, Options())
    start = tuple([0] * 7)
    progress.offer(start)
    best = improve(problem, progress, progress.offer, start, until_s=math.inf)
    assert problem.cost(best) == pytest.approx(solve(problem, method="brute_force").cost)


def test_a_dense_graph_is_solved_within_a_proved_gap():
    problem = dense(40, 12)
    seen = []
    solution = solve(problem, time_limit_s=20, table_cap_bytes=1 << 24, on_incumbent=seen.append)
    assert "messages" in solution.method
    assert solution.gap <= 0.01
    costs = [each.cost for each in seen]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == solution.cost


@settings(max_examples=25, deadline=None)
@given(problem=problems(most_nodes=5))
def test_without_tables_auto_is_still_exact(problem):
    found = solve(problem, table_cap_bytes=8)
    expected = solve(problem, method="brute_force")
    assert (found.status, found.cost) == (expected.status, expected.cost)
    assert found.least_feasible_budget == expected.least_feasible_budget


def test_a_dense_graph_within_a_budget_has_an_answer_and_a_bound():
    free = dense(20, 8)
    rng = np.random.default_rng(1)
    memory = [rng.integers(1, 100, 8).astype(float) for _ in range(20)]
    used = Problem(free.node_costs, free.edge_costs, memory).memory(solve(free).assignment)
    problem = Problem(free.node_costs, free.edge_costs, memory, 0.8 * used[0])
    solution = solve(problem, table_cap_bytes=1 << 14, time_limit_s=4)
    frugal = [int(each.argmin()) for each in memory]
    assert "messages" in solution.method
    assert problem.fits(solution.assignment)
    assert 0 < solution.bound <= solution.cost <= problem.cost(frugal)


def test_tables_beyond_all_numbers_are_refused_in_time():
    """320 nodes, each pair joined: 30^319 entries overflow a float."""
    table = np.random.default_rng(0).random((30, 30))
    pairs = itertools.combinations(range(320), 2)
    problem = Problem([table[0]] * 320, dict.fromkeys(pairs, table))
    start = time.perf_counter()
    with pytest.raises(SearchError, match="inf bytes of tables"):
        solve(problem, method="elimination")
    assert time.perf_counter() - start < 20


def test_little_time_still_gives_a_bound_and_a_better_assignment():
    """Dominance over 780 distinct tables takes longer than the limit: it is left out."""
    rng = np.random.default_rng(0)
    costs = [4 * rng.random(50) for _ in range(40)]
    pairs = itertools.combinations(range(40), 2)
    edges = {pair: rng.random((50, 50)) for pair in pairs}
    free = solve(Problem(costs, edges), time_limit_s=1.0)
    assert free.bound > 0
    assert free.cost < Problem(costs, edges).cost([int(c.argmin()) for c in costs])
    memory = [5 - cost for cost in costs]
    least = math.fsum(float(each.min()) for each in memory)
    tight = solve(Problem(costs, edges, memory, 1.2 * least), time_limit_s=1.0)
    assert tight.bound > 0
    assert tight.time_s < 5
    broken = solve(Problem(costs, edges, memory, 0.9 * least), time_limit_s=1.0)
    assert broken.status is Status.INFEASIBLE
    assert broken.least_feasible_budget == least
