"""The runner-up of each module: its best strategy in which its longest op is split otherwise.

In: a priced strategy and the costs of a search. Out: for every module the other choice and the
differences in time and memory. All outside of the module stays as it is, all inside is chosen again
by elimination, at the prices of the search and under its constraints; its limit of memory is not
applied, so a runner-up may be faster and need more memory. Modules whose problems are the same
arrays, such as those of repeated layers, are solved once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.base.units import nine_digits
from autopar.ir.graph import Op, Value, ValueKind
from autopar.ir.placement import format_placements
from autopar.plans.modules import split_words
from autopar.plans.parts import ModuleChoice, RunnerUp
from autopar.pricing.candidate import Candidate
from autopar.pricing.exposed_shares import exposure_of
from autopar.pricing.moves import Array
from autopar.pricing.nodes import NodeKind
from autopar.pricing.tables import OpTable
from autopar.search.elimination import best_program
from autopar.search.problem import Edge

MOST_NODES = 256
"""A module of more decisions, such as one that has all layers, has no runner-up."""
MOST_OPERATIONS = 1e7
MOST_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inside:
    """The problem of one module: its decisions, with the edges to all others at their choices."""

    nodes: tuple[int, ...]
    costs: tuple[Array, ...]
    edges: dict[Edge, Array]
    key: tuple[object, ...]


def runner_ups(best: Candidate, costs: Sequence[Array]) -> tuple[RunnerUp, ...]:
    """The runner-ups of a strategy's modules, equal ones together, in graph order.

    ``costs``: those of the nodes, +inf where a constraint forbids a choice. On a mesh of one device
    there are none, as nothing can be split.
    """
    if best.mesh.devices.num_devices == 1:
        return ()
    return _RunnerUps(best, costs).found()


class _RunnerUps:
    def __init__(self, best: Candidate, costs: Sequence[Array]) -> None:
        self.best, self.priced, self.costs = best, best.priced, costs
        self.picks = best.solution.assignment
        exposed = best.exposed
        if exposed.weighs_computation:  # a price for a bound, by which some computation is free
            exposed = exposure_of(best)
        problem = best.priced.problem(
            costs, exposed=exposed, released=bool(best.released),
            scattered=bool(best.scattered),
        )  # fmt: skip
        self.edges = problem.edge_costs
        self.neighbours: defaultdict[int, list[Edge]] = defaultdict(list)
        for edge in self.edges:
            for node in edge:
                self.neighbours[node].append(edge)
        self.memory = best.priced.memory(
            released=bool(best.released), scattered=bool(best.scattered)
        )

    def found(self) -> tuple[RunnerUp, ...]:
        groups: dict[tuple[object, ...], list[str]] = {}
        problems: dict[tuple[object, ...], _Inside] = {}
        for path, nodes in self._modules().items():
            inside = self._inside(nodes)
            groups.setdefault(inside.key, []).append(path)
            problems.setdefault(inside.key, inside)
        solved = (self._runner_up(problems[key], tuple(paths)) for key, paths in groups.items())
        return tuple(each for each in solved if each is not None)

    def _modules(self) -> dict[str, list[int]]:
        """The decisions inside of each module, in graph order; no module of too many."""
        inside: defaultdict[str, list[int]] = defaultdict(list)
        for node in range(len(self.priced.nodes)):
            path = self._home(node)
            while path:
                inside[path].append(node)
                path = path.rpartition(".")[0]
        return {path: nodes for path, nodes in inside.items() if len(nodes) <= MOST_NODES}

    def _home(self, node: int) -> str:
        """The module of an op, of the op that makes a value, or that owns a parameter."""
        decision, analysis = self.priced.nodes[node], self.priced.pricing.analysis
        if decision.kind is NodeKind.OP:
            return analysis.graph.ops[decision.index].module_path
        value = analysis.graph.values[decision.index]
        if value.kind is ValueKind.PARAMETER:
            return (value.target or value.name).rpartition(".")[0]
        producer = analysis.producers.get(value.index)
        return "" if producer is None else analysis.graph.ops[producer[0]].module_path

    def _inside(self, nodes: Sequence[int]) -> _Inside:
        place = {node: number for number, node in enumerate(nodes)}
        costs = [self.costs[node] for node in nodes]
        key: list[object] = [(id(self.costs[node]), self.picks[node]) for node in nodes]
        edges: dict[Edge, Array] = {}
        for node in nodes:
            for i, j in self.neighbours[node]:
                matrix, other = self.edges[i, j], j if node == i else i
                if other in place:
                    edges[place[i], place[j]] = matrix
                    key.append((place[i], place[j], id(matrix)))
                    continue
                pick = self.picks[other]
                costs[place[node]] = costs[place[node]] + (
                    matrix[:, pick] if node == i else matrix[pick]
                )
                key.append((place[node], node == i, id(matrix), pick))
        return _Inside(nodes=tuple(nodes), costs=tuple(costs), edges=edges, key=tuple(key))

    def _runner_up(self, inside: _Inside, paths: tuple[str, ...]) -> RunnerUp | None:
        """The best other choice; None where the longest op has none, or it takes no time."""
        times_s = [self._op_s(node, self.picks) for node in inside.nodes]
        pivot = max(range(len(times_s)), key=times_s.__getitem__)
        if not times_s[pivot]:
            return None
        costs = list(inside.costs)
        costs[pivot] = costs[pivot].copy()
        costs[pivot][self.picks[inside.nodes[pivot]]] = np.inf
        program = best_program(costs, inside.edges)
        if program.num_operations > MOST_OPERATIONS or program.size_bytes > MOST_BYTES:
            return None
        values = program.run(costs, inside.edges, MOST_BYTES)
        if not math.isfinite(values.optimum):
            return None
        other = list(self.picks)
        for node, pick in zip(inside.nodes, program.assignment(values)):
            other[node] = pick
        return self._described(inside, inside.nodes[pivot], values.optimum, other, paths)

    def _described(
        self, inside: _Inside, pivot: int, cost_s: float, other: Sequence[int],
        paths: tuple[str, ...],
    ) -> RunnerUp:  # fmt: skip
        passes = self.priced.pricing.num_passes
        own = [self.picks[node] for node in inside.nodes]
        terms = [cost.item(pick) for cost, pick in zip(inside.costs, own)]
        terms += [matrix.item(own[i], own[j]) for (i, j), matrix in inside.edges.items()]
        difference_s = passes * (cost_s - math.fsum(terms))
        compute_s = passes * sum(
            self._op_s(node, other) - self._op_s(node, self.picks)
            + self._update_s(node, other) - self._update_s(node, self.picks)
            for node in inside.nodes
        )  # fmt: skip
        memory = sum(
            float(self.memory[node][other[node]] - self.memory[node][self.picks[node]])
            for node in inside.nodes
        )
        op = self.priced.pricing.graph.ops[self.priced.nodes[pivot].index]
        return RunnerUp(
            modules=paths,
            op=op.target_name,
            chosen=self._choice(op, inside, self.picks),
            other=self._choice(op, inside, other),
            compute_s=nine_digits(compute_s),
            communication_s=nine_digits(difference_s - compute_s),
            memory_bytes=round(memory),
        )  # fmt: skip

    def _choice(self, op: Op, inside: _Inside, picks: Sequence[int]) -> ModuleChoice:
        strategy = self.priced.strategy(picks, self.best.released, self.best.scattered)
        splits, parameters = split_words(strategy, op), list(self._parameters(op, inside))
        if not parameters:
            return ModuleChoice(splits=splits)
        largest = max(parameters, key=lambda value: value.stored_bytes)
        return ModuleChoice(
            splits=splits,
            stored=format_placements(strategy.supply(largest)),
            needs=format_placements(strategy.interface(largest)),
        )

    def _parameters(self, op: Op, inside: _Inside) -> Iterator[Value]:
        """The parameters of an op's own module."""
        values = self.priced.pricing.graph.values
        for node in inside.nodes:
            if self.priced.nodes[node].kind is NodeKind.STORED:
                value = values[self.priced.nodes[node].index]
                if value.kind is ValueKind.PARAMETER and self._home(node) == op.module_path:
                    yield value

    def _op_s(self, node: int, picks: Sequence[int]) -> float:
        table = self.priced.tables[node]
        return table.estimates[picks[node]].total_s if isinstance(table, OpTable) else 0.0

    def _update_s(self, node: int, picks: Sequence[int]) -> float:
        if self.priced.nodes[node].kind is not NodeKind.STORED:
            return 0.0
        return float(self.priced.tables[node].cost_s[picks[node]])
