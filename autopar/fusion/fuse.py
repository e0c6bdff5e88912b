"""The fusion pass: the captured graphs of several models become one graph with a model dimension.

Input: a capture of each model. Output: `Fused`, whose capture every later stage treats as any
other. Ops of different models are aligned into rows (`autopar.fusion.align`). A row is computed
once where all its operands are shared; otherwise by a fused form where the op family has one
(`autopar.fusion.forms`), else under ``torch.vmap`` where the operator has a batching rule, else
model by model. The loss is the sum of the models' losses, so each gradient is that of its own
model; the losses themselves are written to the buffer `LOSSES` in each step.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import InputError
from autopar.base.exclusive import in_turn
from autopar.frontend.capture import Captured
from autopar.frontend.signature import Signature, signature_of_tensors
from autopar.fusion.align import Row, aligned
from autopar.fusion.builder import GraphBuilder
from autopar.fusion.forms.base import Call, Draw, Form, Results, aten
from autopar.fusion.forms.registry import forms_of
from autopar.fusion.lanes import Lane, Operand, as_operand
from autopar.ir.graph import Graph, Op, Ref, Value, ValueKind
from autopar.ir.random_ops import draws
from autopar.ir.tracing import VIEWS

LOSSES = "losses_of_models"
LOOP = "model by model"
ONCE = "once for all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One tensor of a model's state, as a row of a tensor of the array.

    ``target``: the tensor's name in the model's graph. ``name``: the array's tensor. ``row``: its
    row there; None where the array's tensor belongs to this model alone, or is the same for all.
    """

    target: str
    name: str
    row: int | None
    is_parameter: bool
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """How one row of aligned ops is computed, and for which models."""

    target: str
    models: tuple[int, ...]
    form: str
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """The graph of all models, and where each model's state lies in it.

    ``slices``: one tuple per model. ``shares_batch``: whether all models read the same inputs;
    otherwise inputs are stacked along a leading model dimension.
    """

    captured: Captured
    slices: tuple[tuple[Slice, ...], ...]
    ops: tuple[FusedOp, ...]
    shares_batch: bool

    @property
    def num_models(self) -> int:
        return len(self.slices)

    @property
    def loss_dtype(self) -> torch.dtype:
        graph = self.captured.graph
        assert graph.loss is not None
        return graph.values[graph.loss].dtype

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Models connected by fused ops, directly or through others, largest group first."""
        group = list(range(self.num_models))
        for op in self.ops:
            if op.form not in (LOOP, ONCE):
                low = min(group[m] for m in op.models)
                joined = {group[m] for m in op.models}
                group = [low if g in joined else g for g in group]
        members: dict[int, list[int]] = {}
        for model, first in enumerate(group):
            members.setdefault(first, []).append(model)
        return tuple(sorted((tuple(m) for m in members.values()), key=lambda m: (-len(m), m)))

    def describe(self) -> str:
        """A text that lists how many ops are fused, in which forms, and which ops are not."""
        kinds = Counter(op.form for op in self.ops)
        lines = [f"{self.num_models} models, {len(self.ops)} aligned ops"]
        for models in self.groups():
            lines.append(f"  fused together: {', '.join(map(str, models))}")
        lines += [f"  {count:>4} {kind}" for kind, count in kinds.most_common()]
        looped = Counter((op.target, op.location) for op in self.ops if op.form == LOOP)
        lines += [f"  not fused: {t} at {w or 'an unknown line'} ({n})"
                  for (t, w), n in looped.items()]  # fmt: skip
        return "\n".join(lines)


@in_turn()
def fuse(
    captures: Sequence[Captured], states: Sequence[Mapping[str, Tensor]], *, shares_batch: bool
) -> Fused:
    """Fuse the graphs of several models into one.

    ``states``: the tensors of each model and its loss function, by their names in the graph, which
    tell buffers that are the same for all. ``shares_batch``: whether all models read the same
    inputs. Raises InputError where the models cannot share one graph.
    """
    return _Fusion(captures, states, shares_batch).run()


class _Fusion:
    """One run of the fusion pass."""

    def __init__(
        self,
        captures: Sequence[Captured],
        states: Sequence[Mapping[str, Tensor]],
        shares_batch: bool,
    ) -> None:
        self.graphs: list[Graph] = [c.graph for c in captures]
        self.signatures: list[Signature] = [c.signature for c in captures]
        self.shares_batch = shares_batch
        self.builder = GraphBuilder()
        self.lanes: list[dict[int, Lane]] = [{} for _ in captures]
        self.slices: list[list[Slice]] = [[] for _ in captures]
        self.done: list[FusedOp] = []
        self.mutated = [{old for old, _ in g.mutations} for g in self.graphs]
        self.draws = [_draws(g) for g in self.graphs]
        self.states = states
        self.num = len(captures)

    def run(self) -> Fused:
        for index, graph in enumerate(self.graphs):
            if graph.loss is None:
                raise InputError(
                    f"model {index} returns no scalar loss, so it cannot be trained in an array; "
                    "pass autopar.compile(..., loss_fn=torch.nn.functional.cross_entropy)"
                )
        self._inputs()
        for row in aligned(self.graphs):
            self._row(row)
        self._unread()
        captured = self._captured()
        return Fused(
            captured=captured,
            slices=tuple(map(tuple, self.slices)),
            ops=tuple(self.done),
            shares_batch=self.shares_batch,
        )

    # --- inputs and state ----------------------------------------------------------------------

    def _inputs(self) -> None:
        counts = {len(g.inputs) for g in self.graphs}
        if len(counts) > 1:
            raise InputError(
                "the models of an array take different numbers of tensors: "
                f"{[len(g.inputs) for g in self.graphs]}; compile them separately"
            )
        for place in range(counts.pop()):
            values = [g.values[g.inputs[place]] for g in self.graphs]
            first, name = values[0], self.signatures[0].input_names[place]
            for model, value in enumerate(values):
                if (value.shape, value.dtype) != (first.shape, first.dtype):
                    raise InputError(
                        f"input {name!r} has shape {value.shape} and dtype {value.dtype} for model "
                        f"{model}, {first.shape} and {first.dtype} for model 0; the batches of an "
                        "array are alike in shape: compile these models separately"
                    )
            shape = first.shape if self.shares_batch else (self.num, *first.shape)
            ref = self.builder.add(ValueKind.INPUT, name, shape, first.dtype)
            dim = None if self.shares_batch else 0
            for model, value in enumerate(values):
                self.lanes[model][value.index] = Lane(ref, dim, 0 if dim is None else model)

    def _place(self, models: Sequence[int], values: Sequence[Value]) -> None:
        """Put stored values of several models into the array, as one tensor if alike."""
        if all(v.index in self.lanes[m] for m, v in zip(models, values)):
            return
        missing = [(m, v) for m, v in zip(models, values) if v.index not in self.lanes[m]]
        kinds = {(v.kind, v.target, v.shape, v.dtype, v.differentiable) for _, v in missing}
        if len(missing) < len(models) or len(kinds) > 1:
            for model, value in missing:
                self._store([model], [value])
            return
        self._store(models, values)

    def _store(self, models: Sequence[int], values: Sequence[Value]) -> None:
        first, num = values[0], len(models)
        is_shared = num > 1 and self._same_for_all(models, values)
        stacked = num > 1 and not is_shared
        name = first.target or first.name
        if num < self.num:
            name += f"[{','.join(map(str, models))}]"
        data = None
        if first.kind is ValueKind.CONSTANT:
            constants = [dict(self.graphs[m].constants)[v.name] for m, v in zip(models, values)]
            data = torch.stack(constants) if stacked else constants[0]
        ref = self.builder.add(
            first.kind, name, (num, *first.shape) if stacked else first.shape, first.dtype,
            differentiable=first.differentiable,
            fixed=first.kind is not ValueKind.PARAMETER
            and not any(v.index in self.mutated[m] for m, v in zip(models, values)),
            data=data,
        )  # fmt: skip
        for row, (model, value) in enumerate(zip(models, values)):
            self.lanes[model][value.index] = Lane(
                ref, 0 if stacked else None, row if stacked else 0
            )
            if value.target is not None:
                self.slices[model].append(
                    Slice(
                        target=value.target,
                        name=name,
                        row=row if stacked else None,
                        is_parameter=value.kind is ValueKind.PARAMETER,
                        is_trained=value.differentiable,
                    )
                )

    def _same_for_all(self, models: Sequence[int], values: Sequence[Value]) -> bool:
        """Whether the values are constants, or buffers that never change, with the same numbers."""
        if values[0].kind is ValueKind.PARAMETER:
            return False
        if any(v.index in self.mutated[m] for m, v in zip(models, values)):
            return False
        if values[0].kind is ValueKind.CONSTANT:
            found = [dict(self.graphs[m].constants)[v.name] for m, v in zip(models, values)]
        else:
            found = [self.states[m][str(v.target)] for m, v in zip(models, values)]
        if any(x.is_meta for x in found):
            return False
        return all(torch.equal(x.cpu(), found[0].cpu()) for x in found)

    def _unread(self) -> None:
        """Keep state that no op reads."""
        for model, graph in enumerate(self.graphs):
            for value in (*graph.parameters, *graph.buffers):
                if value.index not in self.lanes[model]:
                    self._store([model], [value])

    # --- ops -----------------------------------------------------------------------------------

    def _row(self, row: Row) -> None:
        ops = [self.graphs[m].ops[k] for m, k in zip(row.models, row.ops)]
        flows = any(
            o is not None and self.graphs[m].values[o].differentiable
            for m, op in zip(row.models, ops)
            for o in op.outputs
        )
        with self.builder.origin_of(ops[0], differentiable=flows):
            for values in zip(*(op.inputs for op in ops)):
                stored = [self.graphs[m].values[v] for m, v in zip(row.models, values)]
                if stored[0].kind is not ValueKind.ACTIVATION:
                    self._place(row.models, stored)
            name, results = self._computed(row, ops)
        for place in range(len(ops[0].outputs)):
            self._define(row, ops, place, results[place])
        self.done.append(
            FusedOp(
                target=ops[0].target_name,
                models=row.models,
                form=name,
                location=ops[0].location,
            )
        )

    def _define(self, row: Row, ops: Sequence[Op], place: int, result: Any) -> None:
        for j, (model, op) in enumerate(zip(row.models, ops)):
            value = op.outputs[place] if place < len(op.outputs) else None
            if value is None:
                continue
            lane = result[j] if isinstance(result, list) else result
            assert lane is not None, (op.target_name, place)
            if isinstance(lane, Operand):
                lane = Lane(lane.ref, lane.dim, 0 if lane.dim is None else j)
            own = self.graphs[model].values[value]
            if lane.dim is None or j == 0:
                self.builder.set_differentiable(lane.ref, own.differentiable)
            self.lanes[model][value] = lane

    def _computed(self, row: Row, ops: Sequence[Op]) -> tuple[str, Any]:
        """The name of the form, and for each result an `Operand` or a list of lanes."""
        first = ops[0]
        lanes = [
            [self.lanes[m][v] for m, v in zip(row.models, values)]
            for values in zip(*(op.inputs for op in ops))
        ]
        is_drawn = first.index in self.draws[row.models[0]]
        if len(ops) > 1 and not is_drawn:
            shared = [as_operand(each, None) for each in lanes]
            if all(o is not None and o.dim is None for o in shared):
                return ONCE, self._plain(first, [o.ref for o in shared if o is not None])
        if len(ops) > 1 or is_drawn:
            found = self._fused(row, ops, [self._joined(each) for each in lanes])
            if found is not None:
                return found
        if is_drawn:
            raise InputError(
                f"{first.target_name} at {first.location or 'an unknown line'} draws random "
                "numbers; in an array only dropout and attention draw each model's own. Compile "
                "such models one by one"
            )
        each_model = [
            self._plain(op, [self._picked(each[j]) for each in lanes]) for j, op in enumerate(ops)
        ]
        results = [
            [None if r[place] is None else Lane(r[place].ref) for r in each_model]  # type: ignore[union-attr]
            for place in range(len(first.outputs))
        ]
        return (LOOP if len(ops) > 1 else "alone"), results

    def _fused(
        self, row: Row, ops: Sequence[Op], operands: Sequence[Operand]
    ) -> tuple[str, Results] | None:
        first, graph = ops[0], self.graphs[row.models[0]]
        call = Call(
            builder=self.builder,
            op=first,
            operands=tuple(operands),
            models=row.models,
            ranks=tuple(len(graph.values[v].shape) for v in first.inputs),
            out_ranks=tuple(0 if o is None else len(graph.values[o].shape) for o in first.outputs),
            draws=tuple(
                self.draws[m][op.index] for m, op in zip(row.models, ops)
                if op.index in self.draws[m]
            ),
        )  # fmt: skip
        alone = [None if o is None else graph.values[o] for o in first.outputs]

        def applied(function: Form) -> Results | None:
            results = function(call)
            return results if results is not None and self._match(results, alone) else None

        for name, function in forms_of(call):
            results = self.builder.attempted(functools.partial(applied, function))
            if results is not None:
                return name, results
        return None

    def _match(self, results: Results, alone: Sequence[Value | None]) -> bool:
        """Whether each result has the shape and dtype of a model's own, beside the models."""
        return all(
            value is None or (result is not None and self._matches(result, value))
            for result, value in zip(results, alone, strict=True)
        )

    def _matches(self, result: Operand, alone: Value) -> bool:
        value = self.builder.value(result.ref)
        own = [size for dim, size in enumerate(value.shape) if dim != result.dim]
        return (tuple(own), value.dtype) == (alone.shape, alone.dtype)

    def _plain(self, op: Op, refs: Sequence[Ref]) -> Results:
        args, kwargs = op.bind(list(refs))
        target = aten.reshape.default if op.target in VIEWS else op.target
        made = self.builder.emit(target, *args, **kwargs)
        made = (made,) if isinstance(made, Ref) else made
        return tuple(None if r is None else Operand(r) for r in made)

    def _picked(self, lane: Lane) -> Ref:
        if lane.dim is None:
            return lane.ref
        return self.builder.emit(aten.select.int, lane.ref, lane.dim, lane.row)

    def _joined(self, lanes: Sequence[Lane]) -> Operand:
        """One operand made of values that may lie anywhere."""
        first = lanes[0]
        size = None if first.dim is None else self.builder.shape(first.ref)[first.dim]
        found = as_operand(lanes, size)
        if found is not None:
            return found
        picked = [self._picked(lane) for lane in lanes]
        return Operand(self.builder.emit(aten.stack.default, tuple(picked), 0), 0)

    # --- result --------------------------------------------------------------------------------

    def _captured(self) -> Captured:
        builder = self.builder
        losses = [self.lanes[m][g.loss] for m, g in enumerate(self.graphs) if g.loss is not None]
        joined = self._joined(losses)
        if joined.dim is None:  # one model, or identical models
            ones = [joined.ref] * self.num
            joined = Operand(builder.emit(aten.stack.default, tuple(ones), 0), 0)
        vector = builder.emit(aten.reshape.default, joined.ref, [self.num])
        buffer = builder.add(ValueKind.BUFFER, LOSSES, (self.num,), builder.value(vector).dtype)
        detached = builder.emit(aten.detach.default, vector)
        mutations = [(buffer, detached), *self._mutations()]
        loss = builder.emit(aten.sum.default, vector)
        graph = builder.graph(loss=loss, mutations=mutations, outputs=[loss])
        values = [graph.values[i] for i in graph.inputs]
        signature = signature_of_tensors(
            [v.name for v in values], [v.shape for v in values], [v.dtype for v in values]
        )
        return Captured(graph=graph, signature=signature)

    def _mutations(self) -> list[tuple[Ref, Ref]]:
        """The new value of each buffer of the array, from the new values of its models' buffers.

        The row of a model that leaves its buffer as it is stays.
        """
        following: dict[int, dict[int, Lane]] = {}
        place: dict[int, Lane] = {}
        for model, graph in enumerate(self.graphs):
            for old, new in graph.mutations:
                if old not in self.lanes[model]:
                    self._store([model], [graph.values[old]])
                lane = self.lanes[model][old]
                place[lane.ref.index] = lane
                following.setdefault(lane.ref.index, {})[lane.row] = self.lanes[model][new]
        found = []
        for index, by_row in following.items():
            lane = place[index]
            if lane.dim is None:
                found.append((lane.ref, self._picked(by_row[0])))
                continue
            num = self.builder.shape(lane.ref)[lane.dim]
            rows = [by_row.get(row, Lane(lane.ref, lane.dim, row)) for row in range(num)]
            found.append((lane.ref, self._front(self._joined(rows), num)))
        return found

    def _front(self, operand: Operand, num: int) -> Ref:
        if operand.dim is None:
            size = (num, *self.builder.shape(operand.ref))
            return self.builder.emit(aten.expand.default, operand.ref, list(size))
        return self.builder.moved(operand.ref, operand.dim, 0)


def _draws(graph: Graph) -> dict[int, Draw]:
    """The ops of a model that draw random numbers, with their positions in their blocks."""
    found: dict[int, Draw] = {}
    for block in graph.blocks:
        place = 0
        for op in graph.block_ops(block):
            if draws(op.target, op.args, dict(op.kwargs)):
                found[op.index] = Draw(block.index, place)
                place += 1
    return found
