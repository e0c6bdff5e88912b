"""Drawn plans: mesh, assignment, micro-batches, stages, schedule, recomputation, reductions.

Recomputation is of stages, by the schedule, and of values that blocks do not keep.

A draw is named by a text (model, number of the program, number of the schedule) that gives the same
plan again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.base.errors import PlanError, ScheduleError
from autopar.ir.mesh import Mesh
from autopar.ir.stages import Stages
from autopar.lowering.types import RankProgram
from autopar.schedules import Durations, Schedule, build, with_recomputation, with_reductions
from tests.equality.case import Case

SIZES = ((1,), (2,), (2,), (3,), (4,), (2, 2))
PIPELINES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("gpipe", 1, {}),
    ("1f1b", 1, {}),
    ("interleaved", 2, {}),
    ("zb_h1", 1, {}),
    ("zb_h2", 1, {}),
    ("zb_v", 2, {}),
    ("v_half", 2, {}),
    ("v_min", 2, {}),
    ("dualpipe", 1, {}),
    ("chimera", 1, {}),
    ("chimera", 1, {"concatenation": "forward_doubling"}),
    ("chimera", 1, {"concatenation": "backward_halving"}),
    ("chimera", 1, {"concatenation": "merged"}),
    ("chimera", 1, {"num_pipelines": 4}),
    ("gems", 1, {}),
    ("fast_forward", 2, {}),
)
"""Name, stages a pipeline rank, options."""
DEALT = ("interleaved", "fast_forward")
"""Those that are told the number of pipeline ranks."""
REFUSALS = (
    "micro-batches leaves",  # what a drawn split has left does not divide
    "needs the whole batch at once",
    "cannot be cut into",
    "splits of a dimension must not overlap",
)
PIPELINE_REFUSALS = (
    "cut the stages so that both are in one",  # a buffer's update and its reader
    "Use a schedule with one replica",  # a buffer that replicas cannot put together
)
MAX_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A program and the text that draws it again."""

    text: str
    program: RankProgram


def drawn_programs(case: Case, number: int, num_schedules: int) -> Iterator[Drawn]:
    """One lowered program without a pipeline, then under drawn schedules."""
    generator = random.Random(f"{case.kind} {number}")
    text, mesh, num, program = _lowered(case, generator)
    text = f"{case.kind} {number}: {text}"
    yield Drawn(text=text, program=program)
    found = tries = 0
    while found < num_schedules - 1 and tries < 20 * num_schedules:
        tries += 1
        schedule = _schedule(case, generator, num, MAX_RANKS // mesh.num_devices)
        if schedule is None:
            continue
        stages = _stages(case, generator, schedule.shape.num_stages)
        try:
            piped = case.piped(program, schedule, stages)
        except PlanError as error:
            if not any(text in str(error) for text in PIPELINE_REFUSALS):
                raise
            continue
        found += 1
        yield Drawn(
            text=f"{text}, {found}: {schedule.name} {schedule.shape}, {stages.first_blocks}",
            program=piped,
        )


def _lowered(case: Case, generator: random.Random) -> tuple[str, Mesh, int, RankProgram]:
    while True:
        sizes = generator.choice(SIZES)
        counts = [n for n in (1, 2, 4, 8) if case.num_rows % n == 0]
        num = generator.choice(counts)
        if case.has_batch_norm and num > 1:
            sizes = (1,)  # each shard of a micro-batch would have statistics of its own
        mesh = Mesh(("x", "y")[: len(sizes)], sizes)
        seed = generator.randrange(2**32)
        share = random.Random(seed).choice((None, None, 0.0, 0.3, 0.8))
        text = f"mesh {sizes}, {num} micro-batches, seed {seed}, kept {share}"
        try:
            return text, mesh, num, case.lowered(num, mesh, seed, share)
        except PlanError as error:
            if not any(text in str(error) for text in REFUSALS):
                raise


def _schedule(
    case: Case, generator: random.Random, num_microbatches: int, max_ranks: int
) -> Schedule | None:
    """A schedule of this many micro-batches, None where the drawn numbers make none."""
    num_starts = len(case.stage_starts)
    if max_ranks == 1 or generator.random() < 0.1:
        return _of_layers(generator, num_microbatches, num_starts)
    name, per_rank, options = generator.choice(PIPELINES)
    num_ranks = generator.choice([n for n in (2, 3, 4) if n <= max_ranks])
    if num_ranks * per_rank > num_starts:
        return None
    if name in DEALT:
        options = {**options, "num_devices": num_ranks}
    try:
        made = build(
            name, num_stages=num_ranks * per_rank, num_microbatches=num_microbatches, **options
        )
        made = _transformed(made, generator)
    except ScheduleError:
        return None
    # Halved micro-batches are another program's.
    return made if made.shape.num_microbatches == num_microbatches else None


def _transformed(made: Schedule, generator: random.Random) -> Schedule:
    """Raises ScheduleError where a schedule already has what is drawn."""
    if generator.random() < 0.3:
        stages = range(made.shape.num_stages)
        chosen = [stage for stage in stages if generator.random() < 0.5]
        made = with_recomputation(made, chosen) if chosen else made
    if generator.random() < 0.2:
        made = with_reductions(made, _durations(generator))
    return made


def _of_layers(generator: random.Random, num: int, num_starts: int) -> Schedule:
    """Without a pipeline: the order of gradient reductions of stages that all ranks have."""
    num_stages = generator.randint(1, min(4, num_starts))
    name = generator.choice(["conventional", "reverse_first_k"])
    options = {"k": generator.randint(0, num_stages)} if name == "reverse_first_k" else {}
    made = build(name, num_stages=num_stages, num_microbatches=num, reduces=False, **options)
    return with_reductions(made, _durations(generator))


def _durations(generator: random.Random) -> Durations:
    return Durations(**{kind: generator.uniform(0.2, 2.0) for kind in "FIWG"})


def _stages(case: Case, generator: random.Random, num_stages: int) -> Stages:
    """Cut anywhere; the first stage begins with the first block."""
    first, *others = case.stage_starts
    places = sorted(generator.sample(range(len(others)), num_stages - 1))
    return Stages(first_blocks=(first, *(others[place] for place in places)))
