"""The alternatives that were considered, from the fastest, under the names that users know.

In: a plan. Out: rows with the time of a step, the ratio to the plan's and, where it was estimated,
the memory of a device.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.base.units import format_bytes, format_seconds
from autopar.plans.layout import Section
from autopar.plans.parallelism import ZERO12
from autopar.plans.parts import PlanFields
from autopar.plans.strategy_names import (
    DATA,
    HYBRID,
    MARKOV_CHAIN,
    MEGATRON,
    MEGATRON_SEQUENCE,
    NOT_EAGER,
    TENSOR,
    ZERO1,
    ZERO2,
    ZERO3,
)

USERS_NAMES: Mapping[str, str] = {
    DATA: "DDP",
    ZERO3: "FSDP (ZeRO-3)",
    HYBRID: "HSDP",
    TENSOR: "TP",
    MEGATRON: "Megatron TP",
    MEGATRON_SEQUENCE: "Megatron TP + SP",
    MARKOV_CHAIN: "MCMC (FlexFlow)",
}
ON_MESH = "another mesh"
NO_FIT = "does not fit"
SAME = "the same as this plan"
ESTIMATE = "as if all were kept at once, little workspace"
"""How the search estimates memory, which may be more than the count of one moment or less."""
MOST_TIED = 3
TIE = 0.005
"""Relative difference in time up to which two alternatives are called a tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A strategy that was considered; ``memory_bytes`` is None where it was not estimated.

    ``is_same``: by time and memory it is the plan itself, under the name of a known strategy.
    """

    name: str
    mesh: str
    time_s: float
    memory_bytes: int | None = None
    note: str = ""
    is_same: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether it trains on old weights, and so not as eager PyTorch does."""
        return self.note.startswith(NOT_EAGER)


def users_name(name: str) -> str:
    """``ZeRO-3 x Megatron`` as users know it: ``FSDP x Megatron TP``."""
    if name in USERS_NAMES:
        return USERS_NAMES[name]
    parts = (USERS_NAMES.get(part, part) for part in name.split(" x "))
    return " x ".join(part.partition(" (")[0] for part in parts)


def alternatives(plan: PlanFields) -> list[Alternative]:
    """All alternatives to the plan from the fastest; equal known strategies are one."""
    found: dict[tuple[object, ...], Alternative] = {}
    for each in _listed(plan):
        name = each.name if each.memory_bytes is None else ""
        key = (name, each.mesh, each.time_s, each.memory_bytes, each.note)
        found[key] = each if key not in found else replace(each, name=_both(found[key], each))
    return sorted(found.values(), key=lambda each: each.time_s)


def _both(first: Alternative, second: Alternative) -> str:
    """One name for two equal alternatives: ``ZeRO-1/2 x TP``."""
    if first.name.startswith(ZERO1) and second.name == first.name.replace(ZERO1, ZERO2):
        return first.name.replace(ZERO1, ZERO12)
    *others, last = first.name.split(", ")
    if last.startswith(ZERO1) and second.name == last.replace(ZERO1, ZERO2):
        return ", ".join((*others, last.replace(ZERO1, ZERO12)))
    return f"{first.name}, {second.name}"


def _listed(plan: PlanFields) -> list[Alternative]:
    search, fitting_bytes = plan.search, _fitting_bytes(plan)
    found = []
    known_ones = search.baselines if plan.cluster.num_devices > 1 else {}  # one device: all equal
    for name, known in known_ones.items():
        is_same = _is_plan(plan, known.time_s, known.memory_bytes)
        notes = [known.note, "" if known.memory_bytes <= fitting_bytes else NO_FIT]
        if name == MARKOV_CHAIN and notes[1]:
            notes = [NO_FIT]  # however long it was searched for
        found.append(
            Alternative(
                name=users_name(name), mesh=known.mesh, time_s=known.time_s,
                memory_bytes=known.memory_bytes,
                note="; ".join(filter(None, (SAME * is_same, *notes))),
                is_same=is_same,
            )
        )  # fmt: skip
    if not plan.is_pipeline:  # the others are no pipelines, and so times of other things
        found += _other_meshes(plan)
    step_s = plan.prediction.step_time_s
    pipelines = list(search.pipelines.items())
    chosen = next((i for i, (_, time_s) in enumerate(pipelines) if time_s == step_s), None)
    found += [
        Alternative(name=name, mesh="", time_s=time_s)
        for place, (name, time_s) in enumerate(pipelines)
        if place != chosen
    ]
    return found


def _fitting_bytes(plan: PlanFields) -> int:
    """The estimated memory up to which a known strategy is expected to fit."""
    usable, found = plan.cluster.usable_memory_bytes, plan.search.fitting_bytes
    return usable if found is None else min(usable, found)


def _is_plan(plan: PlanFields, time_s: float, memory_bytes: int) -> bool:
    """Whether a known strategy takes the time and the memory that the plan takes by the same
    estimate."""
    is_as_fast = math.isclose(time_s, plan.prediction.step_time_s, rel_tol=1e-5)
    return is_as_fast and math.isclose(memory_bytes, plan.search.estimated_bytes, rel_tol=1e-5)


def _other_meshes(plan: PlanFields) -> list[Alternative]:
    """The best on each other mesh; those of one time are one, as they are the same strategy, and
    those of the plan's time are the plan itself."""
    considered, meshes = plan.search.considered, defaultdict[str, list[str]](list)
    own = (str(plan.device_mesh), *_same_meshes(plan))
    for mesh, time_s in considered.items():
        if mesh not in own:
            meshes[f"{time_s:.5g}"].append(mesh)
    return [
        Alternative(
            name=ON_MESH,
            mesh=names[0] if len(names) == 1 else f"{names[0]}, {len(names) - 1} more",
            time_s=considered[names[0]],
            note="memory not limited",
        )
        for names in meshes.values()
    ]


def _same_meshes(plan: PlanFields) -> list[str]:
    """The other meshes whose best strategy takes the plan's time."""
    own, considered = str(plan.device_mesh), plan.search.considered
    own_times = considered.get(own, 0.0), plan.prediction.step_time_s
    same = {f"{time_s:.5g}" for time_s in own_times}
    return [m for m, time_s in considered.items() if m != own and f"{time_s:.5g}" in same]


def fastest_known(plan: PlanFields) -> Alternative | None:
    """The fastest known strategy that fits the memory by its estimate, to compare the plan with."""
    if plan.is_pipeline:
        without = {n: s for n, s in plan.search.pipelines.items() if n.startswith("no pipeline")}
        if not without:
            return None
        name = min(without, key=lambda each: without[each])
        return Alternative(name=name, mesh="", time_s=without[name])
    for each in alternatives(plan):
        size = each.memory_bytes
        if size is None or each.name == USERS_NAMES[MARKOV_CHAIN]:
            continue
        if size <= _fitting_bytes(plan):
            return each
    return None


def alternatives_section(plan: PlanFields, num_rows: int) -> Section:
    """The plan and its best alternatives, in columns that have a value, with ties explained.

    A pipeline's are on its mesh, and the last of them is the one of the headline if no other is.
    Those that train on old weights are named below the table.
    """
    step_s, found = plan.prediction.step_time_s, alternatives(plan)
    listed = [each for each in found if not each.is_stale]
    best = listed[: max(0, num_rows - 1)]
    known = fastest_known(plan) if plan.is_pipeline else None
    if known is not None and best and known not in best:
        best[-1] = known
    rows = [
        Alternative(
            name="this plan", mesh=str(plan.device_mesh), time_s=step_s,
            memory_bytes=plan.search.estimated_bytes,
        ),
        *best,
    ]  # fmt: skip
    has_memory = any(each.memory_bytes is not None for each in best)
    notes = [_tied_meshes(plan), _ties(plan, listed, best), _stale(plan, found)]
    if has_memory:
        notes.append(_estimate(plan))
    if len(listed) > len(best):
        slower = "slower" if known is None or listed[: len(best)] == best else "more"
        notes.append(f"{len(listed) - len(best)} {slower}: plan.report('full')")
    return Section(
        title="best alternatives",
        columns=("strategy", "mesh", "step", "to plan", "est. memory", "note"),
        rows=tuple(
            (
                each.name,
                each.mesh * (not plan.is_pipeline),
                format_seconds(each.time_s),
                f"{each.time_s / step_s:.2f}x",
                format_bytes(each.memory_bytes) if has_memory and each.memory_bytes else "",
                each.note,
            )
            for each in rows
        ),
        notes=tuple(note for note in notes if note),
        wraps=True,
    ).used_columns()


def _estimate(plan: PlanFields) -> str:
    """A sentence that tells estimated memory from counted, "" where the two are equal."""
    counted = format_bytes(sum(plan.prediction.memory_bytes.values()))
    if format_bytes(plan.search.estimated_bytes) == counted:
        return ""
    stages = ", and as if stages were equal" * plan.is_pipeline
    return f"est. memory: {ESTIMATE}{stages}; counted, this plan takes {counted}"


def _stale(plan: PlanFields, found: list[Alternative]) -> str:
    """The alternatives on old weights, which are no plans, with their times."""
    step_s = plan.prediction.step_time_s
    texts = [
        f"{each.name} {format_seconds(each.time_s)} ({each.time_s / step_s:.2f}x)"
        for each in found
        if each.is_stale
    ]
    return f"on old weights, which is {NOT_EAGER}: {', '.join(texts)}" if texts else ""


def _tied_meshes(plan: PlanFields) -> str:
    """The meshes on which the best strategy is as fast as the plan, and which are in no row."""
    meshes = [] if plan.is_pipeline else _same_meshes(plan)
    if not meshes:
        return ""
    names = meshes[:MOST_TIED]
    names += [f"{len(meshes) - MOST_TIED} more"] * (len(meshes) > MOST_TIED)
    number = "1 other mesh ties" if len(meshes) == 1 else f"{len(meshes)} other meshes tie"
    return f"{number} with {plan.device_mesh}: {', '.join(names)}"


def _ties(plan: PlanFields, listed: list[Alternative], shown: list[Alternative]) -> str:
    """Which alternatives tie with the plan, why that is one, and whether others do so as well."""
    step_s = plan.prediction.step_time_s
    tied = [e for e in listed if not e.is_same and math.isclose(e.time_s, step_s, rel_tol=TIE)]
    factor = plan.prediction.analytical_factor
    sure = f"prices may be off by {factor:.3g}x" if factor is not None else ""
    others = [each.time_s for each in shown if each not in tied and not each.is_same]
    is_tie = any(math.isclose(*pair, rel_tol=TIE) for pair in itertools.pairwise(others))
    if not tied:
        why = f": {sure}" * bool(sure)
        return f"alternatives within {TIE:.1%} of each other are ties{why}." * is_tie
    names = [f"mesh {e.mesh}" if e.name == ON_MESH else e.name for e in tied[:MOST_TIED]]
    names += [f"{len(tied) - MOST_TIED} more"] * (len(tied) > MOST_TIED)
    own_bytes = plan.search.estimated_bytes
    less = sum(1 for e in tied if (e.memory_bytes or 0) > (1 + TIE) * own_bytes)
    why = "each is as good a choice"
    if less == len(tied):
        why = f"the plan takes less memory than {'it' if less == 1 else 'any of them'}"
    sure = f", and {sure}" * bool(sure)
    return (
        f"ties: {', '.join(names)} within {TIE:.1%} of the plan{sure}; {why}."
        + f" Other alternatives within {TIE:.1%} of each other tie too." * is_tie
    )
