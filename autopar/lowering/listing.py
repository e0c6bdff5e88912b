"""Programs as text, and what they communicate.

In: a lowered program. Out: lines that a person reads, or one entry a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from autopar.collectives import COLLECTIVES, RAW_OPS
from autopar.lowering.differentiate import Kernel
from autopar.placement import format_placements

if TYPE_CHECKING:
    from autopar.lowering.pipeline import Pipeline
    from autopar.lowering.program import RankProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective: ``phase`` F (forward), I, W, or G (gradient of a parameter)."""

    phase: str
    where: str
    kind: str
    axes: str
    size_bytes: int


def graphs_of(kernel: Kernel) -> Iterator[tuple[str, fx.GraphModule]]:
    yield "F", kernel.forward
    if kernel.backward_input is not None:
        yield "I", kernel.backward_input
    if kernel.backward_weight is not None:
        yield "W", kernel.backward_weight


def collective_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in COLLECTIVES:
            yield node


def collectives_of(program: RankProgram) -> Iterator[CollectiveCall]:
    def of(module: fx.GraphModule, phase: str, where: str) -> Iterator[CollectiveCall]:
        for node in collective_nodes(module):
            source: Any = node.args[0]
            largest = max((node.meta["val"], source.meta["val"]), key=Tensor.numel)
            yield CollectiveCall(
                phase=phase,
                where=where,
                kind=str(node.target).split(".")[1],
                axes=str(node.args[1]),
                size_bytes=largest.numel() * largest.element_size(),
            )

    for parameter in program.parameters:
        if parameter.kernel is not None:
            yield from of(program.kernels[parameter.kernel].forward, "F", parameter.name)
    for block in program.blocks:
        yield from of(program.kernels[block.kernel].forward, "F", block.name)
    for block in reversed(program.blocks):
        for phase, module in graphs_of(program.kernels[block.kernel]):
            if phase != "F":
                yield from of(module, phase, block.name)
    for parameter in reversed(program.parameters):
        if parameter.kernel is not None and parameter.trainable:
            backward = program.kernels[parameter.kernel].backward_input
            if backward is not None:
                yield from of(backward, "G", parameter.name)


def format_program(program: RankProgram) -> str:
    """The program as text: parameters, blocks, then the distinct kernels' graphs."""
    lines = [f"program on mesh {program.mesh} ({program.device_type})", "", "parameters"]
    for p in program.parameters:
        via = "" if p.kernel is None else f"  by kernel {p.kernel}"
        lines.append(
            f"  {p.name} {list(p.shape)}: stored {format_placements(p.stored)}, "
            f"used {format_placements(p.used)}{via}"
        )
    stages = program.pipeline.stage_of_block
    lines += ["", "blocks"]
    lines += [
        f"  {i} {b.name}: kernel {b.kernel}" + (f", stage {s}" if s > 0 else "")
        for i, (b, s) in enumerate(zip(program.blocks, stages))
    ]
    if program.pipeline.shape.num_stages > 1:
        lines += ["", *_pipeline_lines(program.pipeline)]
    for number, kernel in enumerate(program.kernels):
        for phase, module in graphs_of(kernel):
            lines += ["", f"kernel {number} {phase}"]
            lines += [f"  {line}" for line in format_graph(module)]
    return "\n".join(lines)


def _pipeline_lines(pipeline: Pipeline) -> list[str]:
    lines = ["pipeline"]
    for stage, boundary in enumerate(pipeline.boundaries):
        sent = ", ".join(f"{str(m.dtype)[6:]}{list(m.shape)}" for m in boundary.metas)
        back = len(boundary.gradients)
        lines.append(f"  stage {stage} to {stage + 1}: {sent or 'nothing'}; {back} gradients back")
    return lines + [f"  {line}" for line in str(pipeline.schedule).splitlines()]


def format_graph(module: fx.GraphModule) -> list[str]:
    """One line per node: name, operator, arguments and local shape."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_shape(node)}")
        elif node.op == "output":
            lines.append("return " + ", ".join(str(a) for a in node.args[0]))
        else:
            lines.append(f"{node.name}: {_shape(node)} = {operator_name(node)}({_arguments(node)})")
    return lines


def operator_name(node: fx.Node) -> str:
    name = str(node.target)
    if node.target in RAW_OPS:
        return name.removesuffix(".default")
    return {"<built-in function getitem>": "getitem"}.get(name, name.removesuffix(".default"))


def _arguments(node: fx.Node) -> str:
    parts = [_argument(a) for a in node.args]
    parts += [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return ", ".join(parts)


def _argument(argument: Any) -> str:
    return repr(argument) if isinstance(argument, str) else str(argument)


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "tuple"
