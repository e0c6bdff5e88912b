"""Elimination is exact in any order, reuses equal layers, and keeps to its memory cap."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import Problem, SearchError, Status, solve
from autopar.search.elimination import (
    MAX_DIMS,
    Pattern,
    TableTooLargeError,
    best_program,
    compile_order,
)
from autopar.search.minplus import min_sum_step
from autopar.search.ordering import Rule, simulate
from tests.search.search_problems import authors_problem, dense, layered, problems


def sizes_of(problem):
    return [len(cost) for cost in problem.node_costs]


@settings(max_examples=150, deadline=None)
@given(problem=problems(memory=False, most_nodes=7))
def test_elimination_equals_brute_force(problem):
    found, expected = solve(problem, method="elimination"), solve(problem, method="brute_force")
    assert (found.status, found.cost) == (expected.status, expected.cost)
    if expected.status is Status.OPTIMAL:
        assert problem.cost(found.assignment) == expected.cost
        assert found.bound == found.cost


def test_a_node_with_more_neighbours_than_an_array_has_dims() -> None:
    """Found by GPT-2 XL on 16,384 devices: most of them have a single choice."""
    draw = np.random.default_rng(0)
    leaves = range(1, 2 * MAX_DIMS)
    problem = Problem(
        [draw.random(3), *(draw.random(1) for _ in leaves)],
        {(0, leaf): draw.random((3, 1)) for leaf in leaves},
    )
    best = min(
        problem.node_costs[0][hub]
        + sum(
            (problem.node_costs[leaf] + problem.edge_costs[0, leaf][hub]).min() for leaf in leaves
        )
        for hub in range(3)
    )
    found = solve(problem)
    assert found.status is Status.OPTIMAL
    assert found.cost == pytest.approx(best)
    assert best_program(problem.node_costs, problem.edge_costs).size_bytes == math.inf


@settings(max_examples=40, deadline=None)
@given(problem=problems(memory=False))
def test_every_order_gives_the_same_optimum(problem):
    expected = solve(problem, method="brute_force").cost
    for rule in Rule:
        order = simulate(sizes_of(problem), problem.edge_costs, rule)
        assert sorted(order.nodes) == list(range(problem.num_nodes))
        program = compile_order(order, Pattern.of(problem.node_costs, problem.edge_costs))
        values = program.run(problem.node_costs, problem.edge_costs, math.inf)
        assert values.optimum == expected


@settings(max_examples=60, deadline=None)
@given(problem=problems(memory=False))
def test_marginals_are_the_least_cost_with_each_choice(problem):
    expected = [np.full(size, math.inf) for size in sizes_of(problem)]
    for assignment in itertools.product(*map(range, sizes_of(problem))):
        cost = problem.cost(assignment)
        for node, choice in enumerate(assignment):
            expected[node][choice] = min(expected[node][choice], cost)
    program = best_program(problem.node_costs, problem.edge_costs)
    values = program.run(problem.node_costs, problem.edge_costs, math.inf)
    if values.optimum == math.inf:
        return
    for found, least in zip(program.marginals(values), expected):
        np.testing.assert_array_equal(found, least)


@pytest.mark.parametrize("name", ["alexnet_p8", "rnnlm_p16", "inception3_p4", "transformer_p4"])
@pytest.mark.parametrize("method", ["elimination", "auto"])
def test_the_authors_optimum_is_reached(name, method):
    problem, optimum = authors_problem(name)
    solution = solve(problem, method=method)
    assert solution.status is Status.OPTIMAL
    assert solution.cost == pytest.approx(optimum, rel=1e-9)
    assert solution.time_s < 2.0


def test_equal_layers_are_eliminated_once():
    few, many = best_program(*tables_of(layered(8))), best_program(*tables_of(layered(64)))
    distinct = best_program(*tables_of(copied(layered(64))))
    added = (many.num_operations - few.num_operations) / 56
    assert added < 0.1 * distinct.num_operations / 64


def test_problems_of_one_pattern_share_a_program():
    """Their numbers differ, and which tables are the same does not."""
    one, other = layered(8), layered(8)
    doubled = {id(cost): 2 * cost for cost in one.edge_costs.values()}
    twice = Problem(
        one.node_costs, {edge: doubled[id(cost)] for edge, cost in one.edge_costs.items()}
    )
    program = best_program(*tables_of(one))
    assert program is best_program(*tables_of(other))
    assert program is best_program(*tables_of(twice))
    assert program is not best_program(*tables_of(copied(one)))
    values = program.run(*tables_of(twice), math.inf)
    assert values.optimum == solve(copied(twice)).cost


def copied(problem):
    return Problem(
        [cost.copy() for cost in problem.node_costs],
        {edge: table.copy() for edge, table in problem.edge_costs.items()},
    )


def test_equal_layers_cost_what_distinct_layers_cost():
    shared = layered(6)
    assert solve(copied(shared)).cost == pytest.approx(solve(shared).cost, rel=1e-12)


def tables_of(problem):
    return problem.node_costs, problem.edge_costs


def test_a_chain_equals_the_shortest_path():
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(3)
    costs = [rng.random(5) for _ in range(30)]
    edges = {(i, i + 1): rng.random((5, 5)) for i in range(29)}
    graph = networkx.DiGraph()
    for choice in range(5):
        graph.add_edge("start", (0, choice), weight=costs[0][choice])
        graph.add_edge((29, choice), "end", weight=0.0)
    for (i, j), table in edges.items():
        for a, b in np.ndindex(5, 5):
            graph.add_edge((i, a), (j, b), weight=table[a, b] + costs[j][b])
    length = networkx.dijkstra_path_length(graph, "start", "end")
    assert solve(Problem(costs, edges)).cost == pytest.approx(length, rel=1e-12)


def test_ties_go_to_the_lowest_choice():
    problem = Problem(
        [np.zeros(3)] * 5, {(i, j): np.zeros((3, 3)) for j in range(5) for i in range(j)}
    )
    assert solve(problem, method="elimination").assignment == (0,) * 5


def test_the_dependent_set_of_a_grid_is_its_short_side():
    edges = [(4 * r + c, 4 * r + c + 1) for r in range(9) for c in range(3)]
    edges += [(4 * r + c, 4 * r + c + 4) for r in range(8) for c in range(4)]
    assert simulate([3] * 36, edges, Rule.NATURAL).width == 4
    assert 4 <= simulate([3] * 36, edges, Rule.PASE).width <= 5


def test_over_the_cap_the_solver_says_so_and_auto_goes_on():
    problem = dense(8, 7, node_scale_s=0.5)
    with pytest.raises(SearchError, match="bytes of tables"):
        solve(problem, method="elimination", table_cap_bytes=1000)
    program = best_program(*tables_of(problem))
    with pytest.raises(TableTooLargeError, match="table_cap_bytes=1e"):
        program.run(*tables_of(problem), 1000)
    solution = solve(problem, table_cap_bytes=1000)
    assert solution.status is Status.OPTIMAL
    assert "messages" in solution.method
    assert solution.cost == pytest.approx(solve(problem, method="elimination").cost, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), large=st.booleans())
def test_the_kernel_equals_one_broadcast_sum(seed, large):
    rng = np.random.default_rng(seed)
    num_dims = int(rng.integers(1, 5))
    top = (24 if num_dims == 4 else 40) if large else 5
    shape = tuple(int(size) for size in rng.integers(1, top, num_dims))
    if large and num_dims == 4:
        shape = (shape[0] + 60, *shape[1:])
    local = [((0,), rng.integers(0, 9, shape[0]).astype(float))]
    for dim in range(1, num_dims):  # few distinct rows, so that classes exist
        rows = rng.integers(0, 9, (2, shape[0])).astype(float)
        local.append(((dim, 0), rows[rng.integers(0, 2, shape[dim])]))
    dims = tuple(int(dim) for dim in rng.permutation(num_dims)[: rng.integers(1, num_dims + 1)])
    dims = dims if 0 in dims else (0, *dims)
    local.append((dims, rng.integers(0, 9, [shape[dim] for dim in dims]).astype(float)))
    total = np.zeros(shape)
    for dims, table in local:
        index = [None] * num_dims
        for dim in dims:
            index[dim] = slice(None)
        total += np.transpose(table, np.argsort(dims))[tuple(index)]
    np.testing.assert_array_equal(min_sum_step(shape, local, {}), total.min(axis=0))
