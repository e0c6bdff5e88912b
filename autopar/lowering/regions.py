"""The regions of a block's graphs: runs of ops that a device executes as one compiled function.

In: an F, I or W graph, and which graphs of which blocks are compiled. Out: its regions in order,
and a program that says which of its graphs are compiled. Between regions run, as they are, ops
that a compiler must not touch:

- collectives, whose order all ranks share;
- random ops, which are seeded one by one. The mask of a dropout on a CPU depends on no value, so it
  is drawn before the region in which it is applied, from the same seed;
- ops that read at indices from data: an index out of range raises an error in op-by-op execution,
  but ends the process in code compiled for a CPU;
- ops outside of ATen (a user's own, oneDNN's), and views between them.

A graph with control flow, or whose shapes depend on data, has no regions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from autopar.base.errors import PlanError
from autopar.base.spelling import did_you_mean
from autopar.base.torch_private import is_overload, written_arguments
from autopar.comm.ops import RAW_OPS
from autopar.ir.random_ops import is_random
from autopar.ir.row_exchange import SIZED_BY_DATA
from autopar.lowering.types import (
    BlockProgram,
    CompiledGraph,
    GraphPhase,
    Kernel,
    RankProgram,
    TensorMeta,
    graphs_of,
)

_ATEN = torch.ops.aten
_DROPOUT = _ATEN.native_dropout.default
_INDEXING = "<built-in function getitem>"
_UNKNOWN_SHAPES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_READS_INDICES = (
    "embedding", "gather", "index", "nll_loss", "one_hot", "put", "scatter", "take", "ctc_loss",
    "max_unpool", "grid_sampler", "bincount", "cross_entropy",
)  # fmt: skip
MIN_OPS = 2
"""A region has at least so many ops that compute; fewer gain nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A run of nodes, the outer values that it reads, and those of its values read outside.

    ``masks``: the dropouts inside, whose masks are drawn before it and follow its ``inputs``.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    masks: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def operands(self) -> tuple[TensorMeta, ...]:
        """The operands of the region's function; needs the values that the trace recorded."""
        inputs = [TensorMeta.of(node.meta["val"]) for node in self.inputs]
        return (*inputs, *(_mask_meta(node) for node in self.masks))

    @property
    def last(self) -> fx.Node:
        """Its last call in the graph; all that it reads comes before."""
        return next(node for node in reversed(self.nodes) if not _is_item(node))

    def module(self) -> fx.GraphModule:
        """The region as a graph of its own: ``(*inputs, *masks) -> outputs``."""
        graph = fx.Graph()
        env = {n: graph.placeholder(f"x{i}") for i, n in enumerate(self.inputs)}
        masks = {n: graph.placeholder(f"mask{i}") for i, n in enumerate(self.masks)}
        for node in self.nodes:
            if node in masks:
                continue
            source = node.args[0] if _is_item(node) else None
            if isinstance(source, fx.Node) and source in masks:
                env[node] = masks[source] if node.args[1] else _dropped(graph, source, env, masks)
                continue
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = {}
        graph.output(tuple(env[n] for n in self.outputs))
        return fx.GraphModule({}, graph)


def regions_of(module: fx.GraphModule, *, on_cpu: bool) -> tuple[Region, ...]:
    """The regions of a graph, in order; none if it must run op by op."""
    nodes = list(module.graph.nodes)
    calls = [n for n in nodes if n.op == "call_function"]
    if any(_has_unknown_shapes(n) or n.target in SIZED_BY_DATA for n in calls):
        return ()
    communicates = any(n.target in RAW_OPS for n in calls)
    if communicates and any(_reads_indices(n) for n in calls):
        return ()  # such an op may raise, and collectives cannot be repeated to find it
    found: list[Region] = []
    run: dict[fx.Node, None] = {}

    def close() -> None:
        if sum(not _is_view(n) for n in run) >= MIN_OPS:
            found.append(_region(tuple(run)))
        run.clear()

    for node in calls:
        if node in run or _is_item(node):
            continue  # results of a call go with it
        if _is_compiled(node, on_cpu=on_cpu):
            run.update(dict.fromkeys([node, *_items(node)]))
        elif any(argument in run for argument in node.all_input_nodes):
            close()
    close()
    return tuple(found)


def with_compiled(program: RankProgram, phases: Mapping[str, Collection[str]]) -> RankProgram:
    """The program with these graphs compiled: F, I or W, by block.

    Graphs without regions stay as they are. Raises PlanError for an unknown block, or if blocks of
    one kernel differ.
    """
    names = [block.name for block in program.blocks]
    for name in phases:
        if name not in names:
            raise PlanError(f"{name!r} is no block of the program" + did_you_mean(name, names))
    kernels = list(program.kernels)
    for number, blocks in blocks_by_kernel(program).items():
        wanted = {frozenset(phases.get(block.name, ())) for block in blocks}
        if len(wanted) > 1:
            texts = ", ".join(
                f"{b.name}: {''.join(sorted(phases.get(b.name, ())))}" for b in blocks
            )
            raise PlanError(
                f"equal blocks share their graphs, and other ones of them are to be compiled in "
                f"each ({texts}); list the same for all of them"
            )
        kernels[number] = _compiled(kernels[number], next(iter(wanted)), program.device_type)
    return replace(program, kernels=tuple(kernels))


def blocks_by_kernel(program: RankProgram) -> dict[int, tuple[BlockProgram, ...]]:
    """The equal blocks that share each kernel."""
    found: dict[int, tuple[BlockProgram, ...]] = {}
    for block in program.blocks:
        found[block.kernel] = (*found.get(block.kernel, ()), block)
    return found


def compilable(program: RankProgram) -> dict[str, tuple[GraphPhase, ...]]:
    """The graphs that have regions, by block of a stage: F, I, W or less."""
    found = {}
    for number, blocks in blocks_by_kernel(program).items():
        kernel = _compiled(program.kernels[number], "FIW", program.device_type)
        phases = tuple(graph.phase for graph in kernel.compiled)
        found.update({b.name: phases for b in blocks if phases and b.role.has_stage})
    return found


def _compiled(kernel: Kernel, phases: Collection[str], device_type: str) -> Kernel:
    on_cpu = device_type == "cpu"
    found = []
    for phase, module in graphs_of(kernel):
        regions = regions_of(module, on_cpu=on_cpu) if phase in phases else ()
        if regions and not _has_complex_values(module):
            operands = tuple(region.operands for region in regions)
            found.append(CompiledGraph(phase=phase, operands=operands))
    return replace(kernel, compiled=tuple(found))


def _region(nodes: tuple[fx.Node, ...]) -> Region:
    inside = set(nodes)
    masks = tuple(n for n in nodes if n.target is _DROPOUT)
    inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
    outputs = tuple(n for n in nodes if any(user not in inside for user in n.users))
    return Region(nodes=nodes, inputs=tuple(inputs), masks=masks, outputs=outputs)


def _dropped(
    graph: fx.Graph,
    dropout: fx.Node,
    env: Mapping[fx.Node, fx.Node],
    masks: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    """The result of a dropout, as ATen computes it on a CPU from its mask."""
    source, p, *_ = dropout.args
    assert isinstance(source, fx.Node)
    assert isinstance(p, float)
    kept = graph.call_function(_ATEN.mul.Tensor, (env[source], masks[dropout]))
    return graph.call_function(_ATEN.mul.Tensor, (kept, 1.0 / (1.0 - p)))


def _is_compiled(node: fx.Node, *, on_cpu: bool) -> bool:
    if not _is_aten(node) or not all(_is_tensor(n) for n in node.all_input_nodes):
        return False
    if is_random(node):
        return on_cpu and _is_separable_dropout(node)
    is_mutable = any(written_arguments(node.target, node.args, dict(node.kwargs)))
    return not (_reads_indices(node) or is_mutable)


def _is_separable_dropout(node: fx.Node) -> bool:
    p = node.args[1] if len(node.args) > 1 else None
    return node.target is _DROPOUT and isinstance(p, float) and p < 1.0 and not node.kwargs


def _is_aten(node: fx.Node) -> bool:
    return is_overload(node.target) and str(node.target).startswith("aten.")


def _is_tensor(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return True
    return is_overload(node.target) or _is_item(node)


def _reads_indices(node: fx.Node) -> bool:
    name = str(node.target).removeprefix("aten.")
    return _is_aten(node) and any(word in name for word in _READS_INDICES)


def _has_complex_values(module: fx.GraphModule) -> bool:
    """Whether a graph computes in complex numbers, which Inductor does not compile."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _mask_meta(dropout: fx.Node) -> TensorMeta:
    source = dropout.args[0]
    assert isinstance(source, fx.Node)
    return TensorMeta.of(torch.empty_like(source.meta["val"], dtype=torch.bool))


def _has_unknown_shapes(node: fx.Node) -> bool:
    tags: Iterable[object] = getattr(node.target, "tags", ())
    is_control_flow = not is_overload(node.target) and not _is_item(node)
    return is_control_flow or any(tag in tags for tag in _UNKNOWN_SHAPES)


def _is_item(node: fx.Node) -> bool:
    return str(node.target) == _INDEXING


def _items(node: fx.Node) -> list[fx.Node]:
    """The single results of a call with several, also of lists among them."""
    own = [user for user in node.users if _is_item(user)]
    return own + [item for user in own for item in _items(user)]


def _is_view(node: fx.Node) -> bool:
    return _is_item(node) or getattr(node.target, "is_view", False)
