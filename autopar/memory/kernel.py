"""Memory of one kernel (the F, I and W graphs of a block) on a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.base.torch_private import largest_bytes
from autopar.comm.footprint import workspace_bytes
from autopar.comm.ops import COLLECTIVES, is_overwritable
from autopar.comm.transports.registry import traits_of
from autopar.cost_models.allocator import Allocator, allocator_of
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.memory import graph_memory
from autopar.lowering.in_place import may_work_in_place
from autopar.lowering.types import Kernel, graphs_of
from autopar.rules.traced import traced_of


@dataclass(frozen=True, slots=True)
class InputGradient:
    """A result of I: its size, the ``number`` and size of its storage among those of the graph's
    results, and the cotangent that it is a view of, if any."""

    size_bytes: int
    number: int
    storage_bytes: int
    cotangent: int | None
    is_contiguous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The memory of a step of W: its ``workspace`` beyond its arguments, and the bytes that are
    ``made`` for later steps."""

    workspace: int
    made: int


@dataclass(slots=True)
class KernelMemory:
    """The memory of a kernel: ``workspace`` of each graph beyond its inputs, bytes that are
    ``saved`` for the backward pass, those ``late`` ones that W still needs after I, those of them
    that W only passes on as gradients of parameters, and the gradients that I computes.

    Outputs that are also saved are counted as values; ``saved_outputs`` says whether W needs each.
    ``steps`` are those of W, if it has any.
    """

    workspace: dict[str, int] = field(default_factory=dict)
    saved: int = 0
    late: int = 0
    passed: int = 0
    saved_outputs: dict[int, bool] = field(default_factory=dict)
    input_grads: tuple[InputGradient, ...] = ()
    steps: tuple[StepMemory, ...] = ()


def kernel_memory(kernel: Kernel, device: DeviceSpec) -> KernelMemory:
    """The memory of a kernel on ``device``, by liveness within each graph."""
    allocator = allocator_of(device)

    def working(node: fx.Node) -> int:
        scratch = traced_of(node.target).cpu_scratch
        if scratch is None or device.kind != "cpu":
            return _collective_bytes(node, device.kind)
        args: Any = map_arg(node.args, lambda n: n.meta["val"])
        return scratch(node.meta["val"], args, device.num_threads)

    def workspace(graph: fx.Graph) -> int:
        given = [n for n in graph.nodes if n.op == "placeholder"]
        inputs = sum(_storages(given, allocator).values())
        found = graph_memory(
            graph, workspace_bytes=working, allocator=allocator, is_in_place=_is_in_place
        )
        return max(found.peak_bytes - inputs, 0)

    memory = KernelMemory()
    for phase, module in graphs_of(kernel):
        memory.workspace[phase] = workspace(module.graph)
    memory.steps = tuple(
        StepMemory(
            workspace=workspace(step.module.graph),
            made=0 if step.grads else made_bytes(step.module.graph, allocator),
        )
        for step in kernel.weight_steps
    )
    results = list(kernel.forward.graph.output_node().args[0])  # type: ignore[arg-type]
    outputs, saved = results[: kernel.num_outputs], results[kernel.num_outputs :]
    kept = _kept_elsewhere(kernel)
    number = {_key(node): i for i, node in enumerate(outputs) if _key(node) not in kept}
    own = {node for node in saved if _key(node) not in number and _key(node) not in kept}
    memory.saved = sum(_storages(own, allocator).values())
    for index, node in enumerate(saved):
        if _key(node) in number:
            output, is_late = number[_key(node)], ("saved", index) in kernel.weight_sources
            memory.saved_outputs[output] = is_late or memory.saved_outputs.get(output, False)
    if kernel.backward_input is not None:
        memory.input_grads = _input_gradients(kernel, kernel.backward_input.graph, allocator)
    if kernel.backward_weight is not None:
        graph = kernel.backward_weight.graph
        given = [n for n in graph.nodes if n.op == "placeholder"]
        passed = set(graph.output_node().all_input_nodes)
        late = [
            node
            for node, (kind, index) in zip(given, kernel.weight_sources)
            if kind == "handed" or (kind == "saved" and saved[index] in own)
        ]
        memory.late = sum(_storages(late, allocator).values())
        memory.passed = sum(_storages((n for n in late if n in passed), allocator).values())
    return memory


def _input_gradients(
    kernel: Kernel, graph: fx.Graph, allocator: Allocator
) -> tuple[InputGradient, ...]:
    given = [node for node in graph.nodes if node.op == "placeholder"]
    cotangent_of = {
        id(node.meta["val"].untyped_storage()): index
        for node, (kind, index) in zip(given, kernel.input_sources)
        if kind == "cotangent"
    }
    results: Any = graph.output_node().args[0]
    found, numbers = [], dict[int, int]()
    for node in results[: len(kernel.input_grads)]:
        value = node.meta["val"]
        storage = value.untyped_storage()
        found.append(
            InputGradient(
                size_bytes=allocator.rounded(_size(node)),
                number=numbers.setdefault(id(storage), len(numbers)),
                storage_bytes=allocator.rounded(largest_bytes(storage)),
                cotangent=cotangent_of.get(id(storage)),
                is_contiguous=value.is_contiguous(),
            )
        )
    return tuple(found)


def _collective_bytes(node: fx.Node, device_kind: str) -> int:
    """Buffers of a node that is a collective, besides its operand and its result."""
    if node.target not in COLLECTIVES:
        return 0
    operand, _, num, *digits = node.args
    assert isinstance(operand, fx.Node)
    assert isinstance(num, int)
    traits = traits_of(device_kind, num)
    return workspace_bytes(node.target, num, digits, _size(operand), _size(node), traits)


def _is_in_place(node: fx.Node) -> bool:
    """Whether a node is an all-reduce that overwrites its operand."""
    return may_work_in_place(node) and is_overwritable(node.all_input_nodes[0].meta["val"])


def made_bytes(graph: fx.Graph, allocator: Allocator) -> int:
    """Bytes of a graph's results that are not views of its operands."""
    results: Any = graph.output_node().args[0]
    given = _storages((node for node in graph.nodes if node.op == "placeholder"), allocator)
    made = _storages(results, allocator)
    return sum(size for key, size in made.items() if key not in given)


def _kept_elsewhere(kernel: Kernel) -> set[int]:
    """The storages of operands that the derivative reads, whose values are kept as such."""
    given = [n for n in kernel.forward.graph.nodes if n.op == "placeholder"]
    sources = {*kernel.input_sources, *kernel.weight_sources}
    return {_key(given[index]) for kind, index in sources if kind == "operand"}


def _key(node: fx.Node) -> int:
    """Stands for the storage of a value; for the node itself if it has none."""
    value = node.meta.get("val")
    return id(value.untyped_storage() if isinstance(value, Tensor) else node)


def _storages(nodes: Iterable[fx.Node], allocator: Allocator) -> dict[int, int]:
    """Bytes of each storage of some values."""
    values = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    found = [value.untyped_storage() for value in values]
    return {id(storage): allocator.rounded(largest_bytes(storage)) for storage in found}


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
