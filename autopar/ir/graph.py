"""The captured graph: frozen values, ops and blocks.

Made by `autopar.frontend.capture.capture`. An op refers to values by `Ref`; multi-output ops list
all their outputs, so there are no tuple-indexing nodes. Ops are in topological order and blocks are
contiguous runs of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch

from autopar.base.errors import GraphError


class ValueKind(StrEnum):
    """Where a value comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of value ``index`` among an op's arguments."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A parameter apart from what ops read of it: it is stored and updated in one dtype, and its
    gradients are summed in another."""

    stored: torch.dtype
    reduced: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the graph. ``target`` is its key in ``state_dict()``, None if it has none.

    ``differentiable``: a gradient flows back through it. ``fixed``: it is small and depends on no
    parameter and no input (masks, positions), so every device computes the whole of it once.
    ``strides``: those of an op's result in the model, in elements; None if it is contiguous.
    ``dtype`` is what ops read; ``mixed`` is set for a parameter that is stored in another dtype.
    """

    index: int
    name: str
    kind: ValueKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: str | None = None
    differentiable: bool = False
    fixed: bool = False
    strides: tuple[int, ...] | None = None
    mixed: Mixed | None = None

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        """That of the parameter itself, of its gradient and its optimizer's state."""
        return self.dtype if self.mixed is None else self.mixed.stored

    @property
    def stored_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.stored_dtype.itemsize

    @property
    def reduced_dtype(self) -> torch.dtype:
        """That in which its gradients are summed."""
        return self.dtype if self.mixed is None else self.mixed.reduced

    @property
    def reduced_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.reduced_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call of an ATen operator on whole (global) values.

    ``args`` and ``kwargs`` hold a `Ref` in place of each tensor, nested in tuples as in the schema.
    ``outputs`` has one entry per returned tensor, None if unused. ``per_shard``: each device
    applies the op to its own shard of the batch, even though the result differs from the whole
    batch's (see `autopar.passes.batch_norm`).
    """

    index: int
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    module_path: str
    location: str = ""
    per_shard: bool = False
    inputs: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Value index of each tensor operand, in argument order, duplicates kept."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", refs_in((self.args, self.kwargs)))

    @property
    def target_name(self) -> str:
        return _name_of(self.target)

    def bind(self, operands: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each operand in the place of its `Ref`, in order of `inputs`."""
        iterator = iter(operands)
        args = map_refs(self.args, lambda _: next(iterator))
        kwargs = map_refs(self.kwargs, lambda _: next(iterator))
        return args, dict(kwargs)

    def renumbered(self, index: int, numbers: Mapping[int, int]) -> Op:
        """The op at another index, with other value indices; outputs without one are unused."""

        def renamed(ref: Ref) -> Ref:
            return Ref(numbers[ref.index])

        return replace(
            self,
            index=index,
            args=map_refs(self.args, renamed),
            kwargs=map_refs(self.kwargs, renamed),
            outputs=tuple(None if o is None else numbers.get(o) for o in self.outputs),
        )


@lru_cache(maxsize=4096)
def _name_of(target: Any) -> str:
    return str(target)


def refs_in(node: Any) -> tuple[int, ...]:
    """Indices of the values that ``node`` refers to, in order, duplicates kept."""
    return tuple(_refs(node))


def _refs(node: Any) -> Iterator[int]:
    if isinstance(node, Ref):
        yield node.index
    elif isinstance(node, tuple):
        for item in node:
            yield from _refs(item)


def map_refs(node: Any, new: Callable[[Ref], Any]) -> Any:
    """``node`` with every `Ref` replaced, nesting unchanged."""
    if isinstance(node, Ref):
        return new(node)
    if isinstance(node, tuple):
        return tuple(map_refs(item, new) for item in node)
    return node


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A contiguous run of ops: a layer, a residual unit, or the ops between two of them."""

    index: int
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model's training computation on the global batch.

    ``loss`` is None for a model captured without one. ``outputs`` are the tensors of the model's
    output (for the forward program); ``mutations`` pairs a buffer with its next value. ``aliases``
    maps the other names of a tied parameter to the one that is kept; ``shared`` has the names of
    each module and parameter with several (see `autopar.frontend.names`). ``constants`` holds the
    data of CONSTANT values by name.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    blocks: tuple[Block, ...]
    inputs: tuple[int, ...]
    loss: int | None
    outputs: tuple[int, ...]
    mutations: tuple[tuple[int, int], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    constants: tuple[tuple[str, torch.Tensor], ...] = ()

    def of_kind(self, kind: ValueKind) -> tuple[Value, ...]:
        return tuple(v for v in self.values if v.kind is kind)

    @property
    def parameters(self) -> tuple[Value, ...]:
        return self.of_kind(ValueKind.PARAMETER)

    @property
    def buffers(self) -> tuple[Value, ...]:
        return self.of_kind(ValueKind.BUFFER)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers, which every device holds whole."""
        return sum(buffer.stored_bytes for buffer in self.buffers)

    def block_ops(self, block: Block) -> tuple[Op, ...]:
        return self.ops[block.start : block.stop]

    def consumers(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Uses of each value as (op index, operand position)."""
        uses: dict[int, list[tuple[int, int]]] = {}
        for op in self.ops:
            for position, value in enumerate(op.inputs):
                uses.setdefault(value, []).append((op.index, position))
        return {value: tuple(entries) for value, entries in uses.items()}

    @property
    def unused(self) -> tuple[Value, ...]:
        """The parameters that nothing reads, so that they get no gradient."""
        read = {*self.outputs, self.loss, *(new for _, new in self.mutations), *self.consumers()}
        return tuple(each for each in self.parameters if each.index not in read)

    @property
    def reached(self) -> frozenset[int]:
        """The trained parameters that the loss's gradient reaches; eager gives others None."""
        flows = {self.loss}
        for op in self.ops:
            if any(o is not None and self.values[o].differentiable for o in op.outputs):
                flows.update(op.inputs)
        return frozenset(p.index for p in self.parameters if p.differentiable and p.index in flows)

    def producers(self) -> dict[int, tuple[int, int]]:
        """Producer of each computed value as (op index, output position)."""
        return {
            value: (op.index, position)
            for op in self.ops
            for position, value in enumerate(op.outputs)
            if value is not None
        }

    @property
    def fingerprint(self) -> str:
        """A hash of the computation: ops, arguments, shapes, dtypes, names and blocks."""
        digest = hashlib.sha256()
        for value in self.values:
            entry = (value.name, value.kind, value.shape, str(value.dtype), value.target)
            digest.update(repr((*entry, value.differentiable)).encode())
            if value.mixed is not None:
                digest.update(repr((str(value.mixed.stored), str(value.mixed.reduced))).encode())
        for op in self.ops:
            entry_op = (op.target_name, _stable(op.args), _stable(op.kwargs), op.outputs)
            digest.update(repr((*entry_op, op.name)).encode())
            if op.per_shard:
                digest.update(b"per shard")
        blocks = tuple((b.name, b.start, b.stop) for b in self.blocks)
        digest.update(repr((blocks, self.loss, self.outputs, self.mutations)).encode())
        return digest.hexdigest()[:32]


def _stable(node: Any) -> Any:
    if isinstance(node, Ref):
        return ("ref", node.index)
    if isinstance(node, tuple):
        return tuple(_stable(item) for item in node)
    return str(node)


def verify(graph: Graph) -> None:
    """Raise GraphError if the graph breaks an invariant that later stages rely on."""
    for rule in (_check_indices, _check_order, _check_blocks, _check_loss):
        rule(graph)


def _check_indices(graph: Graph) -> None:
    for position, value in enumerate(graph.values):
        if value.index != position:
            raise GraphError(f"value {value.name!r} has index {value.index} at {position}")
    for position, op in enumerate(graph.ops):
        if op.index != position:
            raise GraphError(f"op {op.name!r} has index {op.index} at position {position}")


def _check_order(graph: Graph) -> None:
    known = {v.index for v in graph.values if v.kind is not ValueKind.ACTIVATION}
    for op in graph.ops:
        for value in op.inputs:
            if value not in known:
                name = graph.values[value].name
                raise GraphError(f"op {op.name!r} reads {name!r} before it is computed")
        for output in op.outputs:
            if output is None:
                continue
            if output in known:
                raise GraphError(f"value {graph.values[output].name!r} is computed twice")
            known.add(output)


def _check_blocks(graph: Graph) -> None:
    expected = 0
    for block in graph.blocks:
        if block.start != expected or block.stop <= block.start:
            raise GraphError(f"block {block.name!r} covers ops {block.start}..{block.stop}")
        expected = block.stop
    if expected != len(graph.ops):
        raise GraphError(f"blocks cover {expected} of {len(graph.ops)} ops")


def _check_loss(graph: Graph) -> None:
    if graph.loss is None:
        return
    loss = graph.values[graph.loss]
    if torch.Size(loss.shape).numel() != 1 or not loss.dtype.is_floating_point:
        raise GraphError(f"the loss has shape {loss.shape} and dtype {loss.dtype}, not one float")
