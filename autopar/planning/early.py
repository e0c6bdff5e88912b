"""When the parameters of a lowered program are updated: as asked for, or early if memory needs it.

In: a program that updates after the backward pass, and its memory. Out: the update, the program as
it will run, and what the plan says about its updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.allocator import Category, device_bytes
from autopar.ir.update import Update
from autopar.lowering.early import default_tile_bytes, with_early_update
from autopar.lowering.pipeline import has_late_updates, has_side_stream
from autopar.lowering.types import RankProgram
from autopar.memory.program import ProgramMemory, fullest
from autopar.planning.setting import Setting
from autopar.plans.parts import UpdatePlan


def may_choose_early(setting: Setting, program: RankProgram) -> bool:
    """Whether the planner may choose early updates of a program by itself."""
    is_excluded = has_late_updates(program) or has_side_stream(program)
    is_possible = not setting.optimizer.is_joint and not is_excluded
    return setting.may_update_early and is_possible


def _may_fit_early(setting: Setting, at_end: ProgramMemory) -> bool:
    """Whether early updates may make a program fit: they save at most the gradients at its peak,
    and what W, a reduction or an update takes there to make or use them.

    Where a search of one point fails, its error names the least memory, so it tries them anyway.
    """
    if setting.limit.fits(at_end):
        return False
    saved = {Category.GRADIENTS}
    if not at_end.peak_at.startswith(("F ", "I ")):
        saved |= {Category.WORKSPACE, Category.COMMUNICATION}
    kept = {name: size for name, size in at_end.by_category.items() if name not in saved}
    least_bytes = device_bytes(kept, setting.cluster.device)
    least = replace(at_end, by_category=kept, device_bytes=least_bytes)
    return not setting.space.is_open or setting.limit.fits(least)


def chosen_update(setting: Setting, program: RankProgram, at_end: ProgramMemory) -> Update:
    """The update that is asked for, or what the memory of updates ``at_end`` makes necessary."""
    if setting.update is not None:
        return setting.update
    is_early = _may_fit_early(setting, at_end) and may_choose_early(setting, program)
    return Update(when="early" if is_early else "at_end")


def updated_early(
    setting: Setting, program: RankProgram, update: Update, *, in_steps: bool = True
) -> tuple[RankProgram, tuple[ProgramMemory, ...]]:
    """The program with early updates, and its memory on each pipeline device.

    Gradients are made by rows if ``in_steps``, else all that a block makes at once. Raises
    PlanError where the schedule excludes early updates.
    """
    tile_bytes = default_tile_bytes(program)
    program = with_early_update(program, update, tile_bytes=tile_bytes, in_steps=in_steps)
    return program, setting.counted(program)


def update_plan(
    program: RankProgram, update: Update, memories: Sequence[ProgramMemory], at_end: ProgramMemory
) -> UpdatePlan:
    """The plan of a program's updates, whose memory ``at_end`` of the step was counted too."""
    return UpdatePlan(
        when=update.when,  # type: ignore[arg-type]
        keep_gradients=update.keep_gradients,
        clipping=update.clipping,  # type: ignore[arg-type]
        tile_bytes=default_tile_bytes(program),
        gradient_bytes=fullest(memories).gradient_bytes,
        gradient_bytes_at_end=at_end.gradient_bytes,
    )
