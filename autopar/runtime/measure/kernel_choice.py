"""The choice between compiled blocks and blocks that run op by op.

In: a plan, its program and what the user asks for. Out: the plan with the graphs of each distinct
block that are compiled: all that have regions, or none, or those measured to be faster.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from autopar.base.errors import InputError
from autopar.base.spelling import did_you_mean
from autopar.lowering.regions import blocks_by_kernel, compilable
from autopar.lowering.types import RankProgram
from autopar.plans.document import Plan
from autopar.plans.parts import KernelPlan


class Kernels(StrEnum):
    """How the graphs of blocks run."""

    EAGER = "eager"
    COMPILED = "compiled"


def check_kernels(kernels: Any) -> None:
    """Raise InputError for what is no way to run blocks."""
    known = [each.value for each in Kernels]
    if kernels is not None and kernels not in known:
        hint = did_you_mean(kernels, known) if isinstance(kernels, str) else ""
        raise InputError(f"kernels is {kernels!r}; it must be one of {', '.join(known)}{hint}")


def with_kernels(plan: Plan, program: RankProgram, kernels: str | None) -> Plan:
    """The plan with the compiled graphs of its blocks; by default none."""
    if kernels is None or kernels == Kernels.EAGER:
        return plan
    phases = compilable(program)
    found = []
    for blocks in blocks_by_kernel(program).values():
        names = tuple(block.name for block in blocks if block.name in phases)
        if names:
            found.append(KernelPlan(blocks=names, compiled=phases[names[0]]))
    return msgspec.structs.replace(plan, kernels=tuple(found))
