"""Early update: which parameters are updated within the backward pass, and W cut into steps.

In: a lowered program. Out: the same program with `EarlyUpdate`, and with W of each kernel as steps:
first what several gradients share, then one gradient after the other (small ones together), and
large ones by rows. So a gradient is complete, reduced, used and released before the next exists.

The weight matrix of a linear layer and the table of an embedding are cut into rows of at most
``tile_bytes`` where one pass of a block completes the gradient, and it is only summed over ranks on
its way to the stored parameter. Rows of a tied weight are added to what its other uses contributed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.base.errors import PlanError
from autopar.comm.ops import ALL_REDUCE
from autopar.ir.placement import local_shape
from autopar.ir.update import Clipping, Update
from autopar.lowering.pipeline import has_late_updates, has_side_stream
from autopar.lowering.types import (
    EarlyUpdate,
    Kernel,
    ParameterProgram,
    RankProgram,
    WeightStep,
)

MIN_TILE_BYTES = 1 << 20
MAX_TILES = 200
"""All gradients together are cut into about so many rows at most: each is a call more."""
JOINED_BYTES = 1 << 18
"""Gradients of together at most so many bytes are computed, reduced and updated together."""

DEFAULT = Update()

_MM = torch.ops.aten.mm.default
_EMBEDDING = torch.ops.aten.embedding_dense_backward.default
_ALL_REDUCE_ONLY = (ALL_REDUCE, torch.ops.aten._to_copy.default)


def with_early_update(
    program: RankProgram,
    update: Update = DEFAULT,
    *,
    tile_bytes: int | None = None,
    in_steps: bool = True,
) -> RankProgram:
    """The program with parameters updated within the backward pass.

    Gradients are cut into rows of `default_tile_bytes` unless ``tile_bytes`` is given. Kept
    gradients are whole. Unless ``in_steps``, W is not cut: each block makes all its gradients at
    once, and updates do not overlap with the backward pass. Raises PlanError for a schedule that
    updates in the next step, or has a second compute stream.
    """
    if has_late_updates(program):
        name = program.pipeline.schedule.name
        raise PlanError(
            f"schedule {name!r} updates weights in the next step, so that gradients are reduced "
            "behind the backward pass, and update='early' within the backward pass; use "
            "update='at_end', or another schedule"
        )
    if has_side_stream(program):
        name = program.pipeline.schedule.name
        raise PlanError(
            f"schedule {name!r} makes gradients on a second compute stream, which is joined behind "
            "the backward pass, and update='early' uses them within it; use update='at_end', or "
            "another schedule"
        )
    tile_bytes = tile_bytes or default_tile_bytes(program)
    at_end, used_bytes = _at_end(program), _used_bytes(program)
    completed_by = _completed_by(program, at_end)
    kernels = list(program.kernels)
    for index, kernel in enumerate(kernels):
        places = [i for i, block in enumerate(program.blocks) if block.kernel == index]
        users = [program.blocks[place].interface for place in places]
        if kernel.backward_weight is None or not kernel.cotangents or not users or not in_steps:
            continue
        sizes, in_rows = {}, set[int]()
        for operand in kernel.weight_grads:
            values = [u.parameters[operand - len(u.inputs)] for u in users]
            sizes[operand] = used_bytes[values[0]]
            is_large = sizes[operand] > tile_bytes and not update.keep_gradients
            if is_large and all(completed_by.get(v) == place for v, place in zip(values, places)):
                in_rows.add(operand)
        kernels[index] = replace(
            kernel, weight_steps=_Steps(kernel, sizes, in_rows, tile_bytes).steps()
        )
    early = EarlyUpdate(
        at_end=at_end,
        overlaps=in_steps,
        keeps_gradients=update.keep_gradients,
        clipping=None if update.clipping is None else Clipping(update.clipping),
    )
    return replace(program, kernels=tuple(kernels), early=early)


def default_tile_bytes(program: RankProgram) -> int:
    """The largest gradient that is not cut into rows, and the size of the cuts."""
    used_bytes = _used_bytes(program)
    total = sum(used_bytes[p.value] for p in program.parameters if p.trainable)
    return max(MIN_TILE_BYTES, total // MAX_TILES)


def _used_bytes(program: RankProgram) -> dict[int, int]:
    """Bytes of each parameter on a device as blocks use it."""
    return {
        p.value: math.prod(local_shape(p.shape, p.used, program.mesh)) * p.used_dtype.itemsize
        for p in program.parameters
    }


# --- which parameters -------------------------------------------------------------------------
def _at_end(program: RankProgram) -> frozenset[int]:
    """Trained parameters whose memory may be read after their last block, or whose gradient is
    summed over pipeline devices, which happens last."""
    aliased = _aliased(program)
    outside = [o.value for o in (*program.outputs, *program.totals)]
    outside += [b.following.value for b in program.buffers if b.following is not None]
    return frozenset(
        p.value
        for p in program.parameters
        if p.trainable and (len(p.devices) > 1 or p.value in aliased or p.value in outside)
    )


def _aliased(program: RankProgram) -> set[int]:
    """Parameters of which a block's result is a view."""
    found: set[int] = set()
    for block in program.blocks:
        kernel, interface = program.kernels[block.kernel], block.interface
        placeholders = [n for n in kernel.forward.graph.nodes if n.op == "placeholder"]
        results: Any = kernel.forward.graph.output_node().args[0]
        for result in results[: kernel.num_outputs]:
            node = result
            while isinstance(node, fx.Node) and node.op == "call_function" and _is_view(node):
                node = node.args[0]
            place = placeholders.index(node) if node in placeholders else -1
            if place >= len(interface.inputs):
                found.add(interface.parameters[place - len(interface.inputs)])
    return found


def _completed_by(program: RankProgram, at_end: Collection[int]) -> dict[int, int]:
    """The block that completes a gradient in one pass, so that it can do so by rows, for each
    parameter that has one: the first that uses it, since its backward pass is the last. The
    gradient may then only be summed over ranks."""
    if program.num_microbatches > 1:
        return {}
    is_serial = program.pipeline.shape.num_stages == 1
    users: dict[int, list[int]] = {}
    for place, each in enumerate(program.blocks):
        for value in each.interface.parameters:
            users.setdefault(value, []).append(place)
    return {
        p.value: users[p.value][0]
        for p in program.parameters
        if p.trainable and p.value in users and p.value not in at_end
        if len(users[p.value]) == 1 or (is_serial and p.used_dtype is p.reduced_dtype)
        if p.kernel is None or _only_sums(p, program)
    }


def _only_sums(parameter: ParameterProgram, program: RankProgram) -> bool:
    assert parameter.kernel is not None
    backward = program.kernels[parameter.kernel].backward_input
    used = local_shape(parameter.shape, parameter.used, program.mesh)
    stored = local_shape(parameter.shape, parameter.stored, program.mesh)
    return (
        backward is not None
        and used == stored
        and all(n.target in _ALL_REDUCE_ONLY for n in backward.graph.nodes if _is_call(n))
    )


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function"


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or not hasattr(node.target, "_schema")


# --- the steps --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Unit:
    """A step before its sources are numbered: what it computes, from the graph's own nodes."""

    results: tuple[fx.Node, ...]
    grads: tuple[int, ...]
    rows: tuple[int, int] | None = None


class _Steps:
    """The steps of one kernel's W; ``sizes`` are the bytes of each gradient."""

    def __init__(
        self, kernel: Kernel, sizes: Mapping[int, int], in_rows: set[int], tile_bytes: int
    ) -> None:
        assert kernel.backward_weight is not None
        self.kernel, self.sizes, self.in_rows = kernel, sizes, in_rows
        self.tile_bytes = tile_bytes
        self.module = kernel.backward_weight
        nodes = list(self.module.graph.nodes)
        self.order = {node: place for place, node in enumerate(nodes)}
        self.given = [n for n in nodes if n.op == "placeholder"]
        results: Any = self.module.graph.output_node().args[0]
        self.result_of = dict(zip(kernel.weight_grads, results))
        self.shared = self._shared()
        self.outside = {node: place for place, node in enumerate(self.given)}

    def steps(self) -> tuple[WeightStep, ...]:
        made: list[WeightStep] = []
        frontier = self._frontier()
        if frontier:
            made.append(self._step(_Unit(tuple(frontier), ())))
            first = len(self.given)
            self.outside |= {node: first + place for place, node in enumerate(frontier)}
        made += [self._step(unit) for unit in self._units()]
        return self._with_releases(made)

    def _shared(self) -> set[fx.Node]:
        """Computed nodes that several gradients need, and the parts of such results."""
        counts: dict[fx.Node, int] = {}
        groups: dict[fx.Node, list[fx.Node]] = {}
        for result in self.result_of.values():
            groups.setdefault(_maker(result), []).append(result)
        for results in groups.values():
            for node in _calls_before(results):
                counts[node] = counts.get(node, 0) + 1
        shared: set[fx.Node] = set()
        for node in self.order:
            if _is_part(node):
                is_shared = node.args[0] in shared
            else:
                is_shared = counts.get(node, 0) > 1 and not _is_view(node)
            if is_shared:
                shared.add(node)
        return shared

    def _frontier(self) -> list[fx.Node]:
        """The shared nodes that single gradients read; tuples are read by their parts."""
        results = set(self.result_of.values())
        return [
            node
            for node in self.order
            if node in self.shared
            and any(user not in self.shared or node in results for user in node.users)
        ]

    def _units(self) -> list[_Unit]:
        units: list[_Unit] = []
        joined: dict[int, fx.Node] = {}
        size_bytes = 0

        def flush() -> None:
            if joined:
                units.append(_Unit(tuple(joined.values()), tuple(joined)))
                joined.clear()

        for operands in self._operands_by_maker():
            found = {o: self.result_of[o] for o in operands}
            tiles = self._tiles(operands[0]) if self.in_rows.issuperset(operands) else []
            added_bytes = sum(self.sizes[o] for o in operands)
            if tiles or size_bytes + added_bytes > JOINED_BYTES:
                flush()
                size_bytes = 0
            if tiles:
                units += tiles
                continue
            joined.update(found)
            size_bytes += added_bytes
        flush()
        return units

    def _operands_by_maker(self) -> list[list[int]]:
        """Operands whose gradients one call makes, in the order of the calls."""
        found: dict[fx.Node, list[int]] = {}
        for operand in sorted(self.result_of, key=lambda o: self.order[self.result_of[o]]):
            found.setdefault(_maker(self.result_of[operand]), []).append(operand)
        return list(found.values())

    def _tiles(self, operand: int) -> list[_Unit]:
        """Units by rows; none for a gradient that no single product or look-up makes."""
        result = self.result_of[operand]
        weights = [i for k, i in self.kernel.weight_sources if k == "operand"]
        made_alone = result.target in (_MM, _EMBEDDING) and result not in self.shared
        if not made_alone or operand in weights or len(result.users) != 1:
            return []
        if result.target is _EMBEDDING and result.args[4]:  # scaled by the counts of rows
            return []
        num_rows = self._num_rows(result)
        if num_rows is None:
            return []
        num = min(num_rows, math.ceil(self.sizes[operand] / self.tile_bytes))
        ends = [num_rows * i // num for i in range(num + 1)]
        return [_Unit((result,), (operand,), rows) for rows in itertools.pairwise(ends)]

    def _num_rows(self, result: fx.Node) -> int | None:
        if result.target is _EMBEDDING:
            return int(result.args[2])  # type: ignore[arg-type]
        value = result.meta.get("val")
        return None if value is None else int(value.shape[0])

    def _step(self, unit: _Unit) -> WeightStep:
        graph = fx.Graph()
        needed = self._needed(unit.results)
        env: dict[fx.Node, fx.Node] = {}
        sources = []
        for node in sorted(needed, key=self.order.__getitem__):
            if node in self.outside:
                env[node] = graph.placeholder(node.name)
                env[node].meta = dict(node.meta)
                sources.append(self.outside[node])
        for node in sorted(needed, key=self.order.__getitem__):
            if node in env:
                continue
            if unit.rows is not None and node is unit.results[0]:
                env[node] = _rows_of(graph, node, env, unit.rows)
            else:
                env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[n] for n in unit.results))
        return WeightStep(
            module=fx.GraphModule(self.module, graph),
            sources=tuple(sources),
            grads=unit.grads,
            rows=unit.rows,
        )

    def _needed(self, results: Iterable[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        stack = list(results)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                if node not in self.outside:
                    stack.extend(node.all_input_nodes)
        return needed

    def _with_releases(self, steps: Sequence[WeightStep]) -> tuple[WeightStep, ...]:
        """The steps, each with the operands of W that it is the last to read."""
        sources = self.kernel.weight_sources
        last: dict[int, int] = {}
        for number, step in enumerate(steps):
            for place in step.sources:
                if place < len(sources) and sources[place][0] == "operand":
                    last[sources[place][1]] = number
        return tuple(
            replace(step, released=tuple(o for o, n in last.items() if n == number))
            for number, step in enumerate(steps)
        )


def _is_part(node: fx.Node) -> bool:
    """One result of an op that has several."""
    return node.op == "call_function" and not hasattr(node.target, "_schema")


def _maker(result: fx.Node) -> fx.Node:
    """The call that makes a gradient, perhaps together with others."""
    while _is_part(result):
        source = result.args[0]
        assert isinstance(source, fx.Node)
        result = source
    return result


def _calls_before(results: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _rows_of(
    graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, fx.Node], rows: tuple[int, int]
) -> fx.Node:
    """The rows of a product, or of the gradient of a table, as new nodes of a graph."""
    first, end = rows
    call = _Caller(graph, node)
    if node.target is _MM:
        left, right = (env[n] for n in node.args)  # type: ignore[index]
        return call(_MM, call(torch.ops.aten.slice.Tensor, left, 0, first, end), right)
    gradient, index, _, padding, _ = node.args
    here, num = env[index], end - first  # type: ignore[index]
    inside = call(
        torch.ops.aten.logical_and.default,
        call(torch.ops.aten.ge.Scalar, here, first),
        call(torch.ops.aten.lt.Scalar, here, end),
    )
    if padding in range(first, end):
        is_row = call(torch.ops.aten.ne.Scalar, here, padding)
        inside = call(torch.ops.aten.logical_and.default, inside, is_row)
    shifted = call(torch.ops.aten.sub.Tensor, here, first)
    outside = call(torch.ops.aten.full_like.default, here, num)
    own = call(torch.ops.aten.where.self, inside, shifted, outside)
    # The gradients of rows elsewhere are those of a padding row after the last.
    return call(_EMBEDDING, env[gradient], own, num, num, False)  # type: ignore[index]


class _Caller:
    """Adds the calls that replace a node to a graph, with the values that they would have where
    those are known; they belong to the op of the node."""

    def __init__(self, graph: fx.Graph, replaced: fx.Node) -> None:
        self.graph = graph
        self.custom = replaced.meta.get("custom") or {}

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta.get("val"))
        node.meta["val"] = target(*values)
        node.meta["custom"] = self.custom
        return node
