"""Variants of one problem have the same solutions as separate problems."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import Pin, Problem, SearchError, solve, solve_each
from tests.search.search_problems import layered, problems


def ruled_out(problem, seed):
    """Node costs with +inf at random choices, the same at nodes that share their costs."""
    rng = np.random.default_rng(seed)
    shared = {}
    for cost in problem.node_costs:
        if id(cost) not in shared:
            keep = rng.random(len(cost)) < 0.7
            keep[rng.integers(len(cost))] = True
            shared[id(cost)] = np.where(keep, cost, np.inf)
    return [shared[id(cost)] for cost in problem.node_costs]


def alone(problem, costs):
    return solve(
        Problem(
            costs,
            problem.edge_costs,
            problem.node_memory,
            problem.memory_budget,
            memory_groups=problem.memory_groups,
        )
    )


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 99), count=st.integers(0, 4))
def test_each_variant_equals_its_own_search(problem, seed, count):
    variants = [ruled_out(problem, seed + index) for index in range(count)]
    found = solve_each(problem, variants)
    assert len(found) == count
    for solution, costs in zip(found, variants):
        expected = alone(problem, costs)
        assert (solution.status, solution.cost) == (expected.status, expected.cost)
        assert solution.least_feasible_budget == expected.least_feasible_budget


def test_layers_that_only_some_variants_tell_apart_are_told_apart():
    problem = layered(6)
    first = list(problem.node_costs)
    first[6] = first[6] + np.arange(9.0)
    found = solve_each(problem, [problem.node_costs, first])
    assert found[0].cost == pytest.approx(solve(problem).cost, rel=1e-12)
    assert found[1].cost == pytest.approx(alone(problem, first).cost, rel=1e-12)
    assert found[0].cost < found[1].cost


def test_a_problem_with_constraints_is_refused():
    problem = Problem([np.zeros(2)], {}, constraints=[Pin(node=0, choice=1)])
    with pytest.raises(SearchError, match=r"\+inf"):
        solve_each(problem, [problem.node_costs])
