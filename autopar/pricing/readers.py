"""The blocks of a graph that read each parameter."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.sharding.strategy import Analysis


def block_of_ops(graph: Graph) -> dict[int, str]:
    """The name of the block of each op."""
    return {op.index: block.name for block in graph.blocks for op in graph.block_ops(block)}


def reading_blocks(analysis: Analysis) -> dict[int, tuple[str, ...]]:
    """The blocks that read each parameter, in the order of their ops."""
    block_of = block_of_ops(analysis.graph)
    return {
        parameter.index: tuple(
            block_of[op] for op, _ in analysis.consumers.get(parameter.index, ())
        )
        for parameter in analysis.graph.parameters
    }


def first_and_last_readers(analysis: Analysis) -> dict[int, tuple[int, int]]:
    """The numbers of the first and the last block that read each parameter."""
    numbers = {block.name: number for number, block in enumerate(analysis.graph.blocks)}
    reading = analysis.derived(reading_blocks)
    return {
        index: (numbers[blocks[0]], numbers[blocks[-1]])
        for index, blocks in reading.items()
        if blocks
    }
