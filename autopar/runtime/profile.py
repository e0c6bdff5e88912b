"""A profile: measured training steps beside what the plan predicted for them.

In: the plan, and what was measured of some steps: wall times, actions, communication, ops, memory.
Out: tables of phases by rank, of stages, memory and ops, with the ratio of measured to predicted,
and a trace of both for ui.perfetto.dev.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from autopar.base.errors import InputError
from autopar.base.units import format_seconds
from autopar.cost_models import Calibration, Cluster
from autopar.cost_models.estimate import Source
from autopar.cost_models.hardware import is_count
from autopar.cost_models.store import owner_of
from autopar.plans.bars import Bars, Series, Unit
from autopar.plans.document import Plan
from autopar.plans.layout import WIDTH, Section, text_lines
from autopar.plans.timeline import stage_durations
from autopar.runtime.memory_profile import MemoryProfile
from autopar.runtime.op_profile import PASSES, OpProfile, Pass, PassTimes
from autopar.runtime.op_tables import (
    MOST_OPS,
    REST,
    OpGroup,
    calibration_of,
    keep_prices,
    op_section,
    ops_data,
    pass_section,
    worst_groups,
)
from autopar.runtime.profile_trace import EXPOSED, trace_events
from autopar.runtime.step.timing import RankTimes
from autopar.schedules.action import RECV_KINDS, SEND_KINDS, Kind
from autopar.schedules.simulate.timeline import covered_s
from autopar.schedules.simulate.trace import (
    trace_text,
)

FIGURE_NAMES = ("phases", "stages", "ops", "peak_memory")
MOST_RANKS = 8
"""The report has columns for so many ranks: those that take longest."""
NOTE = "The rest of the step: updates, and the call itself."
COMMUNICATION_NOTE = (
    "Exposed communication: time in collectives, in which a rank also waits for slower ones; the "
    "other rows are without it."
)


PhaseRow = tuple[str, float | None, list[float]]
"""The name of a phase, its predicted seconds, and the measured ones by rank, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """Measured seconds of one rank in a step, each without those of ``communication_s``, which are
    all that it waits in collectives. ``waiting_s``: idle between its own actions."""

    rank: int
    forward_s: float
    backward_s: float
    communication_s: float
    messages_s: float
    waiting_s: float
    rest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Median measured seconds of a stage's forward and backward pass of one micro-batch, over all
    of its ranks, and the predicted ones, None without prices; without a pipeline, both are those of
    the computation, without communication."""

    stage: int
    forward_s: float
    backward_s: float
    predicted_forward_s: float | None
    predicted_backward_s: float | None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured steps of a compiled model, made by ``compiled.profile(...)``; ``print`` it.

    ``step_times_s`` are the wall times of all steps in seconds, ``times`` those of one of them by
    rank: that whose time is the (lower) median. ``ops`` are the ops of further steps, in which each
    was timed by itself, beside their predictions, and ``passes`` the passes of the same steps.
    ``memory`` is the peak by rank.
    """

    plan: Plan
    step_times_s: tuple[float, ...]
    times: tuple[RankTimes, ...]
    ops: tuple[OpProfile, ...] = ()
    passes: tuple[PassTimes, ...] = ()
    memory: MemoryProfile | None = None

    @property
    def step_time_s(self) -> float:
        """The median wall time of a step."""
        return statistics.median_low(self.step_times_s)

    @property
    def ratio(self) -> float:
        """Measured over predicted step time."""
        return self.step_time_s / self.plan.prediction.step_time_s

    @property
    def model_flops_utilisation(self) -> float:
        """The measured MFU: the model's operations as a fraction of all devices' peak."""
        return self.plan.prediction.model_flops_utilisation / self.ratio

    @cached_property
    def ranks(self) -> tuple[RankPhases, ...]:
        """The phases of each rank."""
        return tuple(self._phases(rank, found) for rank, found in enumerate(self.times))

    def _phases(self, rank: int, times: RankTimes) -> RankPhases:
        found = times.actions

        def total(kinds: Container[Kind]) -> float:
            return sum(a.time_s - a.communication_s for a in found if a.action.kind in kinds)

        start_s = min((each.start_s for each in found), default=0.0)
        end_s = max((each.end_s for each in found), default=0.0)
        busy_s = covered_s([(a.start_s, a.end_s) for a in found])
        beyond_s = sum(b - a for a, b in times.waits if b <= start_s or a >= end_s)
        inside_s = sum(each.communication_s for each in found)
        between_s = max(times.communication_s - inside_s - beyond_s, 0.0)
        return RankPhases(
            rank=rank, forward_s=total(PASSES[Pass.FORWARD]),
            backward_s=total(PASSES[Pass.BACKWARD]), communication_s=times.communication_s,
            messages_s=total((*SEND_KINDS, *RECV_KINDS)),
            waiting_s=max(end_s - start_s - busy_s - between_s, 0.0),
            rest_s=max(self.step_time_s - (end_s - start_s) - beyond_s, 0.0)
            + total((Kind.G, Kind.U)),
        )  # fmt: skip

    @cached_property
    def timed(self) -> tuple[OpProfile, ...]:
        """The ops, and what follows them in a step on the rank where that takes longest."""
        if not self.ops:
            return ()
        predicted_s = self.plan.prediction.update_s
        rest = OpProfile(
            name=REST, operator="", block="", direction=Pass.UPDATE,
            measured_s=max(rank.rest_s for rank in self.ranks), predicted_s=predicted_s,
            source=Source(self.plan.prediction.update_source) if predicted_s else None,
        )  # fmt: skip
        return (*self.ops, rest)

    @cached_property
    def stages(self) -> tuple[StageTimes, ...]:
        """The times of each stage; without a pipeline there is one."""
        durations, found = stage_durations(self.plan), []
        for stage in range(self.plan.schedule.num_stages):
            predicted: tuple[float | None, float | None] = None, None
            if durations is not None:
                table = durations.table(self.plan.schedule.num_stages)
                predicted = table[Kind.F][stage], table[Kind.I][stage] + table[Kind.W][stage]
            found.append(
                StageTimes(
                    stage=stage, forward_s=self._median(stage, (Kind.F,)),
                    backward_s=self._median(stage, (*PASSES[Pass.BACKWARD], Kind.R)),
                    predicted_forward_s=predicted[0], predicted_backward_s=predicted[1],
                )
            )  # fmt: skip
        return tuple(found)

    def _median(self, stage: int, kinds: tuple[Kind, ...]) -> float:
        """The median over ranks and micro-batches of the seconds in some kinds of actions, in one
        of a step's passes over the batch."""
        totals: dict[tuple[int, int | None], float] = {}
        for rank, found in enumerate(self.times):
            for each in found.actions:
                action = each.action
                if action.stage == stage and action.kind in kinds:
                    key = rank, action.microbatch
                    time_s = each.time_s - each.communication_s * (not self.plan.is_pipeline)
                    totals[key] = totals.get(key, 0.0) + time_s / action.span
        num_passes = self.plan.update.update.num_passes
        return statistics.median(totals.values()) / num_passes if totals else 0.0

    # --- for people ---------------------------------------------------------------------------
    def sections(self) -> tuple[Section, ...]:
        """The tables of the report."""
        return (self._headline(), *self.summary(), *self.details())

    def summary(self) -> tuple[Section, ...]:
        """The tables that are part of the report of a compiled model."""
        memory = [] if self.memory is None else [self.memory.section(self.plan)]
        return self._phase_section(), *memory

    def details(self) -> tuple[Section, ...]:
        """The tables of stages and ops."""
        passes = [pass_section(self.passes)] if self.passes else []
        ops = [op_section(self.timed)] if self.ops else []
        return self._stage_section(), *passes, *ops

    def _headline(self) -> Section:
        p, num = self.plan.prediction, len(self.step_times_s)
        mfu = f", {self.model_flops_utilisation:.1%} MFU" if p.model_flops_utilisation else ""
        steps, each = (
            ("1 measured step", "") if num == 1 else (f"{num} measured steps", " each (median)")
        )
        return Section(
            title=f"{steps}: {format_seconds(self.step_time_s)}{each}{mfu}, "
            f"{self.ratio:.2f}x the predicted {format_seconds(p.step_time_s)}",
        )

    @property
    def _slowest(self) -> list[RankPhases]:
        """The ranks that take longest, in order; the report has columns for them."""
        slowest = sorted(self.ranks, key=lambda r: -r.forward_s - r.backward_s)[:MOST_RANKS]
        return sorted(slowest, key=lambda each: each.rank)

    @property
    def _communicates(self) -> bool:
        return len(self.times) > 1

    def _phase_rows(self, ranks: Sequence[RankPhases]) -> tuple[PhaseRow, ...]:
        """The phases of a step: predicted seconds, and those measured on these ranks."""
        p = self.plan.prediction
        exposed_s = p.communication_s
        rest_s = p.step_time_s - p.forward_s - p.backward_s - exposed_s - p.copies_s - p.update_s
        communication = EXPOSED, exposed_s, [r.communication_s for r in ranks]
        messages = "messages between stages", None, [r.messages_s for r in ranks]
        return (
            ("forward", p.forward_s, [r.forward_s for r in ranks]),
            ("backward", p.backward_s, [r.backward_s for r in ranks]),
            *([communication] if self._communicates else []),
            *([("casts and copies", p.copies_s, [])] if p.copies_s else []),
            *([messages] if self.plan.is_pipeline else []),
            ("waiting", max(rest_s, 0.0), [r.waiting_s for r in ranks]),
            (REST, p.update_s, [r.rest_s for r in ranks]),
        )

    def _phase_section(self) -> Section:
        ranks = self._slowest
        return Section(
            title="a step by phase",
            columns=("phase", "predicted", *(f"rank {r.rank}" for r in ranks)),
            rows=tuple(
                (
                    name,
                    "" if predicted is None else format_seconds(predicted),
                    *(map(format_seconds, times) if times else [""] * len(ranks)),
                )
                for name, predicted, times in self._phase_rows(ranks)
            ),
            notes=(f"{COMMUNICATION_NOTE} {NOTE}" if self._communicates else NOTE,),
        ).used_columns()

    def _stage_section(self) -> Section:
        rows = []
        for each in self.stages:
            passes = (
                (each.forward_s, each.predicted_forward_s),
                (each.backward_s, each.predicted_backward_s),
            )
            cells = [cell for times in passes for cell in _beside(*times)]
            rows.append((f"stage {each.stage}", *cells))
        columns = ("", "forward", "predicted", "ratio", "backward", "predicted", "ratio")
        title = "passes of a micro-batch by stage"
        return Section(title=title, columns=columns, rows=tuple(rows)).used_columns()

    def report(self, width: int = WIDTH) -> str:
        """The tables as text, in lines of at most ``width`` columns; raises InputError unless that
        is a number."""
        if not is_count(width):
            raise InputError(
                f"width is {width!r}; a profile has one report: report(), or the "
                "number of its columns, at least 1"
            )
        return "\n".join(line for each in self.sections() for line in text_lines(each, width))

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"<Profile of {len(self.step_times_s)} steps, {format_seconds(self.step_time_s)}>"

    def figure(self, name: str = "phases") -> tuple[Any, Any]:
        """Predicted against measured times, as a figure and its axes, of matplotlib.

        ``name`` is "phases", of a step by rank, "stages", of a micro-batch, "ops", of those
        furthest from their predictions, or "peak_memory", by rank. Raises InputError for another.
        """
        from autopar.plans.figures.bar_plots import plot_bars  # imports matplotlib
        from autopar.plans.figures.catalog import no_figure

        made = self.figures
        if name not in made:
            raise no_figure(name, made)
        return plot_bars(made[name]())

    @property
    def figures(self) -> Mapping[str, Callable[[], Bars]]:
        """The numbers of each figure that there is, by its name."""
        made = {"phases": self.phases_data, "stages": self.stages_data, "ops": self.ops_data}
        if self.memory is not None:
            made["peak_memory"] = functools.partial(self.memory.bars, self.plan)
        return made

    def phases_data(self) -> Bars:
        """The seconds of each phase of a step: predicted, and measured on the slowest ranks."""
        ranks = self._slowest
        rows = self._phase_rows(ranks)
        series = [("predicted", tuple(predicted for _, predicted, _ in rows))]
        for place, each in enumerate(ranks):
            times = tuple(found[place] if found else None for _, _, found in rows)
            series.append((f"measured on rank {each.rank}", times))
        return Bars(
            title=f"A step: {format_seconds(self.step_time_s)} measured, "
            f"{self.ratio:.2f}x the predicted",
            unit=Unit.SECONDS, rows=tuple(name for name, _, _ in rows),
            series=tuple(_series(*each) for each in series),
        )  # fmt: skip

    def stages_data(self) -> Bars:
        """The seconds of each stage's forward and backward pass: predicted, and measured."""
        rows, predicted, measured = [], [], []
        for each in self.stages:
            rows += [f"stage {each.stage} forward", f"stage {each.stage} backward"]
            predicted += [each.predicted_forward_s, each.predicted_backward_s]
            measured += [each.forward_s, each.backward_s]
        return Bars(
            title="Passes of a micro-batch by stage: predicted and measured",
            unit=Unit.SECONDS, rows=tuple(rows),
            series=(
                _series("predicted", tuple(predicted)), _series("measured", tuple(measured)),
            ),
        )  # fmt: skip

    def ops_data(self) -> Bars:
        """The seconds of what is furthest from its prediction: predicted, and measured."""
        return ops_data(self.timed)

    def worst_ops(self, most: int = MOST_OPS) -> tuple[OpGroup, ...]:
        """The ops furthest from their predictions, equal ones of repeated layers as one.

        What follows all ops in a step, `REST`, counts as one.
        """
        return worst_groups(self.timed, most)

    def calibration(self) -> Calibration:
        """Efficiencies of the device fitted to these ops, and their errors on held-out ones.

        ``autopar.plan(..., compute=RooflineModel(device, calibration.table))`` prices by them.
        """
        return calibration_of(self.plan.cluster.device, self.ops)

    def keep_prices(self) -> int:
        """Keep the times of ops in this machine's store of measured prices, from which later plans
        price equal calls; the number of calls.

        Of equal calls the one of (lower) median time is kept, with the spread over all of them;
        that of a single one is not known, and is kept as 0. Raises InputError if the plan is for
        another device than this machine's.
        """
        device = self.plan.cluster.device
        here = Cluster.detect(self.plan.cluster.num_devices).device
        if (own := owner_of(here)) != (planned := owner_of(device)):
            raise InputError(
                f"the plan is for {planned}, and these times are of {own}; make the plan with "
                "autopar.compile(...) on this machine"
            )
        return keep_prices(device, self.ops)

    # --- for programs -------------------------------------------------------------------------
    def to_json(self, path: str | Path | None = None) -> str:
        """The numbers of all tables as JSON text, also written to ``path`` if given.

        Times are in seconds and sizes in bytes; what is measured by rank has a number for each.
        """
        memory = () if self.memory is None else self.memory.rows(self.plan)
        document = {
            "step_times_s": self.step_times_s,
            "step_time_s": self.step_time_s,
            "predicted_step_time_s": self.plan.prediction.step_time_s,
            "model_flops_utilisation": self.model_flops_utilisation,
            "phases": [
                {"name": name, "predicted_s": predicted_s, "measured_s": times or None}
                for name, predicted_s, times in self._phase_rows(self.ranks)
            ],
            "memory": memory,
            "stages": self.stages,
            "passes": self.passes,
            "ops": [
                {
                    "name": op.name, "operator": op.operator, "block": op.block,
                    "pass": op.direction, "measured_s": op.measured_s,
                    "predicted_s": op.predicted_s, "price": op.source,
                }
                for op in self.timed
            ],
        }  # fmt: skip
        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    # --- for trace viewers --------------------------------------------------------------------
    def trace_events(self) -> list[dict[str, Any]]:
        """A process per rank, with tracks of what was measured and of what was predicted; see
        `autopar.runtime.profile_trace`."""
        rests_s = [phases.rest_s for phases in self.ranks]
        return trace_events(self.plan, self.times, rests_s, self.step_time_s)

    def save_trace(self, path: str | Path) -> None:
        """Write the trace as JSON, to be opened in ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(trace_text(self.trace_events()), encoding="utf-8")


def _beside(measured_s: float, predicted_s: float | None) -> tuple[str, str, str]:
    """Measured, predicted, and their ratio."""
    measured = format_seconds(measured_s)
    if not predicted_s:
        return measured, "", ""
    return measured, format_seconds(predicted_s), f"{measured_s / predicted_s:.2f}"


def _series(name: str, values: tuple[float | None, ...]) -> Series:
    texts = tuple("" if each is None else format_seconds(each) for each in values)
    return Series(name=name, values=values, texts=texts)
