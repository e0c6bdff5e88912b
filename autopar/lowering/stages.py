"""Pipeline stages: the contiguous blocks of a graph that form each stage.

In: a graph and the places to cut it. Out: a program whose stages a schedule runs. A forward pass
that is captured separately gets its stages from the devices that hold the parameters in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.base.errors import InputError, PlanError
from autopar.ir.block_names import FIXED, TOTALS, lies_in
from autopar.ir.graph import Block, Graph, Op, ValueKind
from autopar.ir.stages import Stages
from autopar.lowering.pipeline import forward_schedule, with_pipeline
from autopar.lowering.program import lower
from autopar.lowering.types import RankProgram
from autopar.sharding.strategy import Strategy


def staged_blocks(graph: Graph) -> tuple[Block, ...]:
    """The blocks that a stage can begin at."""
    return tuple(block for block in graph.blocks if block.name not in (FIXED, TOTALS))


def stage_of_blocks(stages: Stages, graph: Graph) -> dict[str, int]:
    """The stage of each block by name; fixed blocks and totals have none.

    Raises PlanError where the graph has no such blocks in this order.
    """
    return stages.of([block.name for block in staged_blocks(graph)])


def names_in_other_graph(graph: Graph, other: Graph) -> dict[str, str]:
    """The name in the graph of another call for each block of ``graph`` that a stage can begin at.

    A block of another name begins where the same parameter is read first; the first block is the
    first one. Blocks that have no counterpart are left out.
    """
    theirs = {block.name: _first_parameter(other, block.start) for block in staged_blocks(other)}
    found = {}
    for place, block in enumerate(staged_blocks(graph)):
        first = _first_parameter(graph, block.start)
        alike = (name for name, read in theirs.items() if place == 0 or read == first)
        name = block.name if place and block.name in theirs else next(alike, None)
        if name is not None:
            found[block.name] = name
    return found


def _first_parameter(graph: Graph, start: int) -> str | None:
    """The name of the first parameter that ops from ``start`` on read."""
    read = (graph.values[i] for op in graph.ops[start:] for i in op.inputs)
    return next((v.target or v.name for v in read if v.kind is ValueKind.PARAMETER), None)


def stages_from_cuts(graph: Graph, cuts: Sequence[str]) -> Stages:
    """Stages that begin at the first block and at the blocks with these names.

    A name may also be that of a module: it stands for the block that begins with the module or, if
    there is none, for the first block inside it. Raises InputError.
    """
    blocks = staged_blocks(graph)
    firsts = [blocks[0].name]
    for cut in cuts:
        named = [block for block in blocks if block.name == cut]
        found = named or [block for block in blocks if _is_of(graph, block, cut)]
        if not found:
            raise InputError(
                f"cuts names {cut!r}, {_why_not(graph, cut)}; a stage can begin at "
                + (", ".join(repr(b.name) for b in blocks[1:]) or "none: the model is one block")
            )
        firsts.append(found[0].name)
    stages = Stages(first_blocks=tuple(firsts))
    try:
        stage_of_blocks(stages, graph)
    except PlanError as error:
        raise InputError(f"cuts={list(cuts)!r}: {error}") from error
    return stages


def cuts_within_blocks(graph: Graph, cuts: Sequence[str]) -> tuple[str, ...]:
    """The ``cuts`` that are modules which begin in the middle of a block."""
    blocks = staged_blocks(graph)
    return tuple(
        cut
        for cut in dict.fromkeys(cuts)
        if _first_op(graph, cut) is not None
        if not any(block.name == cut or _is_of(graph, block, cut) for block in blocks)
    )


def _is_of(graph: Graph, block: Block, module: str) -> bool:
    """Whether the block begins where ``module`` does, or lies inside it.

    Ops that belong directly to an enclosing module do not count.
    """
    paths = [
        (op.index, op.module_path)
        for op in graph.block_ops(block)
        if op.module_path == module or not lies_in(module, op.module_path)
    ]
    if not paths or not lies_in(paths[0][1], module):
        return False
    return paths[0][0] == _first_op(graph, module) or all(lies_in(p, module) for _, p in paths)


def _first_op(graph: Graph, module: str) -> int | None:
    """The first op of ``module`` that a stage computes."""
    staged = (op for block in staged_blocks(graph) for op in graph.block_ops(block))
    return next((op.index for op in staged if lies_in(op.module_path, module)), None)


def _why_not(graph: Graph, module: str) -> str:
    first = _first_op(graph, module)
    if first is None:
        return "which is no block, and no module that a stage computes"
    name = next(b.name for b in staged_blocks(graph) if b.start <= first < b.stop)
    return f"a module that begins in the middle of block {name!r}, and stages begin where blocks do"


def lower_staged_forward(strategy: Strategy, training: RankProgram) -> RankProgram:
    """The forward program of a strategy, with each op on a device that holds its operands.

    ``training`` gives the devices of the parameters and of the buffers that training updates.
    """
    kind = training.device_type
    if training.pipeline.num_devices == 1:
        return lower(strategy, device_type=kind, training=False)
    blocks, stage_of, placement = _held_stages(strategy.graph, _homes(training))
    program = lower(strategy, device_type=kind, training=False, blocks=blocks)
    return with_pipeline(
        program, stage_of, forward_schedule(placement, training.pipeline.num_devices)
    )


def _homes(training: RankProgram) -> dict[str, frozenset[int]]:
    """The devices that hold each parameter, or the current value of each buffer, by name."""
    homes = {p.name: frozenset(p.devices) for p in training.parameters}
    for buffer in training.buffers:
        if buffer.following is not None:
            homes[buffer.name] = frozenset({buffer.device})
    return homes


def _held_stages(
    graph: Graph, homes: Mapping[str, frozenset[int]]
) -> tuple[tuple[Block, ...], dict[str, int], tuple[int, ...]]:
    """Blocks cut where operands lie on another device; the stage of each; the stages' devices."""
    blocks: list[Block] = []
    stage_of: dict[str, int] = {}
    placement: list[int] = []
    for block in graph.blocks:
        if block.name == FIXED:
            blocks.append(replace(block, index=len(blocks)))
            continue
        start = block.start
        for op in graph.block_ops(block):
            device = _device_for(graph, op, homes, placement[-1] if placement else 0)
            if placement and device == placement[-1]:
                continue
            if start < op.index:
                _add(blocks, stage_of, block, start, op.index, len(placement) - 1)
                start = op.index
            placement.append(device)
        _add(blocks, stage_of, block, start, block.stop, len(placement) - 1)
    return tuple(blocks), stage_of, tuple(placement)


def _add(
    blocks: list[Block], stage_of: dict[str, int], block: Block, start: int, stop: int, stage: int
) -> None:
    name = block.name if block.name not in stage_of else f"{block.name} on stage {stage}"
    stage_of[name] = stage
    blocks.append(Block(index=len(blocks), name=name, start=start, stop=stop))


def _device_for(graph: Graph, op: Op, homes: Mapping[str, frozenset[int]], present: int) -> int:
    """A device that holds all operands of an op: the current one, if it does."""
    named = [graph.values[i].target or graph.values[i].name for i in op.inputs]
    held = [homes[name] for name in named if name in homes]
    if not held or all(present in devices for devices in held):
        return present
    common = frozenset.intersection(*held)
    if not common:
        raise PlanError(
            f"op {op.name!r} reads {named}, which no device of the pipeline holds together in "
            "training; cut the stages so that one stage uses all of them"
        )
    return min(common)
