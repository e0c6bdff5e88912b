"""Blocks: contiguous runs of ops that are lowered and scheduled as one unit.

A block is a repeated unit of the model, a transformer layer or a residual unit: the deepest element
of a module list that holds at least `MIN_OPS` ops, and at most four fifths of the model's. Ops
between such units (the embedding, the head) form blocks of their own, named after the module that
contains them all. Ops that depend on neither parameters nor inputs form the first block, ``fixed``,
which runs once.

A run between two units that holds more than a quarter of the model's ops (its layers are plain
attributes, or list elements of few ops each) is cut in front of each child module that reads
parameters, and a child with more than a quarter of the ops in front of its own children.
Activations and ops of the enclosing module (a residual sum) stay with the preceding child.
Neighbours are merged until they have `MIN_PART_OPS` ops, or an eighth of the model's if that is
fewer, and named after all their modules: ``norm+head``, or ``layers.0..layers.4`` for more than
three.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.block_names import FIXED, lies_in
from autopar.ir.graph import Block, Op, Value, ValueKind

MIN_OPS = 5
MIN_PART_OPS = 3
"""The block that computes the divisors of means: see `autopar.sharding.microbatches`."""


def cut_into_blocks(ops: Sequence[Op], values: Sequence[Value]) -> tuple[Block, ...]:
    """Cut ``ops`` into blocks, in order; fixed ops must come first."""
    fixed = [all(o is None or values[o].fixed for o in op.outputs) for op in ops]
    num_ops = fixed.count(False)
    units = _large_units(ops[-num_ops:] if num_ops else (), num_ops)
    keys = [FIXED if is_fixed else _key(op, units) for op, is_fixed in zip(ops, fixed)]
    names: Counter[str] = Counter()
    blocks: list[Block] = []
    for key, run in itertools.groupby(ops, lambda op: keys[op.index]):
        run_ops = list(run)
        named = [(key, len(run_ops))] if key else _between_units(run_ops, values, num_ops)
        for name, size in named:
            names[name] += 1
            if names[name] > 1:
                name = f"{name}#{names[name]}"
            start = blocks[-1].stop if blocks else 0
            blocks.append(Block(index=len(blocks), name=name, start=start, stop=start + size))
    return tuple(blocks)


def _large_units(ops: Sequence[Op], num_ops: int) -> set[str]:
    counts: Counter[str] = Counter()
    for op in ops:
        counts.update(_units(op.module_path))
    return {unit for unit, count in counts.items() if MIN_OPS <= count <= num_ops * 4 / 5}


def _units(path: str) -> list[str]:
    """Prefixes of a module path that are list elements: ``a.layers.3`` for ``a.layers.3.b``."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _key(op: Op, units: set[str]) -> str:
    return next((unit for unit in reversed(_units(op.module_path)) if unit in units), "")


# --- ops between units --------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Consecutive ops that stay together: their number and modules."""

    num_ops: int
    modules: tuple[str, ...]

    def followed_by(self, other: _Part) -> _Part:
        return _Part(num_ops=self.num_ops + other.num_ops, modules=self.modules + other.modules)


def _between_units(
    run: Sequence[Op], values: Sequence[Value], num_ops: int
) -> list[tuple[str, int]]:
    """Names and sizes of the blocks of a run outside of all units; ``num_ops`` is the model's."""
    parts: list[_Part] = []
    if len(run) > num_ops / 4:
        least = max(1, min(MIN_PART_OPS, num_ops // 8))
        parts = _put_together(_parts(run, values, "", num_ops / 4), least)
    if len(parts) < 2:
        return [(_shared_name([op.module_path for op in run]), len(run))]
    return [(_joined(part.modules) or "model", part.num_ops) for part in parts]


def _parts(run: Sequence[Op], values: Sequence[Value], module: str, most: float) -> Iterator[_Part]:
    """``run`` cut at the children of ``module``; a child of over ``most`` ops is cut at its own."""
    children = dict(_children_with_parameters(run, values, module))
    first = run[0].index
    for start, stop in itertools.pairwise(sorted({first, *children, first + len(run)})):
        part, child = run[start - first : stop - first], children.get(start)
        if child and sum(lies_in(op.module_path, child) for op in part) > most:
            yield from _parts(part, values, child, most)
        else:
            labels = dict.fromkeys(_label(op.module_path, module) for op in part)
            modules = tuple(label for label in labels if label) or (module,) * bool(module)
            yield _Part(num_ops=len(part), modules=modules)


def _children_with_parameters(
    run: Sequence[Op], values: Sequence[Value], module: str
) -> Iterator[tuple[int, str]]:
    """First op and name of each call of a child of ``module`` that reads parameters.

    Ops of a child that follow other modules' ops continue its last call, unless they start with the
    submodule that call started with.
    """
    calls: list[tuple[str, list[Op]]] = []
    for child, group in itertools.groupby(run, lambda op: _child(op.module_path, module)):
        ops = list(group)
        if calls and child == calls[-1][0] and ops[0].module_path != calls[-1][1][0].module_path:
            calls[-1][1].extend(ops)
        elif child:
            calls.append((child, ops))
    for child, ops in calls:
        if any(values[i].kind is ValueKind.PARAMETER for op in ops for i in op.inputs):
            yield ops[0].index, child


def _child(path: str, module: str) -> str:
    """The child of ``module`` that is or contains ``path``; empty if there is none."""
    if path == module or not lies_in(path, module):
        return ""
    depth = module.count(".") + 2 if module else 1
    return ".".join(path.split(".")[:depth])


def _label(path: str, module: str) -> str:
    """The module that names an op at ``path`` in a part of ``module``; empty if it encloses it."""
    return _child(path, module) or ("" if lies_in(module, path) else path)


def _put_together(parts: Iterable[_Part], least: int) -> list[_Part]:
    """Neighbours merged until each has ``least`` ops; a small last part joins the one before."""
    joined: list[_Part] = []
    for part in parts:
        if joined and joined[-1].num_ops < least:
            part = joined.pop().followed_by(part)
        joined.append(part)
    if len(joined) > 1 and joined[-1].num_ops < least:
        last = joined.pop()
        joined.append(joined.pop().followed_by(last))
    return joined


def _shared_name(paths: Sequence[str]) -> str:
    """The deepest module that contains all of ``paths``, else their outermost modules."""
    parts = [p.split(".") for p in paths if p]
    if not parts:
        return "model"
    shared = []
    for level in zip(*parts):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or _joined([part[0] for part in parts])


def _joined(names: Iterable[str]) -> str:
    """The names joined: all of up to three, else the first and the last."""
    distinct = list(dict.fromkeys(names))
    return "+".join(distinct) if len(distinct) < 4 else f"{distinct[0]}..{distinct[-1]}"
