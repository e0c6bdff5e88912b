"""A builder that writes a graph op by op, with shapes, dtypes and strides from fake tensors.

Input: operators, with a `Ref` in place of each tensor. Output: a `Graph` with fixed ops first, cut
into blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.base.torch_private import FakeTensorMode
from autopar.frontend.reader import is_random
from autopar.frontend.rewrites.alike_rows import strides_of
from autopar.ir.blocks import cut_into_blocks
from autopar.ir.graph import Graph, Op, Ref, Value, ValueKind, map_refs, refs_in, verify
from autopar.ir.tracing import VIEWS, trace_fx

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

aten = torch.ops.aten
_STOPS_GRADIENT = frozenset({"aten.detach.default"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of an op: name, module path and line, and whether a gradient may flow."""

    name: str = "fused"
    module_path: str = ""
    location: str = ""
    differentiable: bool = True


class GraphBuilder:
    """Writes one graph. Ops are recorded in the order in which they are emitted."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.fakes: list[Tensor] = []
        self.origin = Origin()
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._constants: list[tuple[str, Tensor]] = []
        self._names: dict[str, int] = {}

    @contextmanager
    def origin_of(self, op: Op, *, differentiable: bool) -> Iterator[None]:
        """A context in which emitted ops get ``op`` as their origin."""
        before = self.origin
        self.origin = Origin(
            name=op.name,
            module_path=op.module_path,
            location=op.location,
            differentiable=differentiable,
        )
        try:
            yield
        finally:
            self.origin = before

    def add(
        self,
        kind: ValueKind,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        differentiable: bool = False,
        fixed: bool = False,
        data: Tensor | None = None,
    ) -> Ref:
        """Add a parameter, buffer, input or constant."""
        with self.mode:
            fake = torch.empty(tuple(shape), dtype=dtype)
        has_target = kind in (ValueKind.PARAMETER, ValueKind.BUFFER)
        ref = self._value(
            kind, name, fake, differentiable, fixed, target=name if has_target else None
        )
        if data is not None:
            self._constants.append((self._values[ref.index].name, data))
        return ref

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Record one call; returns the `Ref` of its result, or a tuple for several.

        The tuple has None for results that are not tensors.
        """
        frozen = _tuples(args)
        frozen_kwargs = tuple((k, _tuples(v)) for k, v in kwargs.items())
        with self.mode:
            call_args, call_kwargs = map_refs(
                (frozen, frozen_kwargs), lambda ref: self.fakes[ref.index]
            )
            result = target(*_lists(call_args), **{k: _lists(v) for k, v in call_kwargs})
        inputs = [self._values[i] for i in refs_in((frozen, frozen_kwargs))]
        flows = (
            self.origin.differentiable
            and str(target) not in _STOPS_GRADIENT
            and any(v.differentiable for v in inputs)
        )
        fixed = all(v.fixed for v in inputs) and not is_random(target)
        single = isinstance(result, Tensor)
        refs: list[Ref | None] = []
        for place, fake in enumerate([result] if single else result):
            if not isinstance(fake, Tensor):
                refs.append(None)
                continue
            is_float = fake.dtype.is_floating_point or fake.dtype.is_complex
            name = self.origin.name if place == 0 else f"{self.origin.name}.{place}"
            refs.append(self._value(ValueKind.ACTIVATION, name, fake, flows and is_float, fixed))
        self._ops.append(
            Op(
                index=len(self._ops),
                name=self._values[refs[0].index].name if refs[0] is not None else self.origin.name,
                target=target,
                args=frozen,
                kwargs=frozen_kwargs,
                outputs=tuple(None if r is None else r.index for r in refs),
                module_path=self.origin.module_path,
                location=self.origin.location,
            )
        )
        return refs[0] if single else tuple(refs)

    def attempted(self, function: Callable[[], _T | None]) -> _T | None:
        """The result of ``function``; where it raises, or has none, nothing that it emitted stays.

        Its errors are logged.
        """
        written: tuple[list[Any], ...] = (self.fakes, self._values, self._ops, self._constants)
        sizes = [len(each) for each in written]
        result = None
        try:
            result = function()
        except Exception as error:
            _log.debug("%s: %s: %s", self.origin.name, type(error).__name__, error)
        if result is None:
            for each, size in zip(written, sizes):
                del each[size:]
        return result

    def _value(
        self,
        kind: ValueKind,
        name: str,
        fake: Tensor,
        differentiable: bool,
        fixed: bool,
        *,
        target: str | None = None,
    ) -> Ref:
        index = len(self._values)
        count = self._names[name] = self._names.get(name, -1) + 1
        self._values.append(
            Value(
                index=index,
                name=f"{name}~{count}" if count else name,
                kind=kind,
                shape=tuple(fake.shape),
                dtype=fake.dtype,
                target=target,
                differentiable=differentiable,
                fixed=fixed,
                strides=strides_of(fake) if kind is ValueKind.ACTIVATION else None,
            )
        )
        self.fakes.append(fake)
        return Ref(index)

    def value(self, ref: Ref) -> Value:
        return self._values[ref.index]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self._values[ref.index].shape

    def moved(self, ref: Ref, source: int, target: int) -> Ref:
        """A value with its dimension ``source`` at ``target``."""
        if source == target:
            return ref
        order = list(range(len(self.shape(ref))))
        order.insert(target, order.pop(source))
        return self.emit(torch.ops.aten.permute.default, ref, order)

    def set_differentiable(self, ref: Ref, differentiable: bool) -> None:
        """Set whether a gradient flows through the result of an op, where the model differs."""
        value = self._values[ref.index]
        self._values[ref.index] = replace(value, differentiable=differentiable)

    def graph(
        self,
        *,
        loss: Ref,
        mutations: Sequence[tuple[Ref, Ref]],
        outputs: Sequence[Ref],
    ) -> Graph:
        """The finished graph: dead code is removed, and fixed ops come first."""
        roots = {loss.index, *(new.index for _, new in mutations), *(o.index for o in outputs)}
        live = set(roots)
        kept: list[Op] = []
        for op in reversed(self._ops):
            if any(o in live for o in op.outputs):
                kept.append(op)
                live.update(op.inputs)
        kept.reverse()
        mutated = {old.index for old, _ in mutations}
        fixed = self._fixed(kept, mutated)
        ordered = [op for op in kept if _is_fixed(op, fixed)]
        ordered += [op for op in kept if not _is_fixed(op, fixed)]
        stored = {v.index for v in self._values if v.kind is not ValueKind.ACTIVATION}
        made = {o for op in kept for o in op.outputs if o is not None and o in live}
        used = sorted(live | stored | mutated | made)
        new_index = {old: new for new, old in enumerate(used)}
        reached = self._reached(loss.index, kept)
        values = tuple(
            replace(
                self._values[old],
                index=new_index[old],
                fixed=old in fixed,
                differentiable=self._values[old].differentiable
                and (self._values[old].kind is not ValueKind.ACTIVATION or old in reached),
            )
            for old in used
        )
        ops = tuple(op.renumbered(i, new_index) for i, op in enumerate(ordered))
        graph = Graph(
            values=values,
            ops=ops,
            blocks=cut_into_blocks(ops, values),
            inputs=tuple(v.index for v in values if v.kind is ValueKind.INPUT),
            loss=new_index[loss.index],
            outputs=tuple(new_index[o.index] for o in outputs),
            mutations=tuple((new_index[a.index], new_index[b.index]) for a, b in mutations),
            constants=tuple(self._constants),
        )
        verify(graph)
        return graph

    def _fixed(self, ops: Sequence[Op], mutated: set[int]) -> set[int]:
        fixed = {
            v.index
            for v in self._values
            if v.kind is not ValueKind.ACTIVATION and v.fixed and v.index not in mutated
        }
        for op in ops:
            if not is_random(op.target) and all(i in fixed for i in op.inputs):
                fixed.update(o for o in op.outputs if o is not None)
        return fixed

    def _reached(self, loss: int, ops: Sequence[Op]) -> set[int]:
        """The values through which the loss's gradient flows."""
        reached = {loss}
        for op in reversed(ops):
            if any(
                o is not None and o in reached and self._values[o].differentiable
                for o in op.outputs
            ):
                reached.update(op.inputs)
        return reached


def replay(builder: GraphBuilder, function: Callable[..., Any], *operands: Ref) -> Any:
    """Emit the ATen calls of a traced ``function``; None where it holds tensors of its own.

    Calls that write in place become those that do not, and views reshapes, as strides may differ on
    devices. The result is a `Ref`, or a tuple of them.
    """
    module = trace_fx(function, builder.mode, *(builder.fakes[o.index] for o in operands))
    if any(node.op == "get_attr" for node in module.graph.nodes):
        return None
    given = iter(operands)
    known: dict[Any, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "output":
            return _resolved(node.args[0], known)
        elif "getitem" in str(node.target):
            known[node] = known[node.args[0]][node.args[1]]
        else:
            args, kwargs = _resolved((tuple(node.args), dict(node.kwargs)), known)
            target = aten.reshape.default if node.target in VIEWS else node.target
            known[node] = builder.emit(target, *args, **kwargs)
    return None


def _resolved(node: Any, known: dict[Any, Any]) -> Any:
    if isinstance(node, torch.fx.Node):
        return known[node]
    if isinstance(node, dict):
        return {key: _resolved(item, known) for key, item in node.items()}
    return tuple(_resolved(i, known) for i in node) if isinstance(node, list | tuple) else node


def _is_fixed(op: Op, fixed: set[int]) -> bool:
    return all(o is None or o in fixed for o in op.outputs)


def _tuples(node: Any) -> Any:
    return tuple(_tuples(n) for n in node) if isinstance(node, list | tuple) else node


def _lists(node: Any) -> Any:
    return [_lists(n) for n in node] if isinstance(node, tuple) else node
