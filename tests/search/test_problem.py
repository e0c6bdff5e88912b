"""A problem is checked at construction, names the mistake, and does not depend on dict order."""

import math

import numpy as np
import pytest

from autopar.search import Pin, Problem, SearchError, solve

COSTS = [np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0])]
TABLE = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"node_costs": [np.array([1.0, math.nan])]}, "cost of node '0' holds NaN"),
        ({"node_costs": [np.array([-math.inf])]}, "cost of node '0' holds -inf"),
        ({"node_costs": [np.zeros((2, 2))]}, "shape"),
        ({"node_costs": [np.zeros(0)]}, "at least one choice"),
        ({"node_costs": [["a"]]}, "not an array of numbers"),
        ({"edge_costs": {(0, 1): TABLE.T}}, r"shape \[3, 2\], must be \[2, 3\]"),
        ({"edge_costs": {(0, 1): TABLE * math.nan}}, "edge .'0', '1'. holds NaN"),
        ({"edge_costs": {(0, 2): TABLE}}, "outside 0..1"),
        ({"edge_costs": {(1, 1): np.zeros((3, 3))}}, "joins node '1' to itself"),
        ({"edge_costs": {(0, 1): TABLE, (1, 0): TABLE.T}}, "both directions"),
        ({"edge_costs": {"01x": TABLE}}, "not a pair"),
        ({"node_names": ["a"]}, "1 names for 2 nodes"),
        ({"node_names": ["a", "a"]}, "'a' twice"),
        ({"memory_budget": 1.0}, "without node_memory"),
        ({"node_memory": [np.zeros(2)]}, "1 arrays for 2 nodes"),
        ({"node_memory": [np.zeros(2), np.array([1.0, -1.0, 0.0])]}, "memory of node '1'"),
        ({"node_memory": [np.zeros(2), np.array([1.0, math.inf, 0.0])]}, "must be finite"),
        ({"node_memory": [np.zeros(2), np.zeros(2)]}, "must be .3."),
        ({"memory_groups": [0]}, "1 entries"),
        ({"memory_groups": [0, -1]}, "below 0"),
        ({"node_memory": COSTS, "memory_budget": -1.0}, "must be at least 0"),
        (
            {"node_memory": COSTS, "memory_budget": [1.0], "memory_groups": [0, 1]},
            "1 numbers for 2",
        ),
        ({"node_costs": [[[1.0], [1.0, 2.0]]]}, "not an array of numbers"),
        ({"edge_costs": [(0, 1)]}, "must be a mapping"),
        ({"edge_costs": {(0, 1.5): TABLE}}, "not a pair"),
        ({"memory_groups": [0, 0.5]}, "one whole number per node"),
        ({"node_memory": COSTS, "memory_budget": "60GiB"}, "not a number of bytes"),
        ({"node_memory": COSTS, "memory_budget": [[1.0]]}, "2 dims"),
        ({"constraints": Pin(node=0, choice=0)}, "give a list"),
    ],
)
def test_what_is_wrong_is_named(arguments, words):
    with pytest.raises(SearchError, match=words):
        Problem(**{"node_costs": COSTS, "edge_costs": {}, **arguments})


def test_names_stand_in_messages():
    with pytest.raises(SearchError, match=r"edge \('fc1', 'fc2'\)"):
        Problem(COSTS, {(0, 1): math.nan * TABLE}, node_names=["fc1", "fc2"])


def test_a_reversed_edge_is_its_transpose():
    straight, reversed_ = Problem(COSTS, {(0, 1): TABLE}), Problem(COSTS, {(1, 0): TABLE.T})
    for assignment in np.ndindex(2, 3):
        assert straight.cost(assignment) == reversed_.cost(assignment)


def test_one_array_at_many_places_stays_one():
    cost, table = np.zeros(3), np.zeros((3, 3))
    problem = Problem([cost] * 4, {(0, 1): table, (1, 2): table, (2, 3): table})
    assert len({id(each) for each in problem.node_costs}) == 1
    assert len({id(each) for each in problem.edge_costs.values()}) == 1
    assert np.shares_memory(problem.edge_costs[0, 1], table)


def test_the_callers_arrays_stay_writeable_and_the_problems_do_not():
    cost = np.zeros(2)
    problem = Problem([cost], {})
    cost[0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        problem.node_costs[0][0] = 2.0


def test_the_order_of_the_mapping_does_not_matter():
    rng = np.random.default_rng(0)
    costs = [rng.integers(0, 3, 3).astype(float) for _ in range(8)]
    edges = {(i, j): rng.integers(0, 3, (3, 3)).astype(float) for i in range(8) for j in range(i)}
    backward = dict(reversed(edges.items()))
    first, second = solve(Problem(costs, edges)), solve(Problem(costs, backward))
    assert first.assignment == second.assignment
    assert first.cost == second.cost


def test_a_wrong_assignment_is_refused():
    problem = Problem(COSTS, {(0, 1): TABLE})
    with pytest.raises(SearchError, match="3 choices for 2 nodes"):
        problem.cost((0, 0, 0))
    with pytest.raises(SearchError, match="choice 3 of node '1'"):
        problem.cost((0, 3))


def test_an_unknown_method_is_refused():
    with pytest.raises(SearchError, match="'elimination'"):
        solve(Problem(COSTS, {}), method="dp")


def test_no_nodes_cost_nothing():
    solution = solve(Problem([], {}))
    assert (solution.assignment, solution.cost, solution.status) == ((), 0.0, "OPTIMAL")
