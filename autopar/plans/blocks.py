"""The strategy by block: repeated blocks folded to one row.

In: a plan. Out: groups of blocks that are parallelized alike, with their bytes and times.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.ir.block_names import FIXED
from autopar.plans.parallelism import DOMINANT, Shares, name_along, shares_of
from autopar.plans.parts import ModulePlan, PlanFields

_NUMBER = re.compile(r"\d+")
MAX_WORDS = 3
ITSELF = "the model itself"
MOST_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """Blocks that are parallelized alike; bytes and seconds are the sums of all of them.

    ``recomputed_s`` is what their backward passes recompute.
    """

    names: tuple[str, ...]
    shares: Shares
    splits: tuple[str, ...]
    parameters: tuple[str, ...]
    modules: tuple[ModulePlan, ...]
    recomputed_s: float

    @property
    def label(self) -> str:
        """``layers.0-31 (32x)``."""
        return folded(self.names)

    def strategy(self, axis_names: Sequence[str]) -> str:
        """``TP``, or by axis ``FSDP x TP``."""
        named = [name_along(each, short=True) for each in self.shares[: len(axis_names)]]
        kinds = [name for name in named if name]
        return " x ".join(kinds[:1] if len(set(kinds)) == 1 else kinds)

    def seconds(self, field: str) -> float:
        return float(sum(getattr(module, field) for module in self.modules))

    @property
    def backward_s(self) -> float:
        """Seconds of the backward passes, recomputation included."""
        return self.seconds("backward_s") + self.recomputed_s

    def size_bytes(self, plan: PlanFields) -> int:
        return sum(plan.uses[name].size_bytes for name in self.parameters)


def block_groups(plan: PlanFields) -> list[BlockGroup]:
    """The groups of a plan's blocks, in graph order; blocks without time or parameters left out."""
    owned, recomputation = parameters_of_blocks(plan), plan.recomputed
    num = plan.schedule.num_microbatches * plan.update.update.num_passes
    modules: defaultdict[str, list[ModulePlan]] = defaultdict(list)
    for module in plan.modules:
        modules[module.block].append(module)
    groups: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for block, inside in modules.items():
        if not owned[block] and not any(m.forward_s or m.backward_s for m in inside):
            continue
        shares = shares_of(plan, owned[block])
        looks = tuple(name_along(each) for each in shares)
        size = sum(plan.uses[name].size_bytes for name in owned[block])
        groups[pattern_of(block), looks, _splits(plan, inside), size].append(block)
    return [
        BlockGroup(
            names=tuple(names),
            shares=shares_of(plan, [p for name in names for p in owned[name]]),
            splits=_splits(plan, [m for name in names for m in modules[name]]),
            parameters=tuple(p for name in names for p in owned[name]),
            modules=tuple(m for name in names for m in modules[name]),
            recomputed_s=num * sum(recomputation.time_s(name) for name in names),
        )
        for names in groups.values()
    ]


def parameters_of_blocks(plan: PlanFields) -> defaultdict[str, list[str]]:
    """The parameters that belong to each block: to the first in which their module computes.

    A module that never does belongs to the first block that has it.
    """
    block_of: dict[str, str] = {}
    for module in sorted(plan.modules, key=lambda each: not (each.forward_s or each.backward_s)):
        block_of.setdefault(module.name, module.block)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in plan.parameters:
        found[block_of.get(name.rpartition(".")[0], "")].append(name)
    return found


def _splits(plan: PlanFields, modules: Sequence[ModulePlan]) -> tuple[str, ...]:
    """How most of the computation is split along each axis: one word, or a few."""
    found = []
    for axis in range(len(plan.mesh.axis_names)):
        words: Counter[str] = Counter()
        for module in modules:
            seconds = module.forward_s + module.backward_s
            words[module.splits.split()[axis]] += seconds  # type: ignore[assignment]
        found.append(_words(words))
    return tuple(found)


def _words(time_s: Counter[str]) -> str:
    total_s, named = time_s.total(), time_s.most_common()
    if not total_s:
        return "-"
    if named[0][1] >= DOMINANT * total_s:
        return named[0][0]
    some = [word for word, seconds in named if seconds > 0.02 * total_s][:MAX_WORDS]
    return "/".join("whole" if word == "-" else word for word in some)


def constant_ops(plan: PlanFields) -> set[str]:
    """The ops that depend on neither inputs nor parameters: they are computed once, in the first
    step, and have no price."""
    return {op for module in plan.modules if module.block == FIXED for op in module.ops}


def module_labels(modules: Sequence[ModulePlan]) -> list[str]:
    """A label for each of these modules, with its block where another has the same name."""
    counts = Counter(module.name for module in modules)
    return [label_of([module], with_blocks=counts[module.name] > 1) for module in modules]


def label_of(modules: Sequence[ModulePlan], *, with_blocks: bool) -> str:
    """One label for modules that are alike, with their blocks if asked for.

    The ops that the model itself computes, outside of all modules, have no name: their label is
    ``the model itself, in block head``.
    """
    names = folded(list(dict.fromkeys(module.name or ITSELF for module in modules)))
    blocks = folded(list(dict.fromkeys(module.block for module in modules)))
    return f"{names}, in block {blocks}" if with_blocks or not modules[0].name else names


def stages_of_blocks(plan: PlanFields) -> dict[str, int]:
    """The pipeline stage of every block."""
    starts = {name: number for number, name in enumerate(plan.schedule.first_blocks)}
    found: dict[str, int] = {}
    stage = 0
    for module in plan.modules:
        stage = found[module.block] = starts.get(module.block, stage)
    return found


def pattern_of(name: str) -> str:
    """The name with a ``#`` in place of each number: the same for repeated layers."""
    return _NUMBER.sub("#", name)


def numbers_in(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def runs_of(names: Sequence[str]) -> list[str]:
    """The names with runs of repeated layers folded: ``head``, ``h.1-7 (7x)``."""
    return [folded(list(run)) for _, run in groupby(names, pattern_of)]


def folded(names: Sequence[str]) -> str:
    """One label for many names that differ in one number: ``h.0-11 (12x)``, ``h.0-4 (3x, every
    2nd)``, ``h.0,4-6 (4x)``; with more than `MOST_RUNS` runs of numbers ``h.0..11 (6x)``."""
    if len(names) == 1:
        return names[0]
    numbers = [numbers_in(name) for name in names]
    moving = [i for i, each in enumerate(zip(*numbers)) if len(set(each)) > 1]
    count = f"{len(names)}x"
    if len({pattern_of(name) for name in names}) > 1 or len(moving) != 1:
        return f"{names[0]}..{names[-1]} ({count})"
    (place,) = moving
    found = [each[place] for each in numbers]
    text = f"{found[0]}..{found[-1]}"
    stride = found[1] - found[0]
    if stride > 1 and len(found) > 2 and found == list(range(found[0], found[-1] + 1, stride)):
        text, count = f"{found[0]}-{found[-1]}", f"{count}, every {_ordinal(stride)}"
    elif found == sorted(found):
        ranges = _ranges(found)
        text = ",".join(ranges) if len(ranges) <= MOST_RUNS else text
    parts = iter(range(len(numbers[0])))
    name = _NUMBER.sub(lambda m: text if next(parts) == place else m[0], names[0])
    return f"{name} ({count})"


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers as runs of consecutive ones: ``0``, ``4-6``."""
    runs = groupby(enumerate(numbers), lambda each: each[1] - each[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(found) for _, found in runs)]
    return [str(first) if first == last else f"{first}-{last}" for first, last in ends]


def _ordinal(number: int) -> str:
    """``2nd``, ``3rd``, ``11th``."""
    is_teen = number // 10 % 10 == 1
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
