"""What a plan keeps of each module and parameter, so that a report can explain it by name.

In: a priced strategy. Out: the ops and predicted seconds of every module in every block, and the
placement in which each parameter is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from autopar.base.units import nine_digits
from autopar.ir.graph import Op, Value, ValueKind
from autopar.ir.placement import format_placements
from autopar.plans.parts import ModulePlan, ParameterUse
from autopar.pricing.block_times import fetch_s
from autopar.pricing.candidate import Candidate
from autopar.pricing.nodes import NodeKind
from autopar.pricing.readers import block_of_ops
from autopar.pricing.tables import OpTable, reads_back
from autopar.sharding.strategy import Strategy

Key = tuple[str, str]
"""A block and the path of a module in it."""

WHOLE = "-"


def parameter_uses(best: Candidate, strategy: Strategy) -> dict[str, ParameterUse]:
    """The placement in which blocks read each parameter, and its bytes, in graph order."""
    pricing = best.priced.pricing
    return {
        v.target or v.name: ParameterUse(
            needs=format_placements(strategy.interface(v)),
            size_bytes=v.stored_bytes,
            local_bytes=pricing.local_bytes(v, strategy.supply(v)),
        )
        for v in strategy.graph.parameters
    }


def module_plans(best: Candidate, strategy: Strategy) -> tuple[ModulePlan, ...]:
    """The ops and predicted times of each module of each block, in graph order."""
    return _Modules(best, strategy).plans()


class _Modules:
    """Times in seconds by block and module, over all micro-batches and passes of a step."""

    def __init__(self, best: Candidate, strategy: Strategy) -> None:
        self.best, self.strategy = best, strategy
        self.graph = self.strategy.graph
        self.analysis = best.priced.pricing.analysis
        self.block_of = block_of_ops(self.graph)
        self.times: defaultdict[Key, np.ndarray] = defaultdict(lambda: np.zeros(5))
        self.ops: dict[Key, list[Op]] = {}
        self.op_s: dict[int, float] = {}

    def plans(self) -> tuple[ModulePlan, ...]:
        for op in self.graph.ops:
            self.ops.setdefault(self._of_op(op.index), []).append(op)
        self._price()
        keys = [*self.ops, *(key for key in self.times if key not in self.ops)]
        passes = self.best.priced.pricing.num_passes
        found = []
        for block, name in keys:
            ops = self.ops.get((block, name), [])
            seconds = [nine_digits(each) for each in passes * self.times[block, name]]
            found.append(
                ModulePlan(
                    block=block,
                    name=name,
                    ops=tuple(op.name for op in ops),
                    splits=self._splits(ops),
                    forward_s=seconds[0],
                    input_grad_s=seconds[1],
                    weight_grad_s=seconds[2],
                    communication_s=seconds[3],
                    update_s=seconds[4],
                )
            )
        return tuple(found)

    def _price(self) -> None:
        """Charge every node and edge of the search problem to a module."""
        priced, picks = self.best.priced, self.best.solution.assignment
        homes: list[int | Key] = []
        for node, table, cost, pick in zip(priced.nodes, priced.tables, priced.costs, picks):
            if isinstance(table, OpTable):
                key, estimate = self._of_op(node.index), table.estimates[pick]
                self.op_s[node.index] = estimate.total_s
                self._add(key, 0, estimate.forward_s)
                self._add(key, 1, estimate.input_grad_s)
                self._add(key, 2, estimate.weight_grad_s)
                self._add(key, 3, float(cost[pick]) - estimate.total_s)
                homes.append(key)
            else:
                value = self.graph.values[node.index]
                is_parameter = value.kind is ValueKind.PARAMETER
                key, own_s = self._of_value(value), float(table.cost_s[pick])
                self._add(key, 4 if is_parameter else 3, own_s)
                self._add_communication(node.index if is_parameter else key, cost[pick] - own_s)
                homes.append(node.index if is_parameter else key)
        for (i, j), matrix in priced.edges.items():
            parameters = [homes[n] for n in (i, j) if isinstance(homes[n], int)]
            ops = [homes[n] for n in (i, j) if priced.nodes[n].kind is NodeKind.OP]
            home = (parameters or ops or [homes[j]])[-1]
            self._add_communication(home, matrix[picks[i], picks[j]])

    def _add(self, key: Key, column: int, seconds: float) -> None:
        self.times[key][column] += seconds

    def _add_communication(self, home: int | Key, seconds: float) -> None:
        """Charge a redistribution; a parameter's may occur in every micro-batch and both passes."""
        if not isinstance(home, int):
            self._add(home, 3, float(seconds))
            return
        best, value = self.best, self.graph.values[home]
        num, seconds = best.num_microbatches, float(seconds)
        if seconds and home in self.analysis.consumers:
            fetched_s = fetch_s(best.priced.pricing, self.strategy, home)
            moved_s = seconds - fetched_s
            if home in best.released:
                fetched_s *= num * (1 + reads_back(self.analysis, home))
            if home in best.scattered and self.strategy.is_reduce_scattered(value):
                moved_s *= num
            seconds = fetched_s + moved_s
        self._add(self._of_value(value), 3, seconds)

    def _of_op(self, index: int) -> Key:
        return self.block_of[index], self.graph.ops[index].module_path

    def _of_value(self, value: Value) -> Key:
        """The block that makes or first reads a value, and the module that owns it."""
        produced = self.analysis.producers.get(value.index)
        if produced is not None:
            return self._of_op(produced[0])
        uses = self.analysis.consumers.get(value.index, ())
        block = self.block_of[uses[0][0]] if uses else self.graph.blocks[-1].name
        if value.kind is ValueKind.PARAMETER:
            return block, (value.target or value.name).rpartition(".")[0]
        return self._of_op(uses[-1][0]) if uses else (block, "")

    def _splits(self, ops: Sequence[Op]) -> str:
        """For each mesh axis, how most of the ops' time is split along it."""
        words = []
        for axis in range(self.strategy.mesh.num_axes):
            time_s: Counter[str] = Counter()
            for op in ops:
                word = split_word(self.strategy, op, axis)
                time_s[word] += self.op_s.get(op.index, 0.0)  # type: ignore[assignment]
            words.append(max(time_s, key=lambda word: time_s[word]) if time_s else WHOLE)
        return " ".join(words)


def split_words(strategy: Strategy, op: Op) -> str:
    """`split_word` for each mesh axis."""
    return " ".join(split_word(strategy, op, axis) for axis in range(strategy.mesh.num_axes))


def split_word(strategy: Strategy, op: Op, axis: int) -> str:
    """``batch``, ``sequence``, the name of another dimension, or ``-`` if nothing is split."""
    split = strategy.assignment.choices[op.index].splits[axis]
    if split is None:
        return WHOLE
    if split == strategy.analysis.batch_splits[op.index]:
        return "batch"
    return "sequence" if split == strategy.analysis.sequence_splits[op.index] else str(split)
