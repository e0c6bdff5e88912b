"""Reductions keep an optimum within the budget, and remove the choices they are meant to remove."""

import math

import numpy as np
from hypothesis import given, settings

from autopar.search import Problem, Status, solve
from autopar.search.reduction import reduce_problem
from tests.search.search_problems import problems


@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_the_reduced_optimum_lifts_to_an_optimum(problem):
    expected = solve(problem, method="brute_force")
    reduction = reduce_problem(problem)
    if reduction is None:
        assert expected.status is Status.INFEASIBLE
        return
    found = solve(reduction.problem, method="brute_force")
    assert found.status is expected.status
    if found.assignment:
        lifted = reduction.lift(found.assignment)
        assert problem.cost(lifted) == expected.cost == found.cost
        assert problem.fits(lifted)
        assert reduction.lower(lifted) == found.assignment


def test_a_choice_worse_in_every_context_is_removed():
    cost = np.array([0.0, 0.5, 3.0])
    table = np.array([[1.0, 2.0], [0.0, 1.9], [0.0, 0.0]])
    reduction = reduce_problem(Problem([cost, np.array([0.0, 0.2])], {(0, 1): table}))
    assert 2 not in reduction.keep[0]


def test_a_frugal_choice_survives_a_cheaper_one():
    costs, memory = [np.array([1.0, 2.0])], [np.array([5.0, 4.0])]
    assert list(reduce_problem(Problem(costs, {}, memory, 9.0)).keep[0]) == [0, 1]
    assert list(reduce_problem(Problem(costs, {}, memory[::-1], 9.0)).keep[0]) == [0, 1]
    assert list(reduce_problem(Problem(costs, {}, memory)).keep[0]) == [0]
    dearer = [np.array([4.0, 5.0])]
    assert list(reduce_problem(Problem(costs, {}, dearer, 9.0)).keep[0]) == [0]


def test_of_equal_choices_the_lowest_stays():
    reduction = reduce_problem(Problem([np.zeros(4)], {}))
    assert list(reduction.keep[0]) == [0]


def test_an_edge_that_is_a_sum_of_two_node_costs_is_folded_in():
    rng = np.random.default_rng(0)
    rows, columns = rng.random(3), rng.random(4)
    problem = Problem([rng.random(3), rng.random(4)], {(0, 1): rows[:, None] + columns[None, :]})
    reduction = reduce_problem(problem, dominance=False)
    assert not reduction.problem.edge_costs
    for assignment in np.ndindex(3, 4):
        np.testing.assert_allclose(
            reduction.problem.cost(assignment), problem.cost(assignment), rtol=1e-14
        )


def test_a_choice_without_a_partner_goes_and_takes_its_own_partners_along():
    only = np.array([[0.0, math.inf], [math.inf, math.inf]])
    equal = np.array([[0.0, math.inf], [math.inf, 0.0]])
    problem = Problem([np.zeros(2)] * 3, {(0, 1): only, (1, 2): equal})
    assert [list(kept) for kept in reduce_problem(problem).keep] == [[0], [0], [0]]


def test_contradictory_pairs_leave_nothing():
    nothing = np.full((2, 2), math.inf)
    assert reduce_problem(Problem([np.zeros(2)] * 2, {(0, 1): nothing})) is None
