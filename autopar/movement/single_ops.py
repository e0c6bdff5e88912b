"""Blocks of one op each, whose programs have the tensor lifetimes of single layers."""

from __future__ import annotations

from autopar.cost_models.op_work import work
from autopar.cost_models.work import Family
from autopar.ir.block_names import FIXED
from autopar.ir.graph import Block, Op
from autopar.pricing.utilisation import whole_call
from autopar.sharding.strategy import Analysis

_DRAWS = ("aten.bernoulli.p", "aten.bernoulli.default")


def single_op_blocks(analysis: Analysis) -> tuple[Block, ...]:
    """Blocks of one op each, with what cannot start one; for `lower(strategy, blocks=...)`.

    Views stay with the tensor that they show. So does a draw that is written over a tensor: it
    would be an op of an input with a gradient, which torch does not differentiate.
    """
    graph = analysis.graph
    blocks = [block for block in graph.blocks if block.name == FIXED]
    starts = [
        op.index
        for block in graph.blocks
        if block.name != FIXED
        for position, op in enumerate(graph.block_ops(block))
        if not position or not (_is_view(analysis, op) or op.target_name in _DRAWS)
    ]
    for start, stop in zip(starts, [*starts[1:], len(graph.ops)]):
        op = graph.ops[start]
        name = f"{op.module_path or 'model'}:{op.name}"
        blocks.append(Block(index=len(blocks), name=name, start=start, stop=stop))
    return tuple(blocks)


def _is_view(analysis: Analysis, op: Op) -> bool:
    return work(whole_call(analysis, op)).family is Family.VIEW
