"""Block cuts: blocks divided further, in front of modules inside them.

In: a graph, and names of modules. Out: the graph with a block for each of them, which a pipeline's
stage can begin at: ``layers.1`` divided at ``layers.1.mlp`` is the blocks ``layers.1``, which ends
there, and ``layers.1.mlp``, which is the rest. The ops and their order stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.base.errors import InputError
from autopar.ir.block_names import FIXED, TOTALS, lies_in
from autopar.ir.blocks import MIN_PART_OPS
from autopar.ir.graph import Block, Graph, ValueKind


def with_block_cuts(graph: Graph, modules: Sequence[str]) -> Graph:
    """``graph`` with its blocks divided in front of each of ``modules``.

    Raises InputError for a module that does not begin in the middle of the one block it runs in.
    """
    if not modules:
        return graph
    first_ops = {_place_of(graph, module): module for module in modules}
    blocks: list[Block] = []
    for block in graph.blocks:
        inside = [place for place in first_ops if block.start < place < block.stop]
        edges = [block.start, *sorted(inside), block.stop]
        for start, stop in itertools.pairwise(edges):
            name = first_ops[start] if start in inside else block.name
            blocks.append(Block(index=len(blocks), name=name, start=start, stop=stop))
    return replace(graph, blocks=tuple(blocks))


def _place_of(graph: Graph, module: str) -> int:
    """The op that a block divided in front of ``module`` would begin with; raises InputError."""
    running = [
        (block, op.index)
        for block in graph.blocks
        if block.name not in (FIXED, TOTALS)
        for op in graph.block_ops(block)
        if module and lies_in(op.module_path, module)
    ]
    names = list(dict.fromkeys(block.name for block, _ in running))
    if not running:
        raise _refused(module, "which is no module that a stage computes")
    if len(names) > 1:
        raise _refused(module, f"which runs in several blocks: {', '.join(map(repr, names))}")
    block, place = running[0]
    if place == block.start:
        raise _refused(module, f"where block {block.name!r} begins anyway")
    if module in {each.name for each in graph.blocks}:
        raise _refused(module, "which is also the name of a block that begins elsewhere")
    return place


def _refused(module: str, why: str) -> InputError:
    return InputError(
        f"a block cannot be cut in front of {module!r}, {why}; name a module that begins in the "
        'middle of one block, such as the second half of a layer: cuts=["layers.1.mlp"]'
    )


def narrow_cuts(graph: Graph) -> tuple[str, ...]:
    """The modules with parameters in front of which a block can be cut with no more crossing than
    at its ends: the second half of a transformer layer, after the residual sum.

    Each part has at least `MIN_PART_OPS` ops. A block that is no single module is not cut.
    """
    crossing = _crossing_bytes(graph)
    found: list[str] = []
    for block in graph.blocks:
        last = block.start
        most = max(crossing[block.start], crossing[block.stop])
        for place, module in _modules_within(graph, block):
            is_large = min(place - last, block.stop - place) >= MIN_PART_OPS
            if is_large and crossing[place] <= most and _is_cut(graph, module, place):
                found.append(module)
                last = place
    return tuple(found)


def _modules_within(graph: Graph, block: Block) -> Iterator[tuple[int, str]]:
    """Outermost modules that begin in the middle of ``block``, below the module it is named after,
    and read parameters; with their first ops."""
    ops = graph.block_ops(block)
    for before, op in itertools.pairwise(ops):
        parts = op.module_path.split(".")
        prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        begun = [each for each in prefixes if not lies_in(before.module_path, each)]
        if begun and begun[0] != block.name and lies_in(begun[0], block.name):
            reads = (i for o in ops if lies_in(o.module_path, begun[0]) for i in o.inputs)
            if any(graph.values[i].kind is ValueKind.PARAMETER for i in reads):
                yield op.index, begun[0]


def _is_cut(graph: Graph, module: str, place: int) -> bool:
    try:
        return _place_of(graph, module) == place
    except InputError:
        return False


def _crossing_bytes(graph: Graph) -> list[int]:
    """Bytes of the values computed before each op, or the end, and read from there on."""
    change = [0] * (len(graph.ops) + 1)
    consumers = graph.consumers()
    for value, (producer, _) in graph.producers().items():
        if value in consumers:
            last = max(op for op, _ in consumers[value])
            change[producer + 1] += graph.values[value].size_bytes
            change[last + 1] -= graph.values[value].size_bytes
    sizes, held = [], 0
    for each in change:
        held += each
        sizes.append(held)
    return sizes
