"""The choice between compiled blocks and blocks that run op by op.

In: a plan, its program and what the user asks for. Out: the plan with the graphs of each distinct
block that are compiled: all that have regions, or none, or those measured to be faster. A graph's
price is the sum over its regions; what is between them is the same in both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.cost_models.store import RegionTime
from autopar.lowering.regions import blocks_by_kernel, compilable, regions_of
from autopar.lowering.types import BlockProgram, Kernel, RankProgram, graphs_of
from autopar.plans.document import Plan
from autopar.plans.parts import KernelPlan
from autopar.runtime.measure.region_times import RegionCall, region_times

MARGIN = 0.03
"""A graph is compiled if it is faster by more than this; less is within the noise."""

GraphTimes = Mapping[str, RegionTime | str]


class Kernels(StrEnum):
    """How the graphs of blocks run."""

    EAGER = "eager"
    COMPILED = "compiled"
    AUTO = "auto"


def check_kernels(kernels: Any) -> None:
    """Raise InputError for what is no way to run blocks."""
    known = [each.value for each in Kernels]
    if kernels is not None and kernels not in known:
        hint = did_you_mean(kernels, known) if isinstance(kernels, str) else ""
        raise InputError(f"kernels is {kernels!r}; it must be one of {', '.join(known)}{hint}")


def with_kernels(
    plan: Plan,
    program: RankProgram,
    kernels: str | None,
    path: Path,
    *,
    limit_s: float,
    start_timeout_s: float,
    progress: Callable[[str], None],
) -> Plan:
    """The plan with the compiled graphs of its blocks; by default none.

    ``path`` is that of the store of measured times, and ``limit_s`` how long new measurements may
    begin; 0 if there is no device to measure on. What is not measured runs op by op, and the plan
    says why.
    """
    if kernels is None or kernels == Kernels.EAGER:
        return plan
    groups = _groups(program)
    if kernels == Kernels.COMPILED:
        found = [KernelPlan(blocks=names, compiled=phases) for names, _, phases in groups]
        return msgspec.structs.replace(plan, kernels=tuple(found))
    graphs = [
        {phase: calls for phase, calls in _calls(kernel, program).items() if phase in phases}
        for _, kernel, phases in groups
    ]
    if limit_s > 0:
        times: GraphTimes = region_times(
            [call for calls in graphs for each in calls.values() for call in each],
            plan.cluster.device, path, limit_s=limit_s, start_timeout_s=start_timeout_s,
            progress=progress,
        )  # fmt: skip
    else:
        reason = "not measured: no time limit, or no devices of the plan's kind here"
        times = {str(call): reason for c in graphs for each in c.values() for call in each}
    return msgspec.structs.replace(
        plan,
        kernels=tuple(_priced(names, calls, times) for (names, _, _), calls in zip(groups, graphs)),
    )


def _groups(
    program: RankProgram,
) -> list[tuple[tuple[str, ...], Kernel, tuple[Literal["F", "I", "W"], ...]]]:
    """Equal blocks that can be compiled, their kernel and its graphs; the most frequent first."""
    phases, found = compilable(program), []
    for number, blocks in blocks_by_kernel(program).items():
        names = _names(blocks, phases)
        if names:
            found.append((names, program.kernels[number], phases[names[0]]))
    return sorted(found, key=lambda group: -len(group[0]))


def _names(blocks: tuple[BlockProgram, ...], phases: dict[str, Any]) -> tuple[str, ...]:
    return tuple(block.name for block in blocks if block.name in phases)


def _calls(kernel: Kernel, program: RankProgram) -> dict[str, list[RegionCall]]:
    """The regions of each graph of a kernel."""
    on_cpu = program.device_type == "cpu"
    return {
        phase: [
            RegionCall(module=region.module(), operands=region.operands)
            for region in regions_of(module, on_cpu=on_cpu)
        ]
        for phase, module in graphs_of(kernel)
    }


def _priced(
    names: tuple[str, ...], calls: Mapping[Any, Sequence[RegionCall]], times: GraphTimes
) -> KernelPlan:
    """The faster way of each graph of equal blocks."""
    compiled: list[Any] = []
    eager_s: dict[str, float] = {}
    compiled_s: dict[str, float] = {}
    failures: dict[str, str] = {}
    for phase, regions in calls.items():
        found = [times[str(call)] for call in regions]
        why = [reason for reason in found if isinstance(reason, str)]
        if why:
            failures[phase] = why[0]
            continue
        known = [each for each in found if isinstance(each, RegionTime)]
        eager_s[phase] = sum(each.eager_s for each in known)
        compiled_s[phase] = sum(each.compiled_s for each in known)
        if compiled_s[phase] < (1 - MARGIN) * eager_s[phase]:
            compiled.append(phase)
    return KernelPlan(
        blocks=names, compiled=tuple(compiled), eager_s=eager_s, compiled_s=compiled_s,
        failures=failures,
    )  # fmt: skip
