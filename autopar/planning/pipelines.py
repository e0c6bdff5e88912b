"""The pipelines that an open space considers: every schedule, in all its forms.

In: a number of pipeline ranks and of micro-batches, and what the user fixed. Out: the forms
(`autopar.schedules.generators.forms`) that the blocks allow, the usual schedules first. These are
always simulated; the others only if a lower bound of their time is below the best step so far.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.planning.combinations import Combination
from autopar.planning.space import Space
from autopar.schedules.generators.build import ANY_STAGES, ONE_STAGE, TWO_STAGES
from autopar.schedules.generators.forms import Form, forms

USUAL = ("1f1b", "zb_h1", "chimera", "interleaved", "zb_v", "v_half", "v_min")
"""The schedules whose plain forms are always simulated."""
MAX_DEALT = 4
"""Largest number of stages per pipeline rank searched for a schedule that has any number."""
MAX_LISTED = 512
"""Limit on stages times micro-batches of a list schedule: larger ones are slow to build."""


def pipelines(combination: Combination, space: Space, num_blocks: int) -> list[Form]:
    """The forms that ``num_blocks`` blocks and the fixed options allow, the usual ones first."""
    found = [
        form
        for num_stages in _stage_counts(combination.num_devices, space)
        if num_stages <= num_blocks
        for form in forms(combination.num_devices, num_stages, combination.num_microbatches)
        if space.schedule in (None, form.name) and is_considered(form, space)
    ]
    return sorted(found, key=lambda form: is_extra(form, space))


def is_extra(form: Form, space: Space) -> bool:
    """Whether a form is simulated only if it may be faster than all before it."""
    if form.options or space.schedule is not None or space.num_stages is not None:
        return bool(form.options)
    return form.name not in USUAL or form.num_stages > 2 * form.num_devices


def is_considered(form: Form, space: Space) -> bool:
    """Whether a form is small enough to be searched."""
    if not form.is_listed:
        return True
    is_dealt = form.num_stages > 2 * form.num_devices and space.schedule is None
    is_large = form.num_stages * form.num_microbatches > MAX_LISTED and bool(form.options)
    return not is_large and (not is_dealt or space.num_stages is not None)


def _stage_counts(num_devices: int, space: Space) -> Iterator[int]:
    if space.num_stages is not None:
        if space.num_stages % num_devices == 0:
            yield space.num_stages
        return
    for per_device in range(1, MAX_DEALT + 1):
        yield per_device * num_devices


def without_pipeline(combination: Combination, space: Space, num_blocks: int) -> str:
    """The reason for a combination that no schedule fits."""
    wanted = "" if space.num_stages is None else f" of {space.num_stages} stages"
    name = space.schedule
    return (
        (f"{name}{wanted} does not fit" if name else f"no schedule{wanted} fits")
        + f" {combination.num_devices} pipeline ranks and {num_blocks} blocks: "
        f"{', '.join(ONE_STAGE)} have one stage per rank, {', '.join(TWO_STAGES)} two, "
        f"{', '.join(ANY_STAGES)} more; a stage has at least one block"
    )
