"""Cut a graph's ops into blocks: contiguous runs that are lowered and scheduled as one.

A block is a repeated unit of the model, a transformer layer or a residual unit: the deepest
element of a module list that holds at least `MIN_OPS` ops. What lies between such units (the
embedding, the head) forms blocks of its own, named after the modules they share. Ops that depend
on neither parameters nor inputs form the first block, ``fixed``, which runs once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from autopar.graph import Block, Op, Value

MIN_OPS = 5
FIXED = "fixed"
TOTALS = "totals"
"""The block of what means divide by, where there are micro-batches: see autopar.microbatches."""


def cut_into_blocks(ops: Sequence[Op], values: Sequence[Value]) -> tuple[Block, ...]:
    """Blocks that cover ``ops`` in order; fixed ops must come first."""
    counts: Counter[str] = Counter()
    for op in ops:
        counts.update(_units(op.module_path))
    keys = [_key(op, values, counts) for op in ops]
    runs = _runs(keys)
    names: Counter[str] = Counter()
    blocks = []
    for index, (key, start, stop) in enumerate(runs):
        name = key or _shared_name([op.module_path for op in ops[start:stop]])
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        blocks.append(Block(index=index, name=name, start=start, stop=stop))
    return tuple(blocks)


def _units(path: str) -> list[str]:
    """Prefixes of a module path that are elements of a list: ``a.layers.3`` of ``a.layers.3.b``."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _key(op: Op, values: Sequence[Value], counts: Counter[str]) -> str:
    if all(o is None or values[o].fixed for o in op.outputs):
        return FIXED
    for unit in reversed(_units(op.module_path)):
        if counts[unit] >= MIN_OPS:
            return unit
    return ""


def _runs(keys: Sequence[str]) -> list[tuple[str, int, int]]:
    runs: list[tuple[str, int, int]] = []
    for position, key in enumerate(keys):
        if runs and runs[-1][0] == key:
            runs[-1] = (key, runs[-1][1], position + 1)
        else:
            runs.append((key, position, position + 1))
    return runs


def _shared_name(paths: Sequence[str]) -> str:
    """The deepest module that holds all of ``paths``, or the outermost names among them."""
    parts = [p.split(".") for p in paths if p]
    if not parts:
        return "model"
    shared = []
    for level in zip(*parts):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    if shared:
        return ".".join(shared)
    tops = list(dict.fromkeys(re.split(r"\.", p, maxsplit=1)[0] for p in paths if p))
    return "+".join(tops[:3])
