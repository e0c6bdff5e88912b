"""Optimal schedules of small cases, and lower bounds for larger ones, by CP-SAT.

In: a shape, costs and a memory cap. Out: ``OracleResult`` with the best schedule found, its
seconds, the proved bound and the status. Used by the search with ``exact_time_s``, and as an oracle
by the tests. The model:

- one interval of fixed length per action (F, I and W); the makespan is at least every end;
- actions of one device do not overlap;
- data dependencies, with transfer times between devices (messages do not queue);
- memory: an activation is an interval from the start of its F to the end of its I, and the part of
  it that W reads one to the end of its W; the cumulative demand on each device stays under the cap;
- micro-batches are interchangeable, so within a stage they run in order, without loss.

Seconds are scaled to integers: by their greatest common divisor if the longest action is at most
``resolution`` times it, so that round numbers stay exact, else rounded down to the
``resolution``-th part of the longest action, so that the bound holds for the exact seconds too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm

from ortools.sat.python import cp_model

from autopar.base.errors import ScheduleError
from autopar.schedules.action import Action, Kind
from autopar.schedules.generators.fixed_order import static_bytes
from autopar.schedules.generators.list_scheduler import data_edges, transfer_s
from autopar.schedules.schedule import PipelineShape, Schedule, schedule_of
from autopar.schedules.simulate.durations import Durations, Links, Memory, is_number, per_stage
from autopar.schedules.simulate.simulator import simulate

_KINDS = (Kind.F, Kind.I, Kind.W)
_EXACT = 1e-6
"""Part of a unit up to which a number of units is whole, as computed in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleResult:
    """The best schedule found, None if there was none in time.

    ``optimal``: its makespan is proved optimal, up to the rounding of times. ``lower_bound_s``
    holds for every schedule of the shape.
    """

    schedule: Schedule | None
    makespan_s: float
    lower_bound_s: float
    optimal: bool


class _Model:
    def __init__(
        self,
        shape: PipelineShape,
        durations: Durations,
        links: Links | None,
        resolution: int,
    ) -> None:
        self.shape = shape
        self.model = cp_model.CpModel()
        table = durations.split_table(shape.num_stages)
        seconds = {
            shape.action(stage, kind, m): table[kind][stage]
            for kind in _KINDS
            for stage in range(shape.num_stages)
            for m in range(shape.num_microbatches)
        }
        self.unit_s = _unit_s([*table[Kind.F], *table[Kind.I], *table[Kind.W]], resolution)
        self.length = {action: self._units(value) for action, value in seconds.items()}
        transfer = transfer_s(shape, links)
        self.edges: list[tuple[Action, Action, int]] = []
        for before, after in data_edges(shape, split=True):
            source, target = self.device(before), self.device(after)
            self.edges.append((before, after, self._units(transfer(before, source, target))))
        horizon = sum(self.length.values()) + sum(delay for _, _, delay in self.edges)
        new = self.model.new_int_var
        self.start = {action: new(0, horizon, f"{action}") for action in self.length}
        self.makespan = new(0, horizon, "makespan")
        self._order(horizon)

    def _units(self, time_s: float) -> int:
        return floor(time_s / self.unit_s + _EXACT)

    def device(self, action: Action) -> int:
        return self.shape.placement[action.replica][action.stage]

    def end(self, action: Action) -> cp_model.LinearExpr:
        return self.start[action] + self.length[action]

    def _order(self, horizon: int) -> None:
        model, shape = self.model, self.shape
        on_device: list[list[cp_model.IntervalVar]] = [[] for _ in range(shape.num_devices)]
        latest: dict[tuple[Kind, int, int], Action] = {}
        for action, length in self.length.items():
            interval = model.new_fixed_size_interval_var(self.start[action], length, f"{action}")
            on_device[self.device(action)].append(interval)
            model.add(self.makespan >= self.end(action))
            key = (action.kind, action.stage, action.replica)
            if key in latest:
                model.add(self.start[action] >= self.end(latest[key]))
            latest[key] = action
        for intervals in on_device:
            model.add_no_overlap(intervals)
        for before, after, delay in self.edges:
            model.add(self.start[after] >= self.end(before) + delay)
        model.minimize(self.makespan)

    def cap_memory(self, memory: Memory, max_bytes: Sequence[float]) -> None:
        """Cap the cumulative demand of activations, in millionths of the largest.

        Rounding never excludes a schedule that fits, so the bound stays valid.
        """
        shape = self.shape
        size = per_stage(memory.activation_bytes, shape.num_stages, "Memory.activation_bytes")
        after = memory.after_input_gradient_bytes
        late = size if after is None else per_stage(after, shape.num_stages, "Memory.held")
        late = [min(part, whole) for part, whole in zip(late, size)]
        quantum = max(size, default=0.0) / 1_000_000 or 1.0
        static = static_bytes(shape, memory)
        for device in range(shape.num_devices):
            intervals, demands = [], []
            for replica, stage in shape.stages_on(device):
                parts = ((Kind.I, size[stage] - late[stage]), (Kind.W, late[stage]))
                for m in range(shape.num_microbatches):
                    for last, part in parts if shape.replica(m) == replica else ():
                        intervals.append(self._held(shape.action(stage, last, m)))
                        demands.append(floor(part / quantum))
            room = max_bytes[device] - static[device]
            if room < sum(demands) * quantum:
                limit = ceil(max(room, 0.0) / quantum)
                self.model.add_cumulative(intervals, demands, limit)

    def _held(self, last: Action) -> cp_model.IntervalVar:
        """The time from the start of the forward to the end of ``last``, an I or W of it."""
        first = last._replace(kind=Kind.F)
        length = self.model.new_int_var(0, 1 << 40, f"held for {last}")
        return self.model.new_interval_var(
            self.start[first], length, self.end(last), f"held for {last}"
        )

    def hint(self, schedule: Schedule, durations: Durations, links: Links | None) -> None:
        """Give the solver a known schedule as a hint."""
        for item in simulate(schedule, durations, links).intervals:
            if item.action in self.start:
                self.model.add_hint(self.start[item.action], round(item.start_s / self.unit_s))


def _unit_s(values: Sequence[float], resolution: int) -> float:
    """Seconds per integer unit of the model."""
    longest = max(values, default=0.0)
    if not longest:
        return 1.0
    exact = [Fraction(value).limit_denominator(1_000_000) for value in values]
    scale = lcm(*(value.denominator for value in exact))
    measure = Fraction(gcd(*(int(value * scale) for value in exact)), scale)
    return float(measure) if longest / measure <= resolution else longest / resolution


def _check_limits(
    shape: PipelineShape,
    max_bytes: Sequence[float] | None,
    time_limit_s: float,
    num_workers: int,
    resolution: int,
) -> None:
    if max_bytes is not None and len(max_bytes) != shape.num_devices:
        raise ScheduleError(
            f"max_bytes has {len(max_bytes)} entries for {shape.num_devices} devices: give one each"
        )
    if not is_number(time_limit_s) or not 0 < time_limit_s < float("inf"):
        raise ScheduleError(f"time_limit_s={time_limit_s!r}: a finite number of seconds > 0")
    for name, value in (("num_workers", num_workers), ("resolution", resolution)):
        if type(value) is not int or value < 1:
            raise ScheduleError(f"{name}={value!r}: a whole number, at least 1")


def _depth(action: Action, num_stages: int) -> tuple[int, bool]:
    """The place of an action in its micro-batch's chain, which orders actions of no length that
    start together: each after those that it waits for."""
    forward = action.kind is Kind.F
    place = action.stage if forward else 2 * num_stages - 1 - action.stage
    return place, action.kind is Kind.W


def optimal_schedule(
    shape: PipelineShape,
    durations: Durations,
    *,
    links: Links | None = None,
    memory: Memory | None = None,
    max_bytes: Sequence[float] | None = None,
    time_limit_s: float = 30.0,
    num_workers: int = 2,
    resolution: int = 100_000,
    start_from: Schedule | None = None,
    seed: int = 0,
) -> OracleResult:
    """The best order of F, I and W on every device of the shape.

    ``max_bytes`` caps each device; ``resolution`` is the largest number of integer units of the
    longest action. Raises ScheduleError if CP-SAT proves that nothing fits under the cap, or if a
    limit is out of range.
    """
    _check_limits(shape, max_bytes, time_limit_s, num_workers, resolution)
    built = _Model(shape, durations, links, resolution)
    if max_bytes is not None:
        built.cap_memory(memory or Memory(), max_bytes)
    if start_from is not None:
        built.hint(start_from, durations, links)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = seed
    status = solver.solve(built.model)
    if status == cp_model.INFEASIBLE:
        raise ScheduleError(
            f"no schedule fits max_bytes={list(max_bytes or ())}: allow at least one activation "
            "for each stage of a device"
        )
    bound_s = max(0.0, solver.best_objective_bound * built.unit_s)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return OracleResult(
            schedule=None, makespan_s=float("inf"), lower_bound_s=bound_s, optimal=False
        )
    orders: list[list[Action]] = [[] for _ in range(shape.num_devices)]

    def turn(action: Action) -> tuple[int, tuple[int, bool], Action]:
        return solver.value(built.start[action]), _depth(action, shape.num_stages), action

    for action in sorted(built.start, key=turn):
        orders[built.device(action)].append(action)
    schedule = schedule_of("cp_sat", shape, orders)
    return OracleResult(
        schedule=schedule,
        makespan_s=simulate(schedule, durations, links).makespan_s,
        lower_bound_s=bound_s,
        optimal=status == cp_model.OPTIMAL,
    )
