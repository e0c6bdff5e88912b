"""Constraints (pin, forbid, force) as +inf costs, applied before any solver runs.

In: a problem with constraints. Out: the same problem without them, where every choice that they
rule out costs +inf. Contradictory constraints are an error that names the two.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.search.problem import (
    Array,
    Constraint,
    Forbid,
    Pin,
    Problem,
    SearchError,
)


def apply_constraints(problem: Problem) -> Problem:
    """The problem with ruled-out choices at +inf and no constraints left.

    Raises ``SearchError`` for a constraint on a node or choice that does not exist, and for two
    that contradict each other: on one node, or across an edge that allows no remaining pair.
    """
    if not problem.constraints:
        return problem
    by_node: dict[int, list[Constraint]] = {}
    for constraint in problem.constraints:
        if not isinstance(constraint, Constraint):
            raise SearchError(
                f"constraints holds {constraint!r}, which is not a Pin, Forbid or Force"
            )
        by_node.setdefault(_node(problem, constraint), []).append(constraint)
    allowed = {node: _allowed(problem, node, each) for node, each in by_node.items()}
    _check_edges(problem, by_node, allowed)
    costs = list(problem.node_costs)
    for node, mask in allowed.items():
        costs[node] = np.where(mask, costs[node], math.inf)
    return replace(problem, node_costs=costs, constraints=())


def _node(problem: Problem, constraint: Constraint) -> int:
    node = constraint.node
    if isinstance(node, str):
        names = problem.node_names or [str(index) for index in range(problem.num_nodes)]
        if node not in names:
            raise SearchError(f"{constraint} names a node that the problem does not have")
        return list(names).index(node)
    if not 0 <= node < problem.num_nodes:
        raise SearchError(f"{constraint} names a node outside 0..{problem.num_nodes - 1}")
    return node


def _mask(problem: Problem, node: int, constraint: Constraint) -> Array:
    """The choices of the node that the constraint allows."""
    num_choices = problem.num_choices(node)
    wanted = (constraint.choice,) if isinstance(constraint, Pin) else constraint.choices
    try:
        given = [operator.index(choice) for choice in wanted]
    except TypeError as error:
        raise SearchError(f"{constraint}: choices are whole numbers ({error})") from None
    for choice in given:
        if not 0 <= choice < num_choices:
            raise SearchError(
                f"{constraint}: node {problem.name(node)!r} has choices 0..{num_choices - 1}"
            )
    mask = np.zeros(num_choices, dtype=bool)
    mask[given] = True
    return ~mask if isinstance(constraint, Forbid) else mask


def _allowed(problem: Problem, node: int, constraints: Sequence[Constraint]) -> Array:
    """The choices that all constraints of a node allow, and that do not cost +inf."""
    possible = problem.node_costs[node] < math.inf
    masks = [_mask(problem, node, constraint) for constraint in constraints]
    for constraint, mask in zip(constraints, masks):
        if not (mask & possible).any():
            raise SearchError(
                f"{constraint} leaves node {problem.name(node)!r} only choices of infinite cost"
            )
    for second, mask in enumerate(masks):
        for first in range(second):
            if not (mask & masks[first] & possible).any():
                raise SearchError(
                    f"{constraints[first]} and {constraints[second]} contradict each other: "
                    f"no choice of node {problem.name(node)!r} satisfies both; remove one"
                )
    together = np.logical_and.reduce(masks)
    if not (together & possible).any():
        listed = ", ".join(str(constraint) for constraint in constraints)
        raise SearchError(f"together, {listed} leave node {problem.name(node)!r} no choice")
    return together


def _check_edges(
    problem: Problem, by_node: dict[int, list[Constraint]], allowed: dict[int, Array]
) -> None:
    """Raise SearchError for constrained neighbours whose remaining choices exclude each other."""
    for (i, j), table in problem.edge_costs.items():
        if i not in allowed or j not in allowed or not (table < math.inf).any():
            continue
        if not (table[np.ix_(allowed[i], allowed[j])] < math.inf).any():
            raise SearchError(
                f"{by_node[i][0]} and {by_node[j][0]} contradict each other: every pair of "
                f"choices they leave costs +inf on edge ({problem.name(i)!r}, "
                f"{problem.name(j)!r}); remove one"
            )
