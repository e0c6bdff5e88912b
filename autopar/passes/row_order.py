"""Rows that are sorted only to be grouped by expert keep their own order.

Mixtures of experts sort the rows of all tokens by expert, compute row by row, and put the rows
back. A sort of the whole batch cannot be split, so neither could anything behind it. But no result
depends on the order in between: the pass computes each row where it was.

In: a graph. Out: the graph with every such sort left out, with everything that only carries its
permutation; grouped products become `autopar.ir.routed_product`. Values in between, where they keep
their index, hold the same rows in their own order. That an op treats rows alike is read off its
iteration space: the dimension of the rows is free. A sort with any other use of its permutation, or
whose order is visible (a random op draws by position), stays as it is.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.frontend.capture import Captured
from autopar.ir.graph import Graph, Op, Ref, Value, ValueKind, map_refs
from autopar.ir.random_ops import draws
from autopar.ir.rebuild import rebuilt
from autopar.ir.routed_product import ROUTED_PRODUCT
from autopar.passes.row_patterns import (
    CASTS,
    GROUPED_PRODUCTS,
    LIKES,
    RESHAPES,
    SORTS,
    Bins,
    adds_rows,
    counted_in,
    floor_divisor,
    is_row_wise,
    sorts_ascending,
    writes_rows,
)
from autopar.rules import space_of

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Sorted:
    """Rows in the order of the sort. The value itself now has them in their own order."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Rows in the order of the sort; in their own, ``num`` copies of each row of ``source``."""

    source: int
    num: int


@dataclass(frozen=True, slots=True)
class Token:
    """For each sorted row, its own index divided by ``num``, along the first dimension."""

    num: int


@dataclass(frozen=True, slots=True)
class Inverse:
    """The inverse permutation."""


State = Sorted | Repeated | Token | Inverse
_ORDER = Token(1)


class _Visible(Exception):
    """The order of the rows can be seen in a result."""


def with_rows_in_order(captured: Captured) -> Captured:
    """The same capture without sorts that only group rows."""
    sorts = [op for op in captured.graph.ops if _sorts_numbers(captured.graph, op)]
    if not sorts:
        return captured
    changed = _Changed(captured.graph)
    for sort in sorts:
        if sort.index not in changed.replaced:  # it only undoes another one
            with contextlib.suppress(_Visible):
                _Region(changed, sort).run()
    return replace(captured, graph=changed.rebuilt()) if changed.replaced else captured


def _sorts_numbers(graph: Graph, op: Op) -> bool:
    """Whether an op sorts a vector of integers, the least first."""
    if not sorts_ascending(op):
        return False
    numbers = graph.values[op.inputs[0]]
    return len(numbers.shape) == 1 and not numbers.dtype.is_floating_point and not numbers.fixed


class _Changed:
    """A graph and the changes to it so far: ops in place of others, values to read instead."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.consumers = graph.consumers()
        self.ends = {graph.loss, *graph.outputs, *(new for _, new in graph.mutations)}
        self.values = list(graph.values)
        self.replaced: dict[int, list[Op]] = {}
        self.read_from: dict[int, int] = {}

    def rebuilt(self) -> Graph:
        ops = [new for op in self.graph.ops for new in self.replaced.get(op.index, [op])]
        return rebuilt(self.graph, ops, self.values, self.read_from)


class _Region:
    """One sort and all that its order reaches."""

    def __init__(self, changed: _Changed, sort: Op) -> None:
        self.changed = changed
        self.sort = sort
        self.ids = sort.inputs[0]
        self.values = list(changed.values)
        self.num_rows = self.values[self.ids].shape[0]
        self.states: dict[int, State] = {}
        self.read_from: dict[int, int] = {}
        self.replaced: dict[int, list[Op]] = {sort.index: []}
        self.experts: dict[Bins, int] = {}
        self.ops: list[Op] = []
        self.waiting: list[int] = []

    def run(self) -> None:
        """Leave out the sort; raises _Visible, and changes nothing, where it has to stay."""
        if (order := self.sort.outputs[-1]) is not None:
            self._note(order, _ORDER)
        if self.sort.target_name in SORTS and (ordered := self.sort.outputs[0]) is not None:
            self._same_rows(ordered, self.ids)
        while self.waiting:
            index = heapq.heappop(self.waiting)
            if index not in self.replaced:
                self.ops = self.replaced[index] = []
                self._rewrite(self.changed.graph.ops[index])
        if not self.states.keys().isdisjoint(self.changed.ends - {None}):
            raise _Visible
        if not self.replaced.keys().isdisjoint(self.changed.replaced):
            raise _Visible
        self.changed.values = self.values
        self.changed.replaced |= self.replaced
        self.changed.read_from |= self.read_from

    def _note(self, value: int, state: State) -> None:
        """Note the state of a value, whose readers have to be rewritten."""
        self.states[value] = state
        for index, _ in self.changed.consumers.get(value, ()):
            heapq.heappush(self.waiting, index)

    def _is_ordered(self, value: int) -> bool:
        """Whether a value depends on the order of the sorted rows."""
        return value in self.states

    def _same_rows(self, sorted_value: int, own: int) -> None:
        """Note that a sorted value has the rows of another in the order of the sort."""
        self.read_from[sorted_value] = own
        self._note(sorted_value, Sorted())

    def _rewrite(self, op: Op) -> None:
        """Add what ``op`` becomes; raises _Visible where it depends on the order itself."""
        cases = (
            self._permutation, self._counted, self._picked, self._put_back, self._product,
            self._summed, self._row_wise,
        )  # fmt: skip
        if not any(case(op) for case in cases):
            raise _Visible

    # --- permutations -----------------------------------------------------------------------
    def _permutation(self, op: Op) -> bool:
        """Ops that carry the permutation itself, which disappear."""
        out, state = op.outputs[-1], self.states.get(op.inputs[0])
        found: State | None = None
        if out is None:
            return False
        if state == _ORDER and sorts_ascending(op):
            found = Inverse() if all(o is None for o in op.outputs[:-1]) else None
        elif state == _ORDER and (divisor := floor_divisor(op)) is not None:
            found = Token(divisor)
        elif isinstance(state, Token) and op.target_name in (*CASTS, *RESHAPES):
            found = state if self._keeps_rows(op, out) else None
        elif self._puts_order(op):
            found = Inverse()
        if found is not None:
            self._note(out, found)
            return True
        return state == _ORDER and self._like_order(op)

    def _keeps_rows(self, op: Op, out: int) -> bool:
        """Whether a view or a cast of indices names the same rows along the first dimension."""
        before, after = self.values[op.inputs[0]].shape, self.values[out]
        is_moved = op.target_name == "aten.expand.default" and len(after.shape) > len(before)
        is_index = after.dtype in (torch.int32, torch.int64)
        return is_index and not is_moved and after.shape[:1] == (self.num_rows,)

    def _like_order(self, op: Op) -> bool:
        """An op that takes only the shape of the permutation, which the numbers have too."""
        (out,) = op.outputs
        alike = self.values[self.ids].dtype == self.values[op.inputs[0]].dtype
        if op.target_name not in LIKES or out is None or not alike:
            return False
        self.ops.append(replace(op, args=(Ref(self.ids), *op.args[1:])))
        return True

    def _puts_order(self, op: Op) -> bool:
        """Whether an op writes 0, 1, 2, ... to the places that the permutation names."""
        if not writes_rows(op):
            return False
        base, order, written = op.inputs
        is_whole = self.values[base].shape == (self.num_rows,)
        return is_whole and self.states.get(order) == _ORDER and self._counts_up(written)

    def _counts_up(self, value: int) -> bool:
        """Whether a value is 0, 1, 2, ... up to the number of rows."""
        op = self._maker(value)
        if op is None or self.values[value].shape != (self.num_rows,):
            return False
        if op.target_name == "aten.arange.default":
            return op.args == (self.num_rows,)
        return op.target_name == "aten.arange.start" and op.args == (0, self.num_rows)

    # --- rows picked by the permutation -----------------------------------------------------
    def _picked(self, op: Op) -> bool:
        """``x[order]``, ``x[order // num]``, or the rows of a sorted value put back."""
        picked = self._picks_rows(op)
        if picked is None:
            return False
        source, state, out = *picked, _only(op)
        if isinstance(state, Inverse):
            if not isinstance(self.states.get(source), Sorted):
                return False
            self.read_from[out] = source
            return True
        if self._is_ordered(source) or self.values[source].shape[0] * state.num != self.num_rows:
            return False
        if state.num == 1:
            self._same_rows(out, source)
        else:
            self._note(out, Repeated(source, state.num))
        return True

    def _picks_rows(self, op: Op) -> tuple[int, Token | Inverse] | None:
        """The value whose rows an op picks, and by which state; None for any other op."""
        if len(op.inputs) != 2:
            return None
        source, index = op.inputs
        state, shape = self.states.get(index), self.values[source].shape
        if not isinstance(state, Token | Inverse) or not shape:
            return None
        index_shape = self.values[index].shape
        if op.target_name == "aten.index.Tensor":
            takes = len(op.args[1]) == 1
        elif op.target_name == "aten.index_select.default":
            takes = op.args[1] in (0, -len(shape))
        elif op.target_name == "aten.gather.default":
            takes = op.args[1] in (0, -len(shape)) and index_shape[1:] == shape[1:]
            return (source, state) if takes and len(index_shape) == len(shape) else None
        else:
            return None
        return (source, state) if takes and index_shape == (self.num_rows,) else None

    def _put_back(self, op: Op) -> bool:
        """Sorted rows written to the places that the permutation names."""
        if not writes_rows(op):
            return False
        base, order, rows = op.inputs
        shape, out = self.values[rows].shape, _only(op)
        is_sorted = isinstance(self.states.get(rows), Sorted)
        if self.states.get(order) != _ORDER or not is_sorted or not self._names_rows(op):
            return False
        if self.values[base].shape != shape or self.values[base].dtype != self.values[rows].dtype:
            return False
        self.read_from[out] = rows
        return True

    def _names_rows(self, op: Op) -> bool:
        """Whether the index of an op that writes or adds rows names the places of whole rows."""
        _, index, rows = (self.values[i].shape for i in op.inputs)
        return index == (rows if "scatter" in op.target_name else (self.num_rows,))

    # --- products and sums ------------------------------------------------------------------
    def _counted(self, op: Op) -> bool:
        """A count of the rows of each expert, which does not depend on their order."""
        counts = counted_in(op) is not None and self._are_ids(op.inputs[0])
        if counts:
            self.ops.append(op)
        return counts

    def _grouped_by(self, ends: int) -> Bins | None:
        """How rows are counted, if a value holds the end of each expert's rows."""
        sums = 0
        while (op := self._maker(ends)) is not None:
            if (bins := counted_in(op)) is not None:
                return bins if sums == 1 and self._are_ids(op.inputs[0]) else None
            if op.target_name == "aten.cumsum.default" and op.args[1] in (0, -1):
                sums += 1
            elif op.target_name not in CASTS:
                return None
            ends = op.inputs[0]
        return None

    def _are_ids(self, value: int) -> bool:
        """Whether a value holds the numbers of the experts, in any order or shape."""
        ids = self._source(self.ids)
        while (value := self._source(value)) != ids:
            op = self._maker(value)
            if op is None or op.target_name not in (*CASTS, *RESHAPES):
                return False
            if math.prod(self.values[value].shape) != self.num_rows:
                return False
            value = op.inputs[0]
        return True

    def _maker(self, value: int) -> Op | None:
        """The op of the original graph that computes a value."""
        made = self.changed.producers.get(value)
        return None if made is None else self.changed.graph.ops[made[0]]

    def _source(self, value: int) -> int:
        while (found := self.read_from.get(value, self.changed.read_from.get(value))) is not None:
            value = found
        return value

    def _product(self, op: Op) -> bool:
        """A product of rows grouped by expert."""
        if op.target_name not in GROUPED_PRODUCTS or len(op.inputs) != 3:
            return False
        x, weight, ends = op.inputs
        bins, num_experts = self._grouped_by(ends), self.values[weight].shape[0]
        if self._is_ordered(weight) or bins is None or bins.num != num_experts:
            return False
        rows = self.states.get(x)
        if isinstance(rows, Repeated):
            x = rows.source
        elif not isinstance(rows, Sorted):
            return False
        self._note(_only(op), Sorted())
        args = (Ref(x), Ref(weight), Ref(self._expert_of_rows(op, bins)))
        self.ops.append(replace(op, target=ROUTED_PRODUCT, args=args, kwargs=()))
        return True

    def _expert_of_rows(self, op: Op, bins: Bins) -> int:
        """The expert of each row in its own order; the last bin counts its upper end too."""
        if bins not in self.experts:
            self.experts[bins] = self._capped(op, bins) if bins.has_end else self.ids
        return self.experts[bins]

    def _capped(self, op: Op, bins: Bins) -> int:
        shape = self.values[self.ids].shape
        at_end = self._call(op, _ATEN.eq.Scalar, self.ids, bins.num, shape=shape, dtype=torch.bool)
        return self._call(
            op, _ATEN.masked_fill.Scalar, self.ids, Ref(at_end), bins.num - 1, shape=shape
        )

    def _summed(self, op: Op) -> bool:
        """Sorted rows added to the rows of their tokens."""
        if not adds_rows(op):
            return False
        base, index, rows = op.inputs
        token, shape = self.states.get(index), self.values[base].shape
        if not isinstance(token, Token) or self._is_ordered(base) or not self._names_rows(op):
            return False
        if not isinstance(self.states.get(rows), Sorted | Repeated):
            return False
        per_token = (shape[0], token.num, *shape[1:])
        if math.prod(per_token) != math.prod(self.values[rows].shape):
            return False
        parts = self._call(op, _ATEN.view.default, self._own(op, rows), per_token, shape=per_token)
        total = self._call(op, _ATEN.sum.dim_IntList, parts, (1,), shape=shape)
        self.ops.append(
            replace(op, target=_ATEN.add.Tensor, args=(Ref(base), Ref(total)), kwargs=())
        )
        return True

    # --- ops that treat rows alike ----------------------------------------------------------
    def _row_wise(self, op: Op) -> bool:
        """An op whose result is sorted as its operands are, since its rows are independent."""
        if draws(op.target, op.args, dict(op.kwargs)):
            return False
        ordered = [isinstance(self.states.get(i), Sorted | Repeated) for i in op.inputs]
        if any(self._is_ordered(i) and not yes for i, yes in zip(op.inputs, ordered)):
            return False
        space = space_of(op, self.changed.graph.values)
        if space is None or not is_row_wise(space, op, ordered):
            return False
        own = {i: self._own(op, i) for i, yes in zip(op.inputs, ordered) if yes}

        def renamed(ref: Ref) -> Ref:
            return Ref(own.get(ref.index, ref.index))

        self.ops.append(
            replace(op, args=map_refs(op.args, renamed), kwargs=map_refs(op.kwargs, renamed))
        )
        for out in op.outputs:
            if out is not None:
                self._note(out, Sorted())
        return True

    def _own(self, op: Op, value: int) -> int:
        """A value with the rows of a sorted one in their own order; repeats rows where needed."""
        state = self.states[value]
        if not isinstance(state, Repeated):
            return value
        shape = self.values[state.source].shape
        apart, wide = (shape[0], 1, *shape[1:]), (shape[0], state.num, *shape[1:])
        found = self._call(op, _ATEN.unsqueeze.default, state.source, 1, shape=apart)
        found = self._call(op, _ATEN.expand.default, found, wide, shape=wide)
        found = self._call(op, _ATEN.clone.default, found, shape=wide)
        whole = self.values[value].shape
        return self._call(op, _ATEN._unsafe_view.default, found, whole, shape=whole)

    def _call(
        self,
        near: Op,
        target: Any,
        x: int,
        *args: Any,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> int:
        """Add an op in front of ``near``; returns the index of its result."""
        index, like = len(self.values), self.values[x]
        name = f"{near.name}_{target.__name__.split('.')[0]}{index}"
        self.values.append(
            Value(
                index=index, name=name, kind=ValueKind.ACTIVATION, shape=tuple(shape),
                dtype=dtype or like.dtype, differentiable=like.differentiable,
            )
        )  # fmt: skip
        made = replace(
            near, name=name, target=target, args=(Ref(x), *args), kwargs=(), outputs=(index,)
        )
        self.ops.append(made)
        return index


def _only(op: Op) -> int:
    """The only result of an op."""
    (out,) = op.outputs
    assert out is not None
    return out
