"""The ILP equals brute force, and its variables and constraints mean what they claim."""

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.search import Status, solve
from autopar.search.ilp import Formulation
from autopar.search.linear import LinearProgram
from autopar.search.linear_solver import solve_linear
from tests.search.search_problems import authors_problem, problems


@settings(max_examples=80, deadline=None)
@given(problem=problems(memory=False))
def test_the_ilp_equals_brute_force(problem):
    found, expected = solve(problem, method="ilp"), solve(problem, method="brute_force")
    assert (found.status, found.cost) == (expected.status, expected.cost)


@settings(max_examples=40, deadline=None)
@given(problem=problems(memory=False, forbidden=False))
def test_the_objective_at_a_hint_is_the_cost(problem):
    form = Formulation(problem)
    program = form.program()
    rng = np.random.default_rng(0)
    assignment = [int(rng.integers(problem.num_choices(n))) for n in range(problem.num_nodes)]
    values = form.hint(assignment)
    assert form.seconds(float(program.costs @ values)) == pytest.approx(problem.cost(assignment))
    rows = np.zeros(len(program.row_lower))
    np.add.at(rows, program.rows, program.coefficients * values[program.columns])
    assert (rows >= program.row_lower - 1e-9).all()
    assert (rows <= program.row_upper + 1e-9).all()
    assert form.assignment(values) == tuple(assignment)


def test_the_relaxation_proves_the_authors_instance():
    problem, optimum = authors_problem("alexnet_p8")
    solution = solve(problem, method="ilp")
    assert solution.status is Status.OPTIMAL
    assert solution.cost == pytest.approx(optimum, rel=1e-9)


def test_a_knapsack_and_its_relaxation():
    program = LinearProgram(
        costs=np.array([-5.0, -4.0, -3.0]),
        lower=np.zeros(3),
        upper=np.ones(3),
        integer=np.ones(3, dtype=bool),
        rows=np.zeros(3, dtype=int),
        columns=np.arange(3),
        coefficients=np.array([4.0, 3.0, 2.0]),
        row_lower=np.array([-np.inf]),
        row_upper=np.array([6.0]),
        num_wanted=3,
    )
    whole, relaxed = solve_linear(program), solve_linear(program, relaxed=True)
    assert whole.optimal
    assert whole.cost == pytest.approx(-8.0)
    np.testing.assert_allclose(whole.values, [1, 0, 1], atol=1e-9)
    assert relaxed.cost == pytest.approx(-8.25)
    assert relaxed.bound <= whole.cost
