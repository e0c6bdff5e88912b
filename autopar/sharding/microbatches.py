"""Micro-batching: the global batch runs in micro-batches, one after another, before one update.

Micro-batches are a mesh axis in time rather than over devices, `MICROBATCH`, in front of the
others: a value split along it has one micro-batch's share at a time, a partial sum along it is
accumulated. `Microbatches.cut` adds this axis to a strategy that was found without it:

- values with a batch dimension are split on it; others are *varying*: computed anew for each
  micro-batch, with a partial sum as gradient, so that every gradient becomes a sum over
  micro-batches;
- sums over the batch are partial and stay so through linear ops (`Space.linear`), so the loss is
  the sum of the micro-batches' shares of it;
- the divisor of a mean (the number of targets not ignored, or the sum of a mask) must be known
  before the first micro-batch is finished: `with_explicit_totals` makes it a value of its own,
  computed from the inputs alone in a block before the others.

The result is that of the whole batch, also for unevenly filled micro-batches. An op that needs the
whole batch at once (batch norm with global statistics, a contrastive loss) is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.base.errors import PlanError
from autopar.frontend.rewrites.custom_functions import adds_up
from autopar.ir.block_names import TOTALS
from autopar.ir.choice import Choice, Split
from autopar.ir.graph import Block, Graph, Op, Ref, Value, ValueKind
from autopar.ir.mesh import MICROBATCH, Mesh
from autopar.ir.placement import P, Placement, Placements, R, S, State, V, is_valid, paddings
from autopar.rules.choice import LINEAR_SPLIT, is_valid_choice, needs, padded_dims, supplies
from autopar.rules.registry import rule_of
from autopar.rules.totals import EarlyOp
from autopar.sharding.strategy import Analysis, Assignment, Strategy

_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


# --- totals as values ---------------------------------------------------------------------------
def with_explicit_totals(analysis: Analysis) -> Graph:
    """An equivalent graph that first computes the sums over the batch that depend on inputs alone.

    These are the weights that mean losses divide by, where ``cross_entropy(x, target)`` becomes
    ``cross_entropy(x, target, reduction=sum) / total``, and sums in the model itself, such as the
    mask that a masked mean divides by or the mean that is subtracted from its inputs. Their ops
    form the block `TOTALS`. Raises PlanError where a total depends on a parameter.
    """
    return _Rewrite(analysis).run()


def _sums_of_inputs(analysis: Analysis) -> list[Op]:
    """The ops that sum over the batch what is computed from inputs alone.

    Sums that need another total first are left out: all totals are computed at once.
    """
    graph = analysis.graph
    mesh = Mesh((MICROBATCH,), (2,))
    known = {v.index for v in graph.values if v.kind is not ValueKind.ACTIVATION}
    known -= {v.index for v in graph.parameters}
    behind: set[int] = set()
    found = []
    for op in graph.ops:
        made = {o for o in op.outputs if o is not None}
        is_random = torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())
        if is_random or any(i not in known for i in op.inputs):
            continue
        if any(graph.values[o].differentiable for o in made):
            continue
        known |= made
        split = analysis.batch_splits[op.index]
        if any(i in behind for i in op.inputs):
            behind |= made
        elif split is not None and graph.loss not in made:
            supplied = analysis.supplies(op, Choice((split,)), mesh)
            if any(o is not None and p[0] == P for o, p in zip(op.outputs, supplied)):
                found.append(op)
                behind |= made
    return found


class _Rewrite:
    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.graph = graph = analysis.graph
        self.values = list(graph.values)
        self.early: list[Op] = []
        self.replaced: dict[int, list[Op]] = {}

    def run(self) -> Graph:
        graph = self.graph
        for op in graph.ops:
            self._divide_last(op)
        sums = _sums_of_inputs(self.analysis)
        if not self.replaced and not sums:
            return graph
        moved = self._moved_ops(sums)
        fixed = [o for o in graph.ops if o.index not in moved and self._is_fixed(o)]
        first = [*fixed, *(o for o in graph.ops if o.index in moved), *self.early]
        return self._assembled(len(fixed), first, moved | {o.index for o in fixed})

    def _is_fixed(self, op: Op) -> bool:
        return all(o is None or self.values[o].fixed for o in op.outputs)

    def _value(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, **more: Any) -> int:
        index = len(self.values)
        self.values.append(
            Value(
                index=index, name=name, kind=ValueKind.ACTIVATION, shape=shape, dtype=dtype, **more
            )
        )
        return index

    def _divide_last(self, op: Op) -> None:
        """Replace a mean that divides by a total by the sum alone and a division."""
        rule, inputs = rule_of(op), [self.values[i] for i in op.inputs]
        if rule is None or rule.mean is None:
            return
        found = rule.mean(op, inputs, functools.partial(self._add_early, op))
        if found is None:
            return
        (output,) = op.outputs
        assert output is not None
        value = self.values[output]
        summed = self._value(
            f"{value.name}_sum", value.shape, value.dtype, differentiable=value.differentiable
        )
        self.replaced[op.index] = [
            replace(op, args=found.args, kwargs=found.kwargs, outputs=(summed,)),
            replace(
                op, name=f"{op.name}_mean", target=torch.ops.aten.div.Tensor,
                args=(Ref(summed), found.total), kwargs=(),
            ),
        ]  # fmt: skip

    def _add_early(self, near: Op, early: EarlyOp) -> Ref:
        """Add an op to the block of totals."""
        name = f"{near.name}_total{len(self.early)}"
        output = self._value(name, early.shape, early.dtype)
        self.early.append(
            replace(
                near, name=name, target=early.target, args=early.args, kwargs=early.kwargs,
                outputs=(output,),
            )
        )  # fmt: skip
        return Ref(output)

    def _moved_ops(self, sums: Sequence[Op]) -> set[int]:
        """``sums`` and all that the totals depend on, computed from inputs alone."""
        producers = {o: op for op in self.graph.ops for o in op.outputs if o is not None}
        stack = [i for op in (*self.early, *sums) for i in op.inputs]
        moved = {op.index for op in sums}
        while stack:
            value = self.graph.values[i] if (i := stack.pop()) < len(self.graph.values) else None
            if value is None:
                continue
            if value.kind is ValueKind.PARAMETER or value.differentiable:
                raise PlanError(
                    f"the weight of a mean loss depends on {value.name!r}, which changes in "
                    "training, so it is not known before the last micro-batch; use "
                    "num_microbatches=1, or a loss with reduction='sum' divided by a constant"
                )
            op = producers.get(value.index)
            if op is not None and op.index not in moved and not self._is_fixed(op):
                moved.add(op.index)
                stack.extend(op.inputs)
        return moved

    def _assembled(self, num_fixed: int, first: Sequence[Op], gone: set[int]) -> Graph:
        ops: list[Op] = list(first)
        runs: list[tuple[str, int]] = []
        if num_fixed:
            runs.append((self.graph.blocks[0].name, num_fixed))
        runs.append((TOTALS, len(first)))
        for block in self.graph.blocks:
            for op in self.graph.block_ops(block):
                if op.index not in gone:
                    ops += self.replaced.get(op.index, [op])
            if len(ops) > runs[-1][1]:
                runs.append((block.name, len(ops)))
        starts = [0, *(stop for _, stop in runs)]
        return replace(
            self.graph,
            values=tuple(self.values),
            ops=tuple(replace(op, index=i) for i, op in enumerate(ops)),
            blocks=tuple(
                Block(index=i, name=name, start=starts[i], stop=stop)
                for i, (name, stop) in enumerate(runs)
            ),
        )


# --- the axis in time ---------------------------------------------------------------------------
class Microbatches:
    """The placements of all ops and values along the axis in time, for one graph.

    ``graph`` is that of ``analysis``, made by `with_explicit_totals`. Raises PlanError naming the
    first op that needs the whole batch at once, and where the number of micro-batches does not
    divide the batch.
    """

    def __init__(self, analysis: Analysis, num_microbatches: int) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.num = num_microbatches
        self.mesh = Mesh((MICROBATCH,), (num_microbatches,))
        self.states: dict[int, Placement] = {}
        self.totals: list[int] = []
        self.splits: list[Split | None] = []
        self.batch = analysis.batch_size
        if self.batch % num_microbatches:
            raise PlanError(
                f"a batch of {self.batch} cannot be cut into {num_microbatches} micro-batches; "
                "num_microbatches must divide it"
            )
        self._start()
        for block in self.graph.blocks:
            for op in self.graph.block_ops(block):
                self._follow(op, is_total=block.name == TOTALS)
        self._check_buffers()
        if self.graph.loss is not None and self.states[self.graph.loss] != P:
            raise PlanError(
                "the loss is no sum over the batch, so micro-batches cannot be accumulated; use "
                "num_microbatches=1"
            )

    def mesh_of(self, devices: Mesh) -> Mesh:
        """The mesh with the axis in time in front of the axes of devices."""
        return Mesh((MICROBATCH, *devices.axis_names), (self.num, *devices.axis_sizes))

    def allows(self, op: int, choice: Choice, devices: Mesh) -> bool:
        """Whether a micro-batch can be split as ``choice`` splits the whole batch."""
        space, split, mesh = self.analysis.spaces[op], self.splits[op], self.mesh_of(devices)
        whole = Choice((split, *choice.splits))
        if space is None or split is None:
            return True
        return is_valid_choice(space, whole, mesh) and split.dim not in padded_dims(
            space, whole, mesh
        )

    def allows_stored(self, value: int, placements: Placements, devices: Mesh) -> bool:
        """Whether a micro-batch's input can be stored as ``placements`` store the whole batch's."""
        first, mesh = self.states[value], self.mesh_of(devices)
        if first.state is not State.SHARD:
            return True
        shape, whole = self.graph.values[value].shape, self._behind(value, placements)
        return is_valid(whole, shape, mesh) and not paddings(whole, shape, mesh)[first.dim]

    def cut(self, strategy: Strategy) -> Strategy:
        """``strategy`` with the axis in time; raises PlanError where it does not divide."""
        graph, assignment = self.graph, strategy.assignment
        mesh = self.mesh_of(assignment.mesh)
        for op, choice in zip(graph.ops, assignment.choices):
            if not self.allows(op.index, choice, assignment.mesh):
                raise PlanError(
                    f"a batch of {self.batch} in {self.num} micro-batches leaves "
                    f"{self.batch // self.num}, which op {op.name!r} cannot split as '{choice}' "
                    f"on {assignment.mesh}; use fewer micro-batches or a larger batch"
                )
        stored = {
            i: (R, *p) if self.states[i] == V else self._behind(i, p)  # whole for each of them
            for i, p in assignment.stored.items()
        }
        relays = {
            i: self._behind(i, p)
            for i, p in assignment.relays.items()
            if self.states[i].state is not State.PARTIAL
        }
        result = Strategy(
            self.analysis,
            Assignment(
                mesh=mesh,
                choices=tuple(
                    Choice((split, *choice.splits))
                    for split, choice in zip(self.splits, assignment.choices)
                ),
                stored=stored,
                relays={**relays, **self._total_relays(assignment)},
                released=assignment.released,
                scattered=assignment.scattered,
            ),
        )
        result.verify()
        return result

    def _total_relays(self, assignment: Assignment) -> dict[int, Placements]:
        """The relays of totals: summed over micro-batches, otherwise placed as produced."""
        relays = {}
        for total in self.totals:
            producer, position = self.analysis.producers[total]
            op, choice = self.graph.ops[producer], assignment.choices[producer]
            made = self.analysis.supplies(op, choice, assignment.mesh)[position]
            relays[total] = (R, *(p if p.state is State.SHARD else R for p in made))
        return relays

    def _start(self) -> None:
        """Set the states of stored values: inputs with a batch are split, others whole."""
        graph = self.graph
        for value in graph.values:
            has_batch = value.kind is ValueKind.INPUT and value.shape[:1] == (self.batch,)
            self.states[value.index] = S(0) if has_batch else V

    def _follow(self, op: Op, *, is_total: bool) -> None:
        """Choose the split of an op, and record the states of its outputs."""
        space = self.analysis.spaces[op.index]
        given = [self.states[i] for i in op.inputs]
        if is_total and any(i in self.totals for i in op.inputs):
            raise self._needs_all(op)  # its operand would still be incomplete
        split = self.analysis.batch_splits[op.index]
        if all(p == V for p in given):
            if any(self.analysis.differentiable(op)) and not adds_up(op.target_name):
                raise self._needs_all(op)  # its gradient is that of the sum over micro-batches
            split = None
        elif any(p == P for p in given):
            split = LINEAR_SPLIT
            if space is None or any(p == P and i not in space.linear for i, p in enumerate(given)):
                raise self._needs_all(op)
        elif split is None or space is None:
            raise self._needs_all(op)
        choice = Choice((split,))
        flows = self.analysis.differentiable(op)
        needed = needs(space, choice, self.mesh, flows)
        if any(have not in (V, need[0]) for have, need in zip(given, needed)):
            raise self._needs_all(op)
        for index, need in zip(op.inputs, needed):
            value = self.graph.values[index]
            if value.kind is ValueKind.PARAMETER and need[0].state is State.SHARD:
                raise PlanError(
                    f"parameter {value.target or value.name!r} has a row for each row of the batch "
                    f"(op {op.name!r}), so it belongs to no one micro-batch; use num_microbatches=1"
                )
        rule = rule_of(op)
        if space is not None and rule is not None and rule.collectives is not None:
            inputs = [self.graph.values[i] for i in op.inputs]
            if any(c.axes for c in rule.collectives(op, space, choice, self.mesh, inputs)):
                raise self._needs_all(op)
        for output, made in zip(op.outputs, supplies(space, choice, self.mesh, len(op.outputs))):
            if output is not None:
                self.states[output] = V if made[0] == R else made[0]
                if is_total and made[0] == P:  # summed before it is used
                    self.totals.append(output)
                    self.states[output] = V
        self.splits.append(split)

    def _check_buffers(self) -> None:
        """Raise PlanError for updated buffers other than batch norm's statistics."""
        for buffer, _ in self.graph.mutations:
            name = self.graph.values[buffer].target or self.graph.values[buffer].name
            if name.rpartition(".")[2] not in _STATISTICS:
                raise PlanError(
                    f"buffer {name!r} is updated once for each batch, which micro-batches would do "
                    "once for each part; use num_microbatches=1"
                )

    def _needs_all(self, op: Op) -> PlanError:
        where = f" at {op.location}" if op.location else ""
        return PlanError(
            f"op {op.name!r} ({op.target_name}){where} needs the whole batch at once, so it cannot "
            "run on one micro-batch after another; use num_microbatches=1"
            + (" or batch_norm='local'" if "batch_norm" in op.target_name else "")
        )

    def _behind(self, index: int, placements: Placements) -> Placements:
        """Placements on the device axes, within what the micro-batch axis splits off."""
        first = self.states[index]
        result = [first]
        for placement in placements:
            same = placement.state is first.state is State.SHARD and placement.dim == first.dim
            if same and first.outer <= placement.outer < first.outer * self.batch:
                placement = S(placement.dim, placement.outer * self.num)
            result.append(placement)
        return tuple(result)
