"""Rows of constants that are all alike, computed once and expanded where they are read.

A model that makes its mask for a whole batch from positions alone makes the same mask for every
sequence, which can take gigabytes. This pass makes such a value *narrow*: of size 1 in the
dimensions along which nothing differs. Expansions start narrow values; element-wise operators,
operators along another dimension and gathers from narrow values propagate them. All other operators
read an expansion, which takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Ref, map_refs, refs_in

_aten = torch.ops.aten
_LIKE_POINTWISE = frozenset({
    _aten._to_copy.default, _aten.clone.default, _aten.detach.default, _aten.zeros_like.default,
    _aten.ones_like.default, _aten.full_like.default, _aten.unsqueeze.default,
    _aten.transpose.int, _aten.permute.default, _aten.__and__.Tensor, _aten.__or__.Tensor,
    _aten.__xor__.Tensor,
})  # fmt: skip
_READ_DTYPE_ALONE = frozenset({
    _aten.new_ones.default, _aten.new_zeros.default, _aten.new_full.default,
    _aten.new_empty.default,
})  # fmt: skip
_ALONG = {
    _aten.cumsum.default: (1, None), _aten.cumprod.default: (1, None), _aten.diff.default: (2, -1),
    _aten.flip.default: (1, None), _aten.slice.Tensor: (1, 0), _aten.select.int: (1, None),
}  # fmt: skip
"""The position of an operator's dimension argument, and its default."""
_MASKS = (torch.bool, torch.uint8)

RawOp = dict[str, Any]
"""The fields of an op of the `Graph` that is being read, without its index."""
RawValue = dict[str, Any]
"""The fields of a value of that graph, without its index."""


class AlikeRows:
    """Rewrites the ops of one graph while it is read; new values are appended to ``values``.

    ``fixed``: the values that depend on constants alone, to which new ones are added. ``run`` calls
    an op on tensors without data.
    """

    def __init__(
        self, values: list[RawValue], fixed: set[int], run: Callable[[RawOp], Tensor]
    ) -> None:
        self.values = values
        self.fixed = fixed
        self.run = run
        self.narrow: dict[int, int] = {}
        self.expansions: dict[int, RawOp | None] = {}
        """The model's own expansion, if any, of narrow values that no op has read whole so far."""
        self.made: list[RawOp] = []

    def rewritten(self, ops: Sequence[RawOp], roots: Collection[int]) -> list[RawOp]:
        """``ops``, some of which compute one row; ``roots`` are values to be read whole."""
        own = [op for op in ops if all(o is None or o in self.fixed for o in op["outputs"])]
        for op in own:
            if not self._narrowed(op):
                self._read(inputs_of(op), is_contiguous=True)
                self.made.append(op)
        self._read(sorted(roots), is_contiguous=True)
        known = {id(op) for op in own}
        for op in ops:
            if id(op) not in known:
                self._read(inputs_of(op), is_contiguous=False)
                self.made.append(op)
        return self.made

    def _narrowed(self, op: RawOp) -> bool:
        """Whether an op that reads narrow values was added in place of ``op``."""
        target = op["target"]
        inputs = inputs_of(op)
        if len(op["outputs"]) != 1 or op["outputs"][0] is None:
            return False
        if target is _aten.expand.default:
            return self._expansion(op)
        if not any(i in self.narrow for i in inputs):
            return False
        if target in _READ_DTYPE_ALONE:
            self.made.append(self._on_narrow(op))
            return True
        if target is _aten.index.Tensor:
            return self._gathered(op)
        is_row_by_row = target in _LIKE_POINTWISE or torch.Tag.pointwise in target.tags
        if is_row_by_row or (target in _ALONG and self._is_along_others(op, inputs)):
            self._add(op, self._on_narrow(op))
            return True
        return False

    def _expansion(self, op: RawOp) -> bool:
        (output,) = op["outputs"]
        source = self.narrow.get(op["args"][0].index, op["args"][0].index)
        shape, whole = self.values[source]["shape"], self.values[output]["shape"]
        row = (*(1 for _ in whole[len(shape) :]), *shape)
        if row == whole:
            return False
        if row != shape:
            source = self._new(output, {**op, "args": (Ref(source), row)})
        self.narrow[output] = source
        self.expansions[output] = {**op, "args": (Ref(source), whole)}
        return True

    def _gathered(self, op: RawOp) -> bool:
        """Rewrite an element-wise gather: an index for every dimension but those that are alike."""
        (output,) = op["outputs"]
        source, indices = op["args"]
        values = self.values
        if len(indices) != len(values[source.index]["shape"]) or any(
            not isinstance(i, Ref) or values[i.index]["dtype"] in _MASKS for i in indices
        ):
            return False
        alike = self._alike(source.index)
        kept = [i for dim, i in enumerate(indices) if dim not in alike]
        rank = len(values[output]["shape"])
        if max((len(values[i.index]["shape"]) for i in kept), default=-1) != rank:
            return False
        table = self.narrow.get(source.index, source.index)
        for dim in sorted(alike, reverse=True):
            first = {**op, "target": _aten.select.int, "args": (Ref(table), dim, 0)}
            table = self._new(output, first)
        rows = tuple(Ref(self.narrow.get(i.index, i.index)) for i in kept)
        self._add(op, {**op, "args": (Ref(table), rows)})
        return True

    def _is_along_others(self, op: RawOp, inputs: Sequence[int]) -> bool:
        """Whether operands are narrow in the same dimensions, none of which the op works along."""
        position, default = _ALONG[op["target"]]
        args = op["args"]
        given = args[position] if len(args) > position else dict(op["kwargs"]).get("dim", default)
        rank = len(self.values[inputs[0]]["shape"])
        along = {d % rank for d in (given if isinstance(given, tuple) else (given,))}
        alike = [self._alike(i) for i in inputs]
        return not any(each != alike[0] or each & along for each in alike)

    def _alike(self, index: int) -> set[int]:
        """The dimensions along which a value is known not to differ."""
        shape = self.values[index]["shape"]
        row = self.values[self.narrow.get(index, index)]["shape"]
        return {dim for dim, (size, one) in enumerate(zip(shape, row)) if size != one}

    def _on_narrow(self, op: RawOp) -> RawOp:
        def narrow(ref: Ref) -> Ref:
            return Ref(self.narrow.get(ref.index, ref.index))

        args, kwargs = map_refs((op["args"], op["kwargs"]), narrow)
        return {**op, "args": args, "kwargs": kwargs}

    def _add(self, op: RawOp, on_narrow: RawOp) -> None:
        """Record ``on_narrow``, which computes the result of ``op`` or a narrow form of it."""
        (output,) = op["outputs"]
        shape = tuple(self.run(on_narrow).shape)
        if shape == self.values[output]["shape"]:
            self.made.append(on_narrow)
            return
        self.narrow[output] = self._new(output, on_narrow)
        self.expansions[output] = None

    def _new(self, like: int, op: RawOp) -> int:
        """A new value computed by ``op``, named after the value it helps to compute."""
        made, index = self.run(op), len(self.values)
        name = f"{self.values[like]['name']}_row{index}"
        shape = tuple(made.shape)
        self.values.append(
            {**self.values[like], "name": name, "shape": shape, "dtype": made.dtype,
             "strides": strides_of(made)}
        )  # fmt: skip
        self.made.append({**op, "name": name, "outputs": (index,)})
        self.fixed.add(index)
        return index

    def _read(self, whole: Sequence[int], *, is_contiguous: bool) -> None:
        """Expand values that are read whole; as copies for ops that may rely on contiguity."""
        for index in whole:
            if index not in self.expansions:
                continue
            own, value = self.expansions.pop(index), self.values[index]
            plain = {
                "name": value["name"], "target": _aten.expand.default, "kwargs": (),
                "args": (Ref(self.narrow[index]), value["shape"]), "outputs": (index,),
                "module_path": "", "location": "",
            }  # fmt: skip
            if own is not None or not is_contiguous:
                op = own or plain
                value["strides"] = strides_of(self.run(op))
                self.made.append(op)
                continue
            expanded, value["strides"] = self._new(index, plain), None
            copy = (("memory_format", torch.contiguous_format),)
            self.made.append(
                {**plain, "target": _aten.clone.default, "args": (Ref(expanded),), "kwargs": copy}
            )


def inputs_of(op: RawOp) -> tuple[int, ...]:
    """The values that an op reads, in the order of its arguments, with repeats."""
    return refs_in((op["args"], op["kwargs"]))


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides in elements; None for a contiguous tensor."""
    return None if tensor.is_contiguous() else tuple(int(s) for s in tensor.stride())
