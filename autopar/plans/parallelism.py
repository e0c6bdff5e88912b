"""The names that users know for what a plan does: DDP, FSDP, ZeRO, HSDP, TP, PP.

In: the stored and the needed placement of each parameter. Out: for a set of parameters, the kind of
parallelism along every mesh axis, and one name for all of it.

=========  ==========  ===========================================================================
stored     needed      known as
=========  ==========  ===========================================================================
R          V           DDP: whole on every device; gradients are all-reduced
S          V           FSDP (ZeRO-3) where it is released after each pass; else gathered once:
                       ZeRO-2 where every micro-batch reduce-scatters its gradient, ZeRO-1 where
                       gradients accumulate whole (the same with one micro-batch)
S          S           TP: every device computes with its shard; EP where an op of its module
                       splits experts
R          R           replicated: every device computes the same
=========  ==========  ===========================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby

from autopar.plans.parts import ModuleChoice, PlanFields, axes_of_experts

DDP, FSDP, ZERO1, ZERO2, ZERO12 = "DDP", "FSDP", "ZeRO-1", "ZeRO-2", "ZeRO-1/2"
SEQUENCE, TENSOR, EXPERT, REPLICATED = "SP", "TP", "EP", "replicated"
UNUSED = "unused"
HYBRID = "HSDP"

MEANING: Mapping[str, str] = {
    DDP: "parameters whole on every device, gradients all-reduced",
    FSDP: "ZeRO-3, parameters sharded, gathered for each forward and each backward pass",
    ZERO1: "parameters and optimizer state sharded, gathered once a step; gradients reduced once",
    ZERO2: "as ZeRO-1, gradients reduce-scattered in every micro-batch",
    ZERO12: "parameters, gradients and optimizer state sharded, gathered once a step",
    SEQUENCE: "the sequence is split, parameters whole, gradients all-reduced",
    TENSOR: "each device computes with its own shard of the weights",
    EXPERT: "expert parallelism, each device computes with its own experts",
    REPLICATED: "every device computes the same",
    UNUSED: "nothing reads the parameters",
}
"""What each kind of parallelism means, in the order in which a legend lists them."""

DOMINANT = 0.9
"""The share of a model's bytes from which on a kind of parallelism gives it its name."""

Shares = tuple[Mapping[str, float], ...]
"""For each mesh axis, the kinds of parallelism along it and their share of the bytes."""


def kinds_of(plan: PlanFields, name: str) -> tuple[str, ...]:
    """The kind of parallelism of a parameter along each mesh axis, empty for an axis of size 1."""
    if name in plan.graph.unused:
        return tuple(UNUSED if size > 1 else "" for size in plan.mesh.axis_sizes)
    released, scattered = name in plan.released, name in plan.scattered
    gathered = _gathered_as(plan, is_released=released, is_scattered=scattered)
    kinds = _kinds(plan, plan.parameters[name], plan.uses[name].needs, gathered)
    return _by_expert(kinds, plan.expert_axes.get(name.rpartition(".")[0], frozenset()))


def kinds_of_choice(plan: PlanFields, choice: ModuleChoice) -> tuple[str, ...]:
    """The kind of parallelism of a module's largest parameter along each mesh axis.

    It is released and scattered where the plan's parameters are.
    """
    released, scattered = bool(plan.released), bool(plan.scattered)
    gathered = _gathered_as(plan, is_released=released, is_scattered=scattered)
    kinds = _kinds(plan, choice.stored, choice.needs, gathered)
    return _by_expert(kinds, axes_of_experts(choice.splits))


def _kinds(plan: PlanFields, stored: str, needs: str, gathered: str) -> tuple[str, ...]:
    return tuple(
        _kind(s, n, gathered) if size > 1 else ""
        for s, n, size in zip(stored.split(), needs.split(), plan.mesh.axis_sizes)
    )


def _by_expert(kinds: tuple[str, ...], axes: Collection[int]) -> tuple[str, ...]:
    """Tensor parallelism along an axis that splits experts is expert parallelism."""
    return tuple(
        EXPERT if kind == TENSOR and axis in axes else kind for axis, kind in enumerate(kinds)
    )


def joined(kinds: Iterable[str]) -> str:
    """``FSDP x TP``: the different kinds, without those of axes of size 1."""
    return " x ".join(dict.fromkeys(filter(None, kinds)))


def _gathered_as(plan: PlanFields, *, is_released: bool, is_scattered: bool) -> str:
    """The kind of a parameter that is stored split and gathered for its use."""
    if is_released:
        return FSDP
    if plan.schedule.num_microbatches == 1:
        return ZERO12
    return ZERO2 if is_scattered else ZERO1


def _kind(stored: str, needed: str, gathered: str) -> str:
    if stored.startswith("S") and not needed.startswith(("S", "P")):
        return gathered
    if stored == "R" and needed == "V":
        return DDP
    return REPLICATED if needed == "R" else TENSOR


def shares_of(plan: PlanFields, names: Iterable[str]) -> Shares:
    """The kinds of parallelism of some parameters by axis, the one of most bytes first; of unused
    ones only where all are."""
    names = list(names)
    names = [name for name in names if name not in plan.graph.unused] or names
    found: list[Counter[str]] = [Counter() for _ in plan.mesh.axis_names]
    for name in names:
        for axis, kind in enumerate(kinds_of(plan, name)):
            found[axis][kind] += plan.uses[name].size_bytes
    return tuple(
        {kind: size / max(1, counts.total()) for kind, size in counts.most_common()}
        for counts in found
    )


def name_along(shares: Mapping[str, float], *, short: bool = False) -> str:
    """``DDP``, or ``mixed (62% TP, 38% DDP)`` where no kind has nearly all bytes.

    The ``short`` name has no shares.
    """
    if not shares:
        return ""
    first = next(iter(shares))
    if shares[first] >= DOMINANT:
        return first
    parts = [
        kind if short else f"{share:.0%} {kind}" for kind, share in shares.items() if share >= 0.005
    ]
    return f"mixed ({', '.join(parts)})"


def _name_of_shares(plan: PlanFields, shares: Shares, *, short: bool) -> str:
    """The name along all axes: ``HSDP over 2 x 8``, ``FSDP over 8 x TP over 8``."""
    sizes = plan.mesh.axis_sizes
    named = [(name_along(each, short=short), size) for each, size in zip(shares, sizes) if size > 1]
    runs = [
        (name, math.prod(size for _, size in run)) for name, run in groupby(named, lambda n: n[0])
    ]
    if len(runs) > 1 and runs[0][0] == DDP and runs[1][0] == FSDP:
        runs[:2] = [(HYBRID, (runs[0][1], runs[1][1]))]  # type: ignore[list-item]
    texts = []
    for name, size in runs:
        over = " x ".join(map(str, size)) if isinstance(size, tuple) else size
        texts.append(f"{name} over {over}" if name else "")
    return " x ".join(text for text in texts if text)


def strategy_name(plan: PlanFields, *, short: bool = False) -> str:
    """The plan's strategy as users know it: ``PP over 4 (1f1b) x DDP over 2``, ``FSDP over 8``;
    its mesh where the model has no parameters."""
    ranks = plan.schedule.num_devices
    pipeline = f"PP over {ranks} ({plan.schedule.name})" if ranks > 1 else ""
    shares = _by_sequence(plan, shares_of(plan, plan.parameters))
    inner = _name_of_shares(plan, shares, short=short)
    alone = str(plan.device_mesh) if plan.may_split else "one device"
    return " x ".join(part for part in (pipeline, inner) if part) or alone


def _by_sequence(plan: PlanFields, shares: Shares) -> Shares:
    """Data parallelism along the sequence instead of the batch is sequence parallelism."""
    found = []
    for axis, each in enumerate(shares):
        words: Counter[str] = Counter()
        for module in plan.modules:
            words[module.splits.split()[axis]] += module.forward_s  # type: ignore[assignment]
        along = words["sequence"] > words["batch"]
        found.append({SEQUENCE if along and k == DDP else k: share for k, share in each.items()})
    return tuple(found)
