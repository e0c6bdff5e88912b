"""Tensors whose uses are being noted, and the step that they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.allocator import Category
from autopar.movement.execution import OpPlace, ProgramStep, Run
from autopar.movement.lifetimes import Lifetime, StepLifetimes


@dataclass(slots=True)
class Draft:
    """A tensor whose uses are being noted."""

    name: str
    category: Category
    size_bytes: int
    persistent: bool = False
    uses: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    stored: tuple[int, int] | None = None  # a parameter, and which state of it
    result: int | None = None  # its number among the results of the operation that makes it
    leaves: bool = False  # it is sent to another stage


def step_of_drafts(
    ops: Sequence[str],
    places: Sequence[OpPlace],
    workspace_bytes: Sequence[int],
    drafts: Sequence[Draft],
    *,
    keeps_gradients: bool,
) -> ProgramStep:
    """Persistent tensors that nothing uses are part of every operation's workspace."""
    idle = sum(t.size_bytes for t in drafts if t.persistent and not t.uses)
    names: dict[str, int] = {}
    found = []
    made, stored = dict[str, int](), dict[str, tuple[int, int]]()
    for draft in drafts:
        if not draft.uses or not draft.size_bytes:
            continue
        count = names[draft.name] = names.get(draft.name, 0) + 1
        name = draft.name if count == 1 else f"{draft.name}#{count}"
        found.append(
            Lifetime(
                name=name,
                category=draft.category,
                size_bytes=draft.size_bytes,
                uses=tuple(sorted(set(draft.uses))),
                writes=tuple(sorted(set(draft.writes))),
                persistent=draft.persistent,
            )
        )
        place = places[draft.uses[0]]
        is_of_forward = isinstance(place, Run) and place.graph == "F" and not draft.persistent
        if is_of_forward and draft.result is not None and not draft.leaves:
            made[name] = draft.result
        if draft.stored is not None:
            stored[name] = draft.stored
    step = StepLifetimes(
        ops=tuple(ops),
        tensors=tuple(found),
        workspace_bytes=tuple(size + idle for size in workspace_bytes),
    )
    return ProgramStep(
        step=step, places=tuple(places), made=made, stored=stored, keeps_gradients=keeps_gradients
    )
