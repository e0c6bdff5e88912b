"""Pinned, forbidden and forced choices hold, and both sides of a contradiction are named."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import Forbid, Force, Pin, Problem, SearchError, solve
from tests.search.search_problems import problems

COSTS = [np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 2.0])]
EQUAL = np.where(np.eye(3, dtype=bool), 0.0, math.inf)


def constrained(*constraints, edges=None):
    return Problem(COSTS, edges or {}, node_names=["a", "b"], constraints=constraints)


def test_each_kind_holds():
    assert solve(constrained(Pin(node="a", choice=2))).assignment == (2, 0)
    assert solve(constrained(Forbid(node=1, choices=(0, 1)))).assignment == (0, 2)
    assert solve(constrained(Force(node="b", choices=(1, 2)))).assignment == (0, 1)
    assert solve(constrained(Pin(node="a", choice=2), edges={(0, 1): EQUAL})).assignment == (2, 2)


@pytest.mark.parametrize(
    "pair",
    [
        (Pin(node="a", choice=0), Pin(node="a", choice=1)),
        (Pin(node="a", choice=0), Forbid(node="a", choices=(0, 2))),
        (Force(node="a", choices=(0, 1)), Force(node=0, choices=(2,))),
    ],
)
def test_two_that_clash_on_a_node_are_both_named(pair):
    other = Forbid(node="b", choices=(2,))
    with pytest.raises(SearchError) as caught:
        solve(constrained(pair[0], other, pair[1]))
    assert str(pair[0]) in str(caught.value)
    assert str(pair[1]) in str(caught.value)
    assert str(other) not in str(caught.value)


def test_two_that_clash_across_an_edge_are_both_named():
    pair = Pin(node="a", choice=0), Pin(node="b", choice=1)
    with pytest.raises(SearchError) as caught:
        solve(constrained(*pair, edges={(0, 1): EQUAL}))
    assert all(str(each) in str(caught.value) for each in pair)


def test_three_that_clash_only_together_are_all_named():
    three = [Forbid(node="a", choices=(choice,)) for choice in range(3)]
    with pytest.raises(SearchError) as caught:
        solve(constrained(*three))
    assert all(str(each) in str(caught.value) for each in three)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Pin(node="c", choice=0), "names a node that the problem does not have"),
        (Pin(node=2, choice=0), "outside 0..1"),
        (Pin(node="a", choice=3), "choices 0..2"),
        (Forbid(node="a", choices=(0, 1, 2)), "infinite cost"),
        (Pin(node="a", choice=0.5), "whole numbers"),
        (Forbid(node="a", choices=1), "whole numbers"),
        ("a", "not a Pin, Forbid or Force"),
    ],
)
def test_a_constraint_on_nothing_is_refused(constraint, words):
    with pytest.raises(SearchError, match=words):
        solve(constrained(constraint))


@settings(max_examples=60, deadline=None)
@given(problem=problems(forbidden=False), seed=st.integers(0, 99))
def test_a_pin_equals_brute_force_over_the_rest(problem, seed):
    node = seed % problem.num_nodes
    choice = seed % problem.num_choices(node)
    pinned = Problem(
        problem.node_costs,
        problem.edge_costs,
        problem.node_memory,
        problem.memory_budget,
        memory_groups=problem.memory_groups,
        constraints=[Pin(node=node, choice=choice)],
    )
    found, expected = solve(pinned), solve(pinned, method="brute_force")
    assert (found.status, found.cost) == (expected.status, expected.cost)
    if found.assignment:
        assert found.assignment[node] == choice
