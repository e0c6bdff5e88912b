"""The table of pipelines equals eager PyTorch: 2, 4 and 8 ranks, all of them in lockstep.

Two steps each: losses, gradients, weights, buffers, and equal copies on all pipeline ranks. A third
of the schedules under half of the numbers of ranks and meshes of each model, in turn; ``make
exhaustive`` takes all.
"""

from __future__ import annotations

import functools
from itertools import groupby

import pytest

from autopar.cost_models import Cluster
from autopar.lowering.types import RankProgram
from autopar.passes.batch_norm import with_batch_norm
from autopar.planning.planner import make_planned
from autopar.planning.space import Space
from tests.effort import EXHAUSTIVE
from tests.equality.case import ALONE, Case
from tests.equality.pipeline_table import INSIDE, MODELS, NUM_ROWS, Combination, combinations


@functools.cache
def case_of(model: str, is_large: bool) -> Case:
    return Case(model, MODELS[model][is_large], num_joined=NUM_ROWS // 4, num_steps=2)


@functools.cache
def program_of(model: str, is_large: bool, inside: str, num: int) -> RankProgram:
    case, mesh = case_of(model, is_large), INSIDE[inside]
    if not mesh.sizes:
        return case.lowered(num, ALONE, 0)
    captured = with_batch_norm(case.captured, "local" if num > 1 else "global")
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=mesh.num_devices)
    return make_planned(
        captured,
        cluster,
        Space(mesh=dict(zip(("x", "y"), mesh.sizes)), num_microbatches=num),
        constraints=mesh.constraints,
    ).program


def program_of_entry(entry: Combination) -> tuple[Case, RankProgram]:
    made = entry.schedule
    case = case_of(entry.model, entry.is_large)
    program = program_of(entry.model, entry.is_large, entry.inside, made.shape.num_microbatches)
    piped = case.piped(program, made)
    assert piped.num_ranks == entry.num_processes
    return case, piped


def rows() -> list[list[Combination]]:
    """Entries of one model, number of ranks and mesh together: they share programs."""
    fitting = sorted(
        (c for c in combinations() if c.misfit() is None),
        key=lambda c: (c.model, c.is_large, c.num_processes, c.inside),
    )
    groups = groupby(fitting, key=lambda c: (c.model, c.is_large, c.num_processes, c.inside))
    found = [list(group) for _, group in groups]
    if EXHAUSTIVE:
        return found
    models = sorted(MODELS)
    return [
        row[turn // 2 % 3 % len(row) :: 3]
        for turn, row in enumerate(found)
        if (turn + models.index(row[0].model)) % 2 == 0
    ]


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param(
            row,
            id=f"{row[0].model} on {row[0].num_processes}, {row[0].inside}",
            marks=pytest.mark.xdist_group(f"table of {row[0].model}"),
        )
        for row in rows()
    ],
)
def test_equals_eager(entries: list[Combination]) -> None:
    for entry in entries:
        case, program = program_of_entry(entry)
        try:
            case.check(program)
        except Exception as error:
            error.add_note(str(entry))
            raise


def test_what_does_not_fit() -> None:
    """No more than what is known not to, each for one of the known reasons."""
    reasons = {str(c): c.misfit() for c in combinations()}
    known = ("num_pipelines = 2f", "the whole batch for batch norm")
    for name, reason in reasons.items():
        assert reason is None or any(text in reason for text in known), (name, reason)
    assert sum(reason is None for reason in reasons.values()) > 0.9 * len(reasons)
