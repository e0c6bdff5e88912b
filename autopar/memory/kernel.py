"""Memory that one kernel needs on a device: its graphs, what it saves and what it makes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.comm.footprint import workspace_bytes
from autopar.comm.ops import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from autopar.comm.transports.registry import traits_of
from autopar.cost_models.hardware import DeviceSpec
from autopar.cost_models.memory import Allocator, allocator_of, graph_memory
from autopar.ir.fused_lstm import scratch_bytes
from autopar.lowering.types import Kernel

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InputGradient:
    """A result of I: its size, ``number`` of its storage among those of the graph's results, how
    large that is, and which of the cotangents it is a part of, if of one."""

    size_bytes: int
    number: int
    storage_bytes: int
    cotangent: int | None
    is_contiguous: bool


@dataclass(slots=True)
class KernelMemory:
    """Working bytes of each graph of a kernel beyond its inputs, what it saves, what of that and of
    I's results W still needs once I is done, and the gradients that I makes.

    Outputs that it saves too are counted as values; ``saved_outputs`` says of each whether W needs
    it."""

    workspace: dict[str, int] = field(default_factory=dict)
    saved: int = 0
    late: int = 0
    saved_outputs: dict[int, bool] = field(default_factory=dict)
    input_grads: tuple[InputGradient, ...] = ()


def kernel_memory(kernel: Kernel, device: DeviceSpec) -> KernelMemory:
    """What the graphs of a kernel need on ``device``, by liveness within each."""
    allocator = allocator_of(device)

    def working(node: fx.Node) -> int:
        if device.kind != "cpu":
            return _collective_bytes(node, device.kind)
        copies = _convolution_bytes(node, device.num_threads) + _lstm_bytes(node)
        return copies + _batch_norm_bytes(node) or _collective_bytes(node, device.kind)

    memory = KernelMemory()
    graphs = {"F": kernel.forward, "I": kernel.backward_input, "W": kernel.backward_weight}
    for phase, module in graphs.items():
        if module is None:
            continue
        given = [n for n in module.graph.nodes if n.op == "placeholder"]
        inputs = sum(_storages(given, allocator).values())
        found = graph_memory(module.graph, workspace_bytes=working, allocator=allocator)
        memory.workspace[phase] = max(found.peak_bytes - inputs, 0)
    outputs = list(kernel.forward.graph.output_node().args[0])  # type: ignore[arg-type]
    number = {node: i for i, node in enumerate(outputs[: kernel.num_outputs])}
    saved = outputs[kernel.num_outputs :]
    memory.saved = sum(allocator.rounded(_size(n)) for n in dict.fromkeys(saved) if n not in number)
    for index, node in enumerate(saved):
        if node in number:
            memory.saved_outputs[number[node]] = ("saved", index) in kernel.weight_sources
    if kernel.backward_input is not None:
        memory.input_grads = _input_gradients(kernel, kernel.backward_input.graph, allocator)
    if kernel.backward_weight is not None:
        given = [n for n in kernel.backward_weight.graph.nodes if n.op == "placeholder"]
        memory.late = sum(
            allocator.rounded(_size(node))
            for node, (kind, index) in zip(given, kernel.weight_sources)
            if kind == "handed" or (kind == "saved" and saved[index] not in number)
        )
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
                storage_bytes=allocator.rounded(storage.nbytes()),
                cotangent=cotangent_of.get(id(storage)),
                is_contiguous=value.is_contiguous(),
            )
        )
    return tuple(found)


_LANES = 16
"""oneDNN's layouts on x86 have the channels in groups of so many, the last one padded."""


def _convolution_bytes(node: fx.Node, num_threads: int) -> int:
    """Copies that oneDNN makes for a convolution, in layouts of its own, besides the results.

    Of all that it reads and of what it writes, and then of what it writes alone, to be copied out.
    Few channels are read as they lie unless the kernel has size 1; the gradient of a strided
    convolution's input is laid out channels last, and copied once more. Held against torch's
    profiler for 928 shapes of 3 to 64 channels: results and gradients of inputs of 16 channels and
    more within 5% for nine in ten, down to 0.74 where large kernels stride; gradients of weights up
    to half too much; with fewer channels, strided, wrong by up to three times either way, of an
    amount that is small in a model. Products stand in for kernels of size 1 where a single thread
    has less than 16 samples, as torch chooses (``use_mkldnn``).
    """
    is_forward = node.target is aten.convolution.default
    if not is_forward and node.target is not aten.convolution_backward.default:
        return 0
    args: Any = node.args
    x, weight = (n.meta["val"] for n in (args[:2] if is_forward else args[1:3]))
    stride, dilation, groups = (args[i if is_forward else i + 1] for i in (3, 5, 8))
    is_point = all(size == 1 for size in weight.shape[2:])
    is_strided = any(size > 1 for size in stride)
    is_product = is_point and not is_strided and max(dilation) == 1 and groups == 1
    if x.dtype is not torch.float32 or (is_product and num_threads == 1 and x.shape[0] < 16):
        return 0
    y = (node if is_forward else args[0]).meta["val"]
    is_by_channel = groups == x.shape[1] > 1
    is_read_in_place = x.shape[1] < _LANES and not is_point and not is_by_channel
    x_bytes, y_bytes = _in_lanes(x, x.shape[1]), _in_lanes(y, y.shape[1])
    weight_bytes = _in_lanes(weight, groups) if is_by_channel else _in_lanes(weight, *weight.shape)
    read_bytes = 0 if is_read_in_place else x_bytes
    if is_forward:
        return max(read_bytes + weight_bytes + y_bytes - _bytes(y), y_bytes)
    needs_input, needs_weight, _ = args[10]
    found = 0
    if needs_input:
        is_last = is_strided and not is_by_channel
        made_bytes, copy_bytes = (_bytes(x), _bytes(x)) if is_last else (x_bytes, 0)
        found = max(y_bytes + weight_bytes + made_bytes - _bytes(x), made_bytes + copy_bytes)
    if needs_weight:
        found = max(found, read_bytes + y_bytes + weight_bytes)
    return found


def _in_lanes(tensor: Tensor, *dims: int) -> int:
    """Bytes of a tensor whose channels are padded to whole lanes.

    ``dims``: how many of them there are; of a weight all its sizes, channels first.
    """
    padded = math.prod(-(-size // _LANES) * _LANES for size in dims[:2])
    return _bytes(tensor) // math.prod(dims[:2]) * padded


def _batch_norm_bytes(node: fx.Node) -> int:
    """torch makes the gradient of the input twice where input and cotangent lie alike in memory."""
    if node.target is not aten.native_batch_norm_backward.default:
        return 0
    args: Any = node.args
    cotangent, x = (n.meta["val"] for n in args[:2])
    return _bytes(x) if args[9][0] and cotangent.stride() == x.stride() else 0


def _lstm_bytes(node: fx.Node) -> int:
    is_backward = node.target is aten.mkldnn_rnn_layer_backward.default
    if not is_backward and node.target is not torch.ops.autopar.lstm_layer.default:
        return 0
    x, _, hidden_weight = (n.meta["val"] for n in node.all_input_nodes[:3])
    sizes = (*x.shape, hidden_weight.shape[1], x.element_size())
    return scratch_bytes(*sizes, is_backward=is_backward)


def _collective_bytes(node: fx.Node, device_kind: str) -> int:
    """What a collective inside a graph needs besides its operand and its result."""
    if node.target not in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
        return 0
    operand, _, num, *digits = node.args
    assert isinstance(operand, fx.Node)
    assert isinstance(num, int)
    traits = traits_of(device_kind, num)
    return workspace_bytes(node.target, digits, _size(operand), _size(node), traits)


def made_bytes(graph: fx.Graph, allocator: Allocator) -> int:
    """Of a graph's results, those that lie in no memory of its operands."""

    results: Any = graph.output_node().args[0]
    given = _storages((node for node in graph.nodes if node.op == "placeholder"), allocator)
    made = _storages(results, allocator)
    return sum(size for key, size in made.items() if key not in given)


def _storages(nodes: Iterable[fx.Node], allocator: Allocator) -> dict[int, int]:
    """Bytes of each storage that values lie in."""
    values = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor)]
    found = [value.untyped_storage() for value in values]
    return {id(storage): allocator.rounded(storage.nbytes()) for storage in found}


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return _bytes(value) if isinstance(value, Tensor) else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
