"""The machine that runs lowered graphs in this process, with raw ops bound to groups of ranks.

In: a `Communicator` and graphs whose raw ops name mesh axes. Out: one Python function per graph,
made once, in which each raw op is a call of a function of the communicator (no dispatcher, no
look-up by name) and common ops are called by their Python bindings. Some all-reduces work in place
(`autopar.lowering.in_place`). Of graphs that are to be compiled a second function is made, in
which each region is one call.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autopar.base.accelerators import default_generator, is_accelerator
from autopar.base.errors import first_line
from autopar.base.torch_private import copy_each
from autopar.comm.coalesced import (
    MAX_SCATTERS,
    Once,
    start_gather,
    start_scatter,
    start_sum,
    travels_alone,
)
from autopar.comm.groups import Communicator
from autopar.comm.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    RAW_OPS,
)
from autopar.comm.transports.base import Collectives
from autopar.ir.model_dropout import MODEL_DROPOUT, rows_dropped
from autopar.lowering.in_place import may_work_in_place
from autopar.lowering.joined_move import JoinedMove, joined_move
from autopar.lowering.regions import Region, regions_of
from autopar.lowering.route import Route
from autopar.lowering.streams import Issue
from autopar.lowering.types import CompiledGraph, RankProgram, TensorMeta, graphs_of
from autopar.movement.execution import Gather, Run, Sum
from autopar.runtime.machine.apart import apart
from autopar.runtime.machine.direct_calls import DIRECT
from autopar.runtime.machine.moments import Moment, moments_of
from autopar.runtime.machine.mover import Mover
from autopar.runtime.machine.protocols import Phase
from autopar.runtime.machine.randomness import Draw, Seeds, random_nodes, split_axes
from autopar.runtime.machine.regions import RegionFunction
from autopar.runtime.machine.streams import Streams, UpdateStream

_GRAPHS = {Phase.FORWARD: "F", Phase.INPUT: "I", Phase.WEIGHT: "W"}


@dataclass(slots=True)
class _Joined:
    """Operands that travel in one collective, with their places among all moves."""

    places: list[int] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)
    digits: list[tuple[int, int]] = field(default_factory=list)
    after: list[torch.dtype | None] = field(default_factory=list)

    def add(self, place: int, operand: Tensor, call: JoinedMove) -> None:
        self.places.append(place)
        self.operands.append(operand)
        self.digits.append(call.digit)  # type: ignore[arg-type]
        self.after.append(call.after)

    def release(self) -> list[Tensor]:
        """Hand the operands over: from now on only the caller refers to them."""
        operands, self.operands = self.operands, []
        return operands


class Probe(Protocol):
    """Runs graphs in place of the machine, to observe their values."""

    def begin(self, microbatch: int, block: int, phase: Phase) -> None: ...

    def run(
        self,
        module: fx.GraphModule,
        bound: fx.GraphModule,
        compiled: fx.GraphModule | None,
        arguments: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Run ``module``: ``bound`` has the same nodes, ``compiled``, if any, the same results."""
        ...


class ProcessMachine:
    """The `Machine` of one rank's device. Call it with gradients disabled.

    While a ``probe`` is set, it runs the graphs. A ``mover`` is told what runs.
    """

    def __init__(self, communicator: Communicator, seeds: Seeds) -> None:
        self.communicator = communicator
        self.device = communicator.device
        self.seeds = seeds
        self.probe: Probe | None = None
        self.mover: Mover | None = None
        self._bound: dict[fx.GraphModule, fx.GraphModule] = {}
        self._compiled: dict[fx.GraphModule, fx.GraphModule] = {}
        self._calls: dict[fx.GraphModule, JoinedMove | None] = {}
        self._scatters: deque[Callable[[], Sequence[Tensor]]] = deque()
        self._streams: Streams | None = None
        self._updates: UpdateStream | None = None
        self._moment = moments_of(self.device)

    def moment(self) -> Moment:
        return self._moment()

    @property
    def waits(self) -> Sequence[tuple[Moment, Moment]]:
        return self.communicator.waits.spans

    def on(self, issue: Issue) -> contextlib.AbstractContextManager[None]:
        if not is_accelerator(self.device):
            return contextlib.nullcontext()
        if self._streams is None:
            self._streams = Streams(self.device)
        return self._streams.on(issue)

    def updating(self, gradients: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        if not is_accelerator(self.device):
            return contextlib.nullcontext()
        if self._updates is None:
            self._updates = UpdateStream(self.device)
        return self._updates.on(gradients)

    def end_updates(self) -> None:
        if self._updates is not None:
            self._updates.join()

    def _use(self, *tensors: Tensor) -> None:
        """Tell the streams, if there are two, what runs next."""
        if self._streams is not None:
            self._streams.note(*tensors)

    def run(self, module: fx.GraphModule, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        results = self._run(module, arguments)
        if self.mover is not None:
            self.mover.after(results)
        return results

    def _run(self, module: fx.GraphModule, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """As `run`, of a graph that is no operation of its own to a ``mover``."""
        bound = self._bound.get(module)
        if bound is None:
            bound = self._bound[module] = self._bind(module)
        compiled = self._compiled.get(module)
        if self._streams is not None:
            self._streams.note(*arguments)
        if self.mover is not None:
            self.mover.check(module, arguments)
        results: Sequence[Tensor]
        if self.probe is not None:
            results = self.probe.run(module, bound, compiled, arguments)
        else:
            results = (compiled or bound).forward(*arguments)
        return results

    def compile(self, program: RankProgram, route: Route) -> list[str]:
        """Compile what is to be compiled of the stages of this device.

        Graphs that Inductor cannot compile here run op by op; returned is one text for each reason.
        """
        failures: dict[str, list[str]] = {}
        names: dict[int, str] = {}
        stages = {action.stage for action in route.actions}
        for stage, block in zip(program.pipeline.stage_of_block, program.blocks):
            if stage in stages:
                names.setdefault(block.kernel, block.name)
        for number, name in names.items():
            modules = dict(graphs_of(program.kernels[number]))
            for graph in program.kernels[number].compiled:
                module, where = modules[graph.phase], f"{graph.phase} of block {name!r}"
                try:
                    self._compiled[module] = self._bind_compiled(module, graph, where)
                except Exception as error:  # whatever Inductor and its compilers raise
                    failures.setdefault(first_line(error), []).append(where)
        return [
            f"run op by op, because Inductor cannot compile them: {', '.join(graphs)} ({reason})"
            for reason, graphs in failures.items()
        ]

    def begin(self, microbatch: int, block: int, phase: Phase) -> None:
        self.communicator.microbatch = microbatch
        self.seeds.begin_call(microbatch, block, phase)
        if self.probe is not None:
            self.probe.begin(microbatch, block, phase)
        if self.mover is not None:
            self.mover.before(Run(_GRAPHS[phase], block, microbatch))

    def begin_gather(self, block: int, values: tuple[int, ...]) -> None:
        if self.mover is not None:
            self.mover.before(Gather(block, values))

    def begin_sum(self, value: int, gradient: Tensor, contribution: Tensor) -> None:
        if self.mover is not None:
            self.mover.before(Sum(value))
            self.mover.check_present([gradient, contribution])

    def end_sum(self, gradient: Tensor) -> None:
        if self.mover is not None:
            self.mover.after([gradient])

    def release(self, program: RankProgram) -> None:
        """Drop the functions made from a program's graphs."""
        for kernel in program.kernels:
            for _, module in graphs_of(kernel):
                self._bound.pop(module, None)
                self._compiled.pop(module, None)
                self._calls.pop(module, None)

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        self._use(left, right)
        return left + right

    def add_to(self, left: Tensor, right: Tensor) -> None:
        self._use(left, right)
        left.add_(right)

    def add_in(self, dtype: torch.dtype, left: Tensor, right: Tensor) -> Tensor:
        self._use(left, right)
        return left + right if left.dtype is dtype else left.to(dtype).add_(right)

    def add_rows(self, rows: Tensor, whole: Tensor, first: int, end: int) -> None:
        rows.add_(whole[first:end])

    def weighted_sum(self, terms: Sequence[tuple[float, Tensor]]) -> Tensor:
        return functools.reduce(torch.add, [value * weight for weight, value in terms])

    def apart(self, values: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
        self._use(*values)
        return apart(values, others)

    def contiguous(self, value: Tensor) -> Tensor:
        self._use(value)
        return value.contiguous()

    def filled(self, meta: TensorMeta, fill: float) -> Tensor:
        return torch.full(meta.shape, fill, dtype=meta.dtype, device=self.device)

    def start_moves(
        self, moves: list[tuple[fx.GraphModule, Tensor]]
    ) -> Callable[[], Sequence[Tensor]]:
        wait = self._start(moves, self.communicator.collectives)
        if self.mover is not None:
            self.mover.after()
        return wait

    def start_gradients(
        self, moves: list[tuple[fx.GraphModule, Tensor]]
    ) -> Callable[[], Sequence[Tensor]]:
        return self._start(moves, self.communicator.gradient_collectives, own_memory=True)

    def _start(
        self,
        moves: list[tuple[fx.GraphModule, Tensor]],
        collectives_of: Callable[[str], Collectives],
        *,
        own_memory: bool = False,
    ) -> Callable[[], Sequence[Tensor]]:
        """Start the moves; collectives of one kind, group and dtype travel as one.

        With ``own_memory`` no result is a view of a larger tensor that it would keep alive.
        """
        num_moves = len(moves)
        results: dict[int, Tensor] = {}
        casts: list[tuple[int, Tensor, torch.dtype]] = []
        joined: dict[tuple[Any, str, torch.dtype, int], _Joined] = {}
        for place in range(num_moves):
            module, operand = moves.pop(0)
            call = self._single_call(module)
            self._use(operand)
            if self.mover is not None and call is not None:
                self.mover.check_present([operand])
            if call is not None and call.op is None:
                if own_memory or call.after is None:  # then operands are released one by one
                    results[place] = _cast(operand, call.after)
                else:
                    casts.append((place, operand, call.after))
                del operand
                continue
            if call is None or operand.dtype is torch.bool:
                (result,) = self._run(module, [operand])
                is_part = result.nbytes < result.untyped_storage().nbytes()
                results[place] = result.clone() if own_memory and is_part else result
                del operand, result
                continue
            operand = _cast(operand, call.before)
            size_bytes = operand.numel() * operand.element_size()
            is_alone = travels_alone(size_bytes, is_sum=call.op is ALL_REDUCE)
            key = (call.op, call.label, operand.dtype, place if is_alone else -1)
            joined.setdefault(key, _Joined()).add(place, operand, call)
            del operand
        results.update(_cast_each(casts))
        del casts
        pending = []
        for (op, label, _, _), together in joined.items():
            num, collectives = self.communicator.group(label).size, collectives_of(label)
            operands, digits = together.release(), together.digits
            if op is ALL_REDUCE:
                wait = start_sum(operands, collectives)
            elif op is ALL_GATHER:
                wait = start_gather(operands, digits, collectives, num)
            else:
                wait = start_scatter(operands, digits, collectives, num)
                wait = Once(wait)
                self._scatters.append(wait)
            del operands
            pending.append((together.places, together.after, wait))
        while len(self._scatters) > MAX_SCATTERS:
            self._scatters.popleft()()

        def finish() -> Sequence[Tensor]:
            for places, after, wait in pending:
                results.update(zip(places, map(_cast, wait(), after)))
                if wait in self._scatters:
                    self._scatters.remove(wait)
            return [results[place] for place in range(num_moves)]

        return finish

    def _single_call(self, module: fx.GraphModule) -> JoinedMove | None:
        """The collective of a graph that consists of it and casts alone; None for other graphs."""
        if module not in self._calls:
            self._calls[module] = joined_move(module)
        return self._calls[module]

    def _bind(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        random = random_nodes(module)
        for node in module.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            self._bind_call(node, env[node], random)
        return fx.GraphModule(_on_device(module, self.device), graph)

    def _bind_call(self, node: fx.Node, copied: fx.Node, random: Mapping[fx.Node, Draw]) -> None:
        """Let the copy of a node call a function of this process."""
        if node.op != "call_function":
            return
        if node.target in RAW_OPS:
            copied.target = self._bound_raw(node)
            copied.args, copied.kwargs = (copied.args[0],), {}
        elif node.target is MODEL_DROPOUT:
            copied.target = self._seeded_by_model
        elif node in random:
            copied.target = self._seeded(node, random[node])
        else:
            copied.target = DIRECT.get(node.target, node.target)

    def _bind_compiled(
        self, module: fx.GraphModule, compiled: CompiledGraph, where: str
    ) -> fx.GraphModule:
        """As `_bind`, with one call for each region, compiled now."""
        regions = regions_of(module, on_cpu=self.device.type == "cpu")
        functions = []
        for region, operands in zip(regions, compiled.operands, strict=True):
            functions.append(RegionFunction(region.module(), self.device, where))
            functions[-1].compile(operands)
        inside = {node for region in regions for node in region.nodes}
        at = {region.last: place for place, region in enumerate(regions)}
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        random = random_nodes(module)
        for node in module.graph.nodes:
            if node in at:
                place = at[node]
                function, operands = functions[place], compiled.operands[place]
                self._call_region(graph, env, regions[place], function, operands, random)
            elif node not in inside:
                env[node] = graph.node_copy(node, env.__getitem__)
                self._bind_call(node, env[node], random)
        return fx.GraphModule(_on_device(module, self.device), graph)

    def _call_region(
        self,
        graph: fx.Graph,
        env: dict[fx.Node, fx.Node],
        region: Region,
        function: RegionFunction,
        operands: Sequence[TensorMeta],
        random: Mapping[fx.Node, Draw],
    ) -> None:
        masks = []
        for node, meta in zip(region.masks, operands[len(region.inputs) :], strict=True):
            masks.append(graph.call_function(self._mask_drawn(node, random[node], meta)))
        arguments = (*(env[node] for node in region.inputs), *masks)
        call = graph.call_function(function.run, arguments)
        for place, node in enumerate(region.outputs):
            env[node] = graph.call_function(operator.getitem, (call, place))

    def _bound_raw(self, node: fx.Node) -> Callable[[Tensor], Tensor]:
        _, label, _, *static = node.args
        if may_work_in_place(node):
            return self.communicator.bind_in_place(str(label))
        return self.communicator.bind(node.target, str(label), *static)  # type: ignore[arg-type]

    def _seeded(self, node: fx.Node, draw: Draw) -> Callable[..., Any]:
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        axes, seeds, rank = split_axes(node), self.seeds, self.communicator.rank
        generator = default_generator(self.device)

        def seeded(*args: Any, **kwargs: Any) -> Any:
            generator.manual_seed(seeds.seed_of(draw, axes, rank))
            return target(*args, **kwargs)

        seeded.__name__ = f"seeded_{node.name}"
        return seeded

    def _mask_drawn(self, node: fx.Node, draw: Draw, meta: TensorMeta) -> Callable[[], Tensor]:
        """Draws the mask of a dropout, as ATen draws it on a CPU."""
        axes, seeds, rank = split_axes(node), self.seeds, self.communicator.rank
        generator, device = default_generator(self.device), self.device
        share_dropped = node.args[1]
        assert isinstance(share_dropped, float)

        def mask() -> Tensor:
            generator.manual_seed(seeds.seed_of(draw, axes, rank))
            made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
            return made.bernoulli_(1.0 - share_dropped)

        mask.__name__ = f"mask_{node.name}"
        return mask

    def _seeded_by_model(
        self, x: Tensor, draws: Tensor, p: float, axes: str
    ) -> tuple[Tensor, Tensor]:
        seeds, rank = self.seeds, self.communicator.rank
        generator = default_generator(self.device)

        def begin(model: int, block: int, place: int) -> None:
            generator.manual_seed(seeds.seed_of_model(model, block, place, axes, rank))

        return rows_dropped(x, draws, p, begin)


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def _cast_each(casts: Sequence[tuple[int, Tensor, torch.dtype]]) -> dict[int, Tensor]:
    """The operands in other dtypes, by place, with few kernels."""
    made = {place: torch.empty_like(x, dtype=dtype) for place, x, dtype in casts}
    copy_each([*made.values()], [x for _, x, _ in casts])
    return made


def labels_of(program: RankProgram) -> set[str]:
    """The axes labels of all collectives and slices of a program."""
    labels = set()
    for kernel in program.kernels:
        for _, module in graphs_of(kernel):
            labels |= {str(n.args[1]) for n in module.graph.nodes if n.target in RAW_OPS}
    return labels


def _on_device(module: fx.GraphModule, device: torch.device) -> dict[str, Any]:
    """The constants of a graph on a device; scalars stay on the CPU, as every kernel takes them."""
    names = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    held = {name: getattr(module, name) for name in names}
    return {n: t.to(device) if isinstance(t, Tensor) and t.dim() else t for n, t in held.items()}
