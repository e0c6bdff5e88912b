"""The search problem and its solution, as plain numbers.

In: the costs of each node's choices, tables of costs for some pairs of nodes, and optionally the
memory of every choice with a budget. Out: the same, validated and frozen, in a canonical order that
does not depend on the order of the mapping. Every solver takes a ``Problem`` and returns a
``Solution``; neither knows what a node or a choice stands for. The cost of an assignment x is F(x)
= sum_i c_i[x_i] + sum_(i,j) E_ij[x_i, x_j], PaSE's F(G, phi).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.search.lookup import Lookup, PairLookup

Array = npt.NDArray[Any]
Edge = tuple[int, int]
NodeRef = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The node takes exactly this choice."""

    node: NodeRef
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbid:
    """The node takes none of these choices."""

    node: NodeRef
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Force:
    """The node takes one of these choices."""

    node: NodeRef
    choices: tuple[int, ...]


Constraint = Pin | Forbid | Force


class SearchError(ValueError):
    """A search problem is malformed, contradictory, or cannot be solved as asked."""


class Status(StrEnum):
    """The status of a ``Solution``."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    UNKNOWN = "UNKNOWN"


class Method(StrEnum):
    """The solvers of this package; ``AUTO`` combines them."""

    AUTO = "auto"
    ELIMINATION = "elimination"
    ILP = "ilp"
    BRUTE_FORCE = "brute_force"
    MCMC = "mcmc"


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One choice for every node, at the least total cost, within the memory budget.

    node_costs: for node i an array [K_i] of seconds; +inf forbids a choice.
    edge_costs: (i, j) -> array [K_i, K_j] of seconds; +inf forbids a pair. A key with i > j is
        read as its transpose. The same array object may be used at many nodes and edges: it is
        validated, stored and eliminated once, never copied.
    node_memory: for node i an array [K_i] of bytes on each device of the node's group.
    memory_budget: bytes that the nodes of one group may use together; one number for all
        groups, or a sequence with one number for each group.
    node_names: used in messages and by constraints; by default the index.
    memory_groups: the group (pipeline stage) of every node, 0-based; by default all are in 0.
    constraints: what the user pins, forbids or forces; see ``autopar.search.constraints``.

    Raises ``SearchError`` naming the node or the edge that breaks a rule.
    """

    node_costs: Sequence[Array]
    edge_costs: Mapping[Edge, Array]
    node_memory: Sequence[Array] | None = None
    memory_budget: float | Sequence[float] | None = None
    _: KW_ONLY
    node_names: Sequence[str] | None = None
    memory_groups: Sequence[int] | None = None
    constraints: Sequence[Constraint] = ()
    _lookups: list[tuple[Lookup, PairLookup]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.node_names is not None:
            names = tuple(str(name) for name in self.node_names)
            _check_names(names, len(self.node_costs))
            put(self, "node_names", names)
        put(self, "node_costs", _node_tables(self, self.node_costs, "cost", allow_inf=True))
        put(self, "edge_costs", MappingProxyType(_edge_tables(self)))
        if self.node_memory is not None:
            memory = _node_tables(self, self.node_memory, "memory", allow_inf=False)
            put(self, "node_memory", memory)
        put(self, "memory_groups", _groups(self))
        put(self, "memory_budget", _budget(self))
        if not isinstance(self.constraints, Iterable):
            raise SearchError(f"constraints is {self.constraints!r}; give a list of them")
        put(self, "constraints", tuple(self.constraints))

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.node_costs)

    @property
    def num_groups(self) -> int:
        """The number of memory groups (pipeline stages); 1 without ``memory_groups``."""
        return 1 + max(self.memory_groups, default=0) if self.memory_groups is not None else 1

    @property
    def budgets(self) -> tuple[float, ...] | None:
        """Bytes allowed for each group, or None if memory is not limited."""
        if self.memory_budget is None:
            return None
        if isinstance(self.memory_budget, Sequence):
            return tuple(self.memory_budget)
        return (float(self.memory_budget),) * self.num_groups

    def num_choices(self, node: int) -> int:
        """K_i, the number of choices of a node."""
        return len(self.node_costs[node])

    def group(self, node: int) -> int:
        """The memory group of a node."""
        return 0 if self.memory_groups is None else self.memory_groups[node]

    def name(self, node: int) -> str:
        """The node's name in messages."""
        return str(node) if self.node_names is None else self.node_names[node]

    def cost(self, assignment: Sequence[int]) -> float:
        """F(x) in seconds, rounded once, so that the order of nodes and edges does not matter."""
        self.check_assignment(assignment)
        if not self._lookups:
            self._lookups.append((Lookup(self.node_costs), PairLookup(dict(self.edge_costs))))
        nodes, edges = self._lookups[0]
        picks = np.asarray(assignment, dtype=np.intp)
        return math.fsum([*nodes.at(picks).tolist(), *edges.at(picks).tolist()])

    def memory(self, assignment: Sequence[int]) -> tuple[float, ...]:
        """Bytes that each group uses; empty if the problem has no memory."""
        if self.node_memory is None:
            return ()
        used: list[list[float]] = [[] for _ in range(self.num_groups)]
        for node, choice in enumerate(assignment):
            used[self.group(node)].append(self.node_memory[node].item(choice))
        return tuple(math.fsum(terms) for terms in used)

    def fits(self, assignment: Sequence[int]) -> bool:
        """Whether every group is within its budget."""
        budgets = self.budgets
        return budgets is None or all(
            used <= budget for used, budget in zip(self.memory(assignment), budgets)
        )

    def with_node_costs(self, node_costs: Sequence[Array]) -> Problem:
        """The same problem with other node costs; nothing else is validated again."""
        other = object.__new__(Problem)
        for each in fields(Problem):
            object.__setattr__(other, each.name, getattr(self, each.name))
        costs = _node_tables(self, node_costs, "cost", allow_inf=True)
        for node, cost in enumerate(costs):
            if len(cost) != self.num_choices(node):
                raise SearchError(
                    f"the cost of node {self.name(node)!r} has {len(cost)} choices, "
                    f"must have {self.num_choices(node)}"
                )
        object.__setattr__(other, "node_costs", costs)
        object.__setattr__(other, "_lookups", [])
        return other

    def check_assignment(self, assignment: Sequence[int]) -> None:
        """Raise ``SearchError`` unless there is a valid choice for every node."""
        if len(assignment) != self.num_nodes:
            raise SearchError(
                f"the assignment has {len(assignment)} choices for {self.num_nodes} nodes"
            )
        for node, choice in enumerate(assignment):
            if not 0 <= choice < len(self.node_costs[node]):
                raise SearchError(
                    f"choice {choice} of node {self.name(node)!r} is not in "
                    f"0..{len(self.node_costs[node]) - 1}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's result, with a valid bound.

    assignment: the choice of every node; empty if none is known. cost: F(assignment) in seconds;
    +inf if none is known. bound: no assignment within the budget costs less than this many seconds.
    gap: (cost - bound) / |cost|; 0 when OPTIMAL or INFEASIBLE, +inf if nothing is known. time_s:
    seconds of processor time. method: the solver that found it, or for ``auto`` the sequence of
    solvers. memory: bytes that each group uses. least_feasible_budget: if INFEASIBLE by memory, the
    smallest number of bytes per group with a feasible assignment; None otherwise or if not known.
    message: the reason for the status, in one line.
    """

    assignment: tuple[int, ...]
    cost: float
    status: Status
    bound: float
    gap: float
    time_s: float
    method: str
    memory: tuple[float, ...] = ()
    least_feasible_budget: float | None = None
    message: str = ""


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / |cost|, 0 for equal values, +inf where either is unknown."""
    if cost == bound:
        return 0.0
    if not (math.isfinite(cost) and math.isfinite(bound)):
        return math.inf
    return max(0.0, cost - bound) / max(abs(cost), 1e-300)


def _check_names(names: tuple[str, ...], num_nodes: int) -> None:
    if len(names) != num_nodes:
        raise SearchError(f"node_names has {len(names)} names for {num_nodes} nodes")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SearchError(f"node_names has {name!r} twice; names must be distinct")
        seen.add(name)


def _as_table(value: Any, shape: tuple[int, ...], what: str) -> Array:
    """A read-only float64 view of ``value`` (a copy only if the type differs)."""
    try:
        table = np.asarray(value, dtype=np.float64).view()
    except (TypeError, ValueError, OverflowError) as error:
        raise SearchError(f"{what} is not an array of numbers: {error}") from None
    if table.shape != shape:
        raise SearchError(f"{what} has shape {list(table.shape)}, must be {list(shape)}")
    least = table.min()
    if np.isnan(least):
        raise SearchError(f"{what} holds NaN; use +inf to forbid a choice")
    if least == -math.inf:
        raise SearchError(f"{what} holds -inf; only +inf (forbidden) is allowed")
    table.flags.writeable = False
    return table


def _size(value: Any, what: str) -> int:
    try:
        return int(np.size(value))
    except ValueError as error:
        raise SearchError(f"{what} is not an array of numbers: {error}") from None


def _node_tables(
    problem: Problem, values: Sequence[Any], what: str, *, allow_inf: bool
) -> tuple[Array, ...]:
    num_nodes = len(problem.node_costs)
    if len(values) != num_nodes:
        raise SearchError(f"node_{what} has {len(values)} arrays for {num_nodes} nodes")
    known: dict[int, Array] = {}
    tables = []
    for node, value in enumerate(values):
        table = known.get(id(value))
        if table is None or not allow_inf:
            where = f"the {what} of node {problem.name(node)!r}"
            num_choices = _size(value, where) if allow_inf else problem.num_choices(node)
            if num_choices == 0:
                raise SearchError(f"{where} is empty; a node needs at least one choice")
            fresh = _as_table(value, (num_choices,), where)
            if not allow_inf and not (fresh.min() >= 0 and fresh.max() < math.inf):
                raise SearchError(f"{where} must be finite and not negative, in bytes")
            table = table if table is not None else fresh
            known[id(value)] = table
        tables.append(table)
    return tuple(tables)


def _edge_tables(problem: Problem) -> dict[Edge, Array]:
    """Edges with i < j in ascending order; one view for each distinct array and direction."""
    known: dict[tuple[int, bool], Array] = {}
    tables: dict[Edge, Array] = {}
    for i, j, value in sorted(_edge_items(problem), key=lambda item: item[:2]):
        low, high = (i, j) if i < j else (j, i)
        what = f"the cost of edge ({problem.name(i)!r}, {problem.name(j)!r})"
        if (low, high) in tables:
            raise SearchError(f"{what} is given in both directions; add the two tables")
        key = (id(value), i > j)
        shape = (problem.num_choices(i), problem.num_choices(j))
        table = known.get(key)
        if table is None or (table.T.shape if i > j else table.shape) != shape:
            table = _as_table(value, shape, what)
            table = known[key] = table.T if i > j else table
        tables[low, high] = table
    return dict(sorted(tables.items()))


def _edge_items(problem: Problem) -> Iterable[tuple[int, int, Any]]:
    if not isinstance(problem.edge_costs, Mapping):
        raise SearchError(
            f"edge_costs is {type(problem.edge_costs).__name__}, must be a mapping such as "
            "{(0, 1): table}"
        )
    for key, value in problem.edge_costs.items():
        try:
            i, j = (operator.index(node) for node in key)
        except (TypeError, ValueError):
            raise SearchError(f"edge key {key!r} is not a pair of node indices") from None
        if not (0 <= i < problem.num_nodes and 0 <= j < problem.num_nodes):
            raise SearchError(f"edge {(i, j)} names a node outside 0..{problem.num_nodes - 1}")
        if i == j:
            raise SearchError(
                f"edge {(i, j)} joins node {problem.name(i)!r} to itself; "
                "add its diagonal to the node's cost"
            )
        yield i, j, value


def _groups(problem: Problem) -> tuple[int, ...] | None:
    if problem.memory_groups is None:
        return None
    try:
        groups = tuple(operator.index(group) for group in problem.memory_groups)
    except TypeError as error:
        raise SearchError(f"memory_groups must hold one whole number per node: {error}") from None
    if len(groups) != problem.num_nodes:
        raise SearchError(f"memory_groups has {len(groups)} entries, {problem.num_nodes} nodes")
    for node, group in enumerate(groups):
        if group < 0:
            raise SearchError(f"memory group of node {problem.name(node)!r} is {group}, below 0")
    return groups


def _budget(problem: Problem) -> float | tuple[float, ...] | None:
    given = problem.memory_budget
    if given is None:
        return None
    if problem.node_memory is None:
        raise SearchError("memory_budget is given without node_memory; give both or neither")
    try:
        table = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SearchError(f"memory_budget {given!r} is not a number of bytes: {error}") from None
    if table.ndim > 1:
        raise SearchError(f"memory_budget has {table.ndim} dims; give one number for each group")
    if table.ndim == 1 and len(table) < problem.num_groups:
        raise SearchError(f"memory_budget has {len(table)} numbers for {problem.num_groups} groups")
    budgets = tuple(table.ravel().tolist())
    for group, budget in enumerate(budgets):
        if math.isnan(budget) or budget < 0:
            raise SearchError(f"memory_budget of group {group} is {budget}, must be at least 0")
    return budgets if table.ndim else budgets[0]
