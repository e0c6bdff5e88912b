"""Times and sizes of the layers of a captured graph, in the form that schedules read.

In: a graph, a device, and the cut of the graph into layers. Out: a `LayerTimes` for each layer, and
from these the `Durations`, `CoRun`, `Links` and `Memory` of `autopar.schedules`. It is used to
study schedules without a plan: by ``benchmarks/zero_bubble.py`` (zero-bubble pipelines, compared
with their paper) and ``benchmarks/out_of_order.py`` (out-of-order weight gradients). Plans use
`autopar.pricing.block_times`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from autopar.cost_models import CommunicationModel, DeviceSpec, OpCall, RooflineModel
from autopar.cost_models.op_work import work
from autopar.cost_models.update import FUSED_ADAMW
from autopar.cost_models.work import Family
from autopar.ir.graph import Block, Graph, Op, ValueKind
from autopar.pricing.utilisation import whole_call
from autopar.schedules import CoRun, Durations, Kind, Links, Memory
from autopar.sharding.strategy import Analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One layer on one device.

    ``gradient_bytes`` counts a tied parameter in the first layer that reads it, where its gradient
    is complete. ``activation_bytes`` are kept from forward to backward. ``boundary_bytes`` are
    passed from this and earlier layers to later ones. A share is the fraction of the device that a
    direction of the layer occupies; the rest is idle units in the last wave of tiles, and gaps
    between launches.
    """

    name: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    gradient_bytes: int
    activation_bytes: int
    boundary_bytes: int
    forward_share: float
    input_grad_share: float
    weight_grad_share: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


def weight_layers(graph: Graph) -> tuple[Block, ...]:
    """Layers as in out-of-order backprop: each op that reads a weight starts one.

    A weight is a trained parameter of two or more dimensions, so the norm and the activation after
    a convolution belong to its layer. Ops before the first weight belong to the first layer.
    """
    weights = {p.index for p in graph.parameters if p.differentiable and len(p.shape) >= 2}
    starts = [op.index for op in graph.ops if weights.intersection(op.inputs)]
    edges = [0, *starts[1:], len(graph.ops)]
    return tuple(
        Block(index=i, name=graph.ops[starts[i] if starts else 0].module_path, start=a, stop=b)
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    )


def layer_times(
    graph: Graph, device: DeviceSpec, layers: Sequence[Block] | None = None
) -> tuple[LayerTimes, ...]:
    """Price every op on ``device`` and sum by layer; ``layers`` defaults to the graph's blocks.

    Ops that depend on neither parameters nor inputs run once and are omitted, as are layers without
    other ops. Raises CostError for an op that cannot be priced.
    """
    analysis = Analysis(graph)
    real = RooflineModel(device)
    # The same kernels without launch overhead, and without idle units in the last wave of tiles.
    filled = structs.replace(device, kernel_launch_s=0.0, num_units=1)
    models = real, RooflineModel(filled, real.efficiency.without_fixed_times())
    seen: set[int] = set()
    found = []
    for layer in graph.blocks if layers is None else layers:
        ops = [op for op in graph.block_ops(layer) if not _fixed(graph, op)]
        if ops:
            found.append(_layer(analysis, layer, ops, models, seen))
    return tuple(found)


def _fixed(graph: Graph, op: Op) -> bool:
    return all(o is None or graph.values[o].fixed for o in op.outputs)


def _layer(
    analysis: Analysis,
    layer: Block,
    ops: Sequence[Op],
    models: tuple[RooflineModel, RooflineModel],
    seen: set[int],
) -> LayerTimes:
    values = analysis.graph.values
    calls = [whole_call(analysis, op) for op in ops]
    real, filled = ([model.estimate(call) for call in calls] for model in models)
    forward_s = sum(e.forward_s for e in real)
    input_s = sum(e.input_grad_s for e in real)
    weight_s = sum(e.weight_grad_s for e in real)
    trained = {
        i
        for op in ops
        for i in op.inputs
        if values[i].kind is ValueKind.PARAMETER and values[i].differentiable
    }
    own = trained - seen
    seen |= trained
    return LayerTimes(
        name=layer.name,
        forward_s=forward_s,
        input_grad_s=input_s,
        weight_grad_s=weight_s,
        gradient_bytes=sum(values[i].reduced_bytes for i in own),
        activation_bytes=_activation_bytes(analysis, ops, calls),
        boundary_bytes=_boundary_bytes(analysis, layer.stop),
        forward_share=_share(sum(e.forward_s for e in filled), forward_s),
        input_grad_share=_share(sum(e.input_grad_s for e in filled), input_s),
        weight_grad_share=_share(sum(e.weight_grad_s for e in filled), weight_s),
    )


def _share(filled_s: float, real_s: float) -> float:
    return min(filled_s / real_s, 1.0) if real_s else 0.0


def _activation_bytes(analysis: Analysis, ops: Sequence[Op], calls: Sequence[OpCall]) -> int:
    """Bytes of the outputs that a gradient flows through, without views, which own no memory."""
    values = analysis.graph.values
    return sum(
        values[o].size_bytes
        for op, call in zip(ops, calls)
        if work(call).family is not Family.VIEW
        for o in op.outputs
        if o is not None and values[o].differentiable
    )


def _boundary_bytes(analysis: Analysis, stop: int) -> int:
    """Bytes of values that ops before ``stop`` compute and later ones read."""
    values = analysis.graph.values
    return sum(
        values[value].size_bytes
        for value, (producer, _) in analysis.producers.items()
        if producer < stop
        and not values[value].fixed
        and any(user >= stop for user, _ in analysis.consumers.get(value, ()))
    )


def layer_durations(
    layers: Sequence[LayerTimes], communication: CommunicationModel | None = None
) -> Durations:
    """Seconds of each layer's F, I and W; with ``communication`` also G and U.

    G is one all-reduce of the layer's gradients over all devices of the cluster. U is the update of
    fused AdamW at the device's memory bandwidth.
    """
    forward = tuple(layer.forward_s for layer in layers)
    inputs = tuple(layer.input_grad_s for layer in layers)
    weights = tuple(layer.weight_grad_s for layer in layers)
    if communication is None:
        return Durations(F=forward, I=inputs, W=weights)
    ranks = tuple(range(communication.cluster.num_devices))
    bandwidth = communication.cluster.device.memory_bandwidth_bytes_per_s
    return Durations(
        F=forward,
        I=inputs,
        W=weights,
        G=tuple(
            communication.estimate("all_reduce", layer.gradient_bytes, ranks).time_s
            for layer in layers
        ),
        U=tuple(FUSED_ADAMW.num_passes * layer.gradient_bytes / bandwidth for layer in layers),
    )


def layer_co_run(layers: Sequence[LayerTimes], interference: float = 0.0) -> CoRun:
    """The share of the device that each layer occupies, and the slowdown of co-running layers."""
    return CoRun(
        occupancy={
            Kind.F: tuple(layer.forward_share for layer in layers),
            Kind.I: tuple(layer.input_grad_share for layer in layers),
            Kind.W: tuple(layer.weight_grad_share for layer in layers),
        },
        interference=interference,
    )


def layer_links(
    layers: Sequence[LayerTimes], latency_s: float, bandwidth_bytes_per_s: float
) -> Links:
    """Equal links between all devices, with the messages between the layers."""
    return Links(
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        message_bytes=tuple(float(layer.boundary_bytes) for layer in layers),
    )


def layer_memory(layers: Sequence[LayerTimes]) -> Memory:
    """Activations, gradients, and weights with AdamW's state, by layer."""
    return Memory(
        activation_bytes=tuple(float(layer.activation_bytes) for layer in layers),
        gradient_bytes=tuple(float(layer.gradient_bytes) for layer in layers),
        weight_bytes=tuple(
            float(layer.gradient_bytes * (1 + FUSED_ADAMW.num_states)) for layer in layers
        ),
    )
