"""Backward schedules as one type: generated, verified, simulated, searched, exchanged."""

from autopar.schedules.action import Action, Kind, parse_action
from autopar.schedules.exchange import from_csv, to_csv
from autopar.schedules.generators.build import GENERATORS, build
from autopar.schedules.generators.out_of_order import (
    Gain,
    KPoint,
    multi_stream_gain,
    priority_iteration_s,
    reverse_first_k_gain,
)
from autopar.schedules.generators.search import (
    Candidate,
    SearchProblem,
    SearchResult,
    search_schedule,
)
from autopar.schedules.schedule import (
    PipelineShape,
    Resource,
    Schedule,
    Step,
    format_schedule,
    parse_schedule,
    parse_step,
    step,
)
from autopar.schedules.simulate.durations import CoRun, Durations, Link, Links, Memory
from autopar.schedules.simulate.simulator import simulate
from autopar.schedules.simulate.timeline import Interval, MemoryPoint, Timeline
from autopar.schedules.simulate.trace import trace_events, trace_json
from autopar.schedules.transforms.activations import with_offloading, with_recomputation
from autopar.schedules.transforms.communication import with_communication
from autopar.schedules.transforms.reductions import with_reductions
from autopar.schedules.verify import format_grid, verify

__all__ = [
    "GENERATORS",
    "Action",
    "Candidate",
    "CoRun",
    "Durations",
    "Gain",
    "Interval",
    "KPoint",
    "Kind",
    "Link",
    "Links",
    "Memory",
    "MemoryPoint",
    "PipelineShape",
    "Resource",
    "Schedule",
    "SearchProblem",
    "SearchResult",
    "Step",
    "Timeline",
    "build",
    "format_grid",
    "format_schedule",
    "from_csv",
    "multi_stream_gain",
    "parse_action",
    "parse_schedule",
    "parse_step",
    "priority_iteration_s",
    "reverse_first_k_gain",
    "search_schedule",
    "simulate",
    "step",
    "to_csv",
    "trace_events",
    "trace_json",
    "verify",
    "with_communication",
    "with_offloading",
    "with_recomputation",
    "with_reductions",
]
